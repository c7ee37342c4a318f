"""The quantized formats against their definitions: every code, exact ties, scales by exact division, and the modes."""

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.judge.quantized import E2M1, MODES, MXFP8, NVFP4, RECIPES, Float8, Mode, Quantized, Recipe, linear

FP8 = {torch.float8_e4m3fn: (4, 3, 7), torch.float8_e5m2: (5, 2, 15)}  # bits of exponent and mantissa, bias


def decoded(code: int, dtype: torch.dtype) -> Fraction | None:
    """The value of an FP8 byte; None for one that is not finite."""
    exponent_bits, mantissa_bits, bias = FP8[dtype]
    exponent, mantissa = (code >> mantissa_bits) & (2**exponent_bits - 1), code & (2**mantissa_bits - 1)
    top = exponent == 2**exponent_bits - 1
    if top and (dtype is torch.float8_e5m2 or mantissa == 2**mantissa_bits - 1):
        return None
    value = Fraction(mantissa, 2**mantissa_bits) + (1 if exponent else 0)
    return (-1 if code & 0x80 else 1) * value * Fraction(2) ** (max(exponent, 1) - bias)


def nearest(value: Fraction, table: list[Fraction]) -> int:
    """The index of the nearest magnitude of a rising table; of two, the even index."""
    distances = [abs(abs(value) - one) for one in table]
    least = min(distances)
    return next(i for i in (*range(0, len(table), 2), *range(1, len(table), 2)) if distances[i] == least)


TABLES = {dtype: [v for code in range(0x80) if (v := decoded(code, dtype)) is not None] for dtype in FP8}
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def fp32(value: Fraction) -> float:
    """A value above 0 rounded to FP32, nearest even."""
    exponent = max(math.floor(math.log2(value)) if value < 2**100 else 126, -126)
    while Fraction(2) ** exponent > value and exponent > -126:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= value:
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    return float(round(value / unit) * unit)  # Python rounds a fraction to the even integer


@pytest.mark.parametrize("dtype", list(FP8), ids=str)
def test_a_cast_to_fp8_is_to_the_nearest_and_saturates(dtype: torch.dtype) -> None:
    """Every value of the format, both neighbours of every midpoint, the midpoints, and beyond the last."""
    table = TABLES[dtype]
    middles = [float((a + b) / 2) for a, b in itertools.pairwise(table)]
    picked = [*map(float, table), *middles, float(table[-1]) * 1.06, 1e30]
    picked += [float(np.nextafter(np.float32(m), np.float32(side))) for m in middles for side in (0, 1e30)]
    values = torch.tensor([[*picked, *(-p for p in picked)]])
    quantized = Float8(dtype=dtype, static_scale=1.0).quantize(values)
    expected = [nearest(Fraction(v), table) + (0x80 if math.copysign(1, v) < 0 else 0) for v in values[0].tolist()]
    assert quantized.data.view(torch.uint8)[0].tolist() == expected


def test_a_cast_to_e2m1_is_to_the_nearest_and_saturates() -> None:
    """Every value of the format, every midpoint and both its neighbours; a six in each block makes its factor one."""
    table = [Fraction(v) for v in E2M1]
    middles = [float((a + b) / 2) for a, b in itertools.pairwise(table)]
    picked = [*E2M1, *middles, *(float(np.nextafter(np.float32(m), np.float32(s))) for m in middles for s in (0, 9))]
    picked = [*picked, *(-v for v in picked)]
    picked += [0.0] * (-len(picked) % 15)
    values = torch.tensor([[6.0, *picked[i : i + 15]] for i in range(0, len(picked), 15)])
    expected = [[nearest(Fraction(v), table) + 8 * (math.copysign(1, v) < 0) for v in row] for row in values.tolist()]
    assert NVFP4().quantize(values).data.tolist() == expected


@settings(max_examples=200, deadline=None)
@given(st.floats(min_value=2.0**-140, max_value=float(torch.finfo(torch.float32).max), width=32), st.booleans())
def test_a_blocks_scale_is_one_division(amax: float, power_of_two: bool) -> None:
    scale = Fraction(448) / Fraction(amax)
    most = Fraction(torch.finfo(torch.float32).max)
    encode = float(most) if scale > most else fp32(scale)
    if power_of_two:
        encode = 2.0 ** math.floor(math.log2(encode)) if encode < 2.0**127 else 2.0**127
    quantized = Float8((1, 128), power_of_two=power_of_two).quantize(torch.tensor([[amax, -amax / 2]]))
    assert quantized.scale.item() == fp32(1 / Fraction(encode))


def test_an_amax_below_epsilon_is_epsilon_and_a_block_of_zeros_has_the_scale_one() -> None:
    x = torch.tensor([[2.0**-20, -(2.0**-21)], [0.0, 0.0], [3.0, 1.0]])
    assert Float8((1, 128), amax_epsilon=2.0**-6).quantize(x).scale[:, 0].tolist() == [
        fp32(1 / Fraction(448 * 2**6)), fp32(1 / Fraction(448 * 2**6)), fp32(1 / Fraction(fp32(Fraction(448, 3)))),
    ]  # fmt: skip
    assert Float8((1, 128)).quantize(x).scale[1].item() == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_scale_that_overflows_is_the_largest_value_of_the_dtype(dtype: torch.dtype) -> None:
    """Of a block its own dtype's, of a whole tensor FP32's; with its mantissa cleared both are 2^127."""
    x = torch.full((1, 2), 2.0**-130, dtype=dtype)
    largest = Fraction(torch.finfo(dtype).max), Fraction(torch.finfo(torch.float32).max)
    for block, most in zip(((1, 128), None), largest, strict=True):
        assert Float8(block).quantize(x).scale.item() == fp32(1 / most)
        assert Float8(block, power_of_two=True).quantize(x).scale.item() == 2.0**-127


@settings(max_examples=200, deadline=None)
@given(st.floats(min_value=0, max_value=float(torch.finfo(torch.float32).max), width=32))
def test_an_mx_scale_is_the_least_power_of_two_that_saturates_nothing(amax: float) -> None:
    """Up to the rounding of 1 / 448, and with the least scale of all for a block of zeros."""
    x = torch.zeros(1, 32)
    x[0, 5] = amax
    biased = int(MXFP8().quantize(x).scale.item())
    if biased:
        assert Fraction(amax) <= 448 * Fraction(2) ** (biased - 127) * (1 + Fraction(1, 2**23))
        assert Fraction(amax) > 448 * Fraction(2) ** (biased - 128) * (1 - Fraction(1, 2**23))
    else:
        assert Fraction(amax) <= 448 * Fraction(2) ** -127 * (1 + Fraction(1, 2**22))


def test_an_nvfp4_block_is_decoded_by_two_scales() -> None:
    """By hand, in exact arithmetic but for the roundings of the definition."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[3, 16:32] = 0
    quantized = NVFP4().quantize(x)
    encode = np.float32(2688) / np.float32(quantized.amax)
    for row, block in ((0, 0), (3, 1), (31, 3)):
        part = x[row, 16 * block : 16 * block + 16].float().numpy()
        target = float(np.abs(part).max() * (encode * (np.float32(1) / np.float32(6))))
        code = nearest(Fraction(target), TABLES[torch.float8_e4m3fn])
        assert int(quantized.scale.view(torch.uint8)[row, block]) == code
        decode = np.float32(float(TABLES[torch.float8_e4m3fn][code]))
        with np.errstate(divide="ignore"):
            factor = np.minimum(np.float32(1) / (decode * (np.float32(1) / encode)), np.finfo(np.float32).max)
        for i, value in enumerate(part):
            told = int(quantized.data[row, 16 * block + i])
            assert told == nearest(Fraction(float(value * factor)), [Fraction(v) for v in E2M1]) + 8 * bool(
                np.signbit(value)
            )
    assert float(quantized.dequantize(torch.float32)[3, 16:32].abs().max()) == 0


@pytest.mark.parametrize("block", [(128, 128), (1, 128), (128, 1), None], ids=str)
@pytest.mark.parametrize("shape", [(300, 257), (1, 1), (128, 128), (0, 128), (5, 0)], ids=str)
def test_tails_and_empty_tensors_have_their_blocks(block: tuple[int, int] | None, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    quantized = Float8(block, power_of_two=True).quantize(x)
    rows, columns = quantized.block
    assert quantized.scale.shape == (math.ceil(shape[0] / rows), math.ceil(shape[1] / columns))
    for i in range(quantized.scale.shape[0]):
        for j in range(quantized.scale.shape[1]):
            part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            alone = Float8(power_of_two=True).quantize(x[part])
            assert torch.equal(alone.data.view(torch.uint8), quantized.data[part].view(torch.uint8))
            assert alone.scale.item() == quantized.scale[i, j].item()
    back = quantized.dequantize(torch.bfloat16)
    assert back.shape == x.shape and back.dtype == torch.bfloat16


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["MXFP8BlockScaling", "NVFP4BlockScaling", "Float8BlockScaling"]))
def test_what_is_quantized_is_quantized_no_further(seed: int, name: str) -> None:
    """A power of two keeps the values that it decoded; NVFP4's scale may move by one step, never the sign or a zero."""
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(seed)) * 2.0 ** (seed % 40 - 20)
    once = RECIPES[name].x.quantize(x).dequantize(torch.float32)
    twice = RECIPES[name].x.quantize(once).dequantize(torch.float32)
    if name == "NVFP4BlockScaling":
        assert torch.equal(once == 0, twice == 0) and torch.equal(once.sign(), twice.sign())
    else:
        assert torch.equal(once, twice)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_nan_and_infinity_are_refused(wrong: float) -> None:
    x = torch.zeros(32, 32)
    x[1, 2] = wrong
    for one in (Float8(), MXFP8(), NVFP4()):
        with pytest.raises(ValueError, match="NaN or infinity"):
            one.quantize(x)


@pytest.mark.parametrize(
    ("one", "shape"), [(MXFP8(), (3, 33)), (MXFP8(columnwise=True), (33, 3)), (NVFP4((16, 16)), (8, 16))], ids=str
)
def test_sizes_that_blocks_do_not_divide_are_refused(one: Any, shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no whole number of blocks"):
        one.quantize(torch.ones(shape))


# --- the linear layer


def operands(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    shapes = ((2, 32, 128), (64, 128), (64,), (2, 32, 64))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def gradients(recipe: Recipe, mode: Mode, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    x, weight, bias, grad = operands(dtype)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    out = linear(leaves[0], leaves[1], leaves[2], recipe, mode)
    assert out.dtype == dtype and out.shape == grad.shape
    found = torch.autograd.grad(out, leaves, grad)
    return {"out": out.detach(), **dict(zip(("x", "weight", "bias"), found, strict=True))}


@pytest.mark.parametrize("name", list(RECIPES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_forward_is_the_same_in_every_mode_and_the_bias_too(name: str, dtype: torch.dtype) -> None:
    found = [gradients(RECIPES[name], mode, dtype) for mode in MODES]
    assert all(torch.equal(found[0][key], one[key]) for one in found for key in ("out", "bias"))
    assert all(torch.equal(found[0]["bias"], operands(dtype)[3].double().sum((0, 1)).to(dtype)) for _ in found)


@pytest.mark.parametrize("name", list(RECIPES))
def test_each_mode_multiplies_what_it_says(name: str) -> None:
    recipe = RECIPES[name]
    x, weight, _, grad = operands()
    rows, grad = x.view(-1, 128), grad.view(-1, 64)

    def used(one: Any, t: torch.Tensor) -> torch.Tensor:
        quantized: Quantized = one.quantize(t)
        return quantized.dequantize(torch.bfloat16).double()

    unquant, dequant = gradients(recipe, "unquant"), gradients(recipe, "dequant")
    assert torch.equal(unquant["x"].view(-1, 128), (grad.double() @ weight.double()).bfloat16())
    assert torch.equal(unquant["weight"], (grad.double().t() @ rows.double()).bfloat16())
    assert torch.equal(dequant["x"].view(-1, 128), (grad.double() @ used(recipe.weight, weight)).bfloat16())
    assert torch.equal(dequant["weight"], (grad.double().t() @ used(recipe.x, rows)).bfloat16())


@pytest.mark.parametrize(
    ("name", "default", "dequant"), [("Float8CurrentScaling", 5.9e-2, 2.7e-2), ("Float8BlockScaling", 3.8e-2, 2.7e-2)]
)
def test_the_modes_distances_are_those_seen_on_an_h200(name: str, default: float, dequant: float) -> None:
    """Relative L2 of dX from the unquantized gradient, as Transformer Engine 2.20.2 had it there, within a tenth."""
    generator = torch.Generator().manual_seed(3)
    x, weight, grad = (torch.randn(s, generator=generator).bfloat16() for s in ((256, 512), (384, 512), (256, 384)))
    exact = grad.double() @ weight.double()
    for mode, seen in (("default", default), ("dequant", dequant), ("unquant", 1.7e-3)):
        leaf = x.clone().requires_grad_()
        mode_named: Mode = mode  # type: ignore[assignment]
        (found,) = torch.autograd.grad(linear(leaf, weight, None, RECIPES[name], mode_named), leaf, grad)
        assert ((found - exact).norm() / exact.norm()).item() == pytest.approx(seen, rel=0.1)


def test_an_unknown_mode_is_refused_with_what_is_allowed() -> None:
    x, weight, bias, _ = operands()
    mode: Any = "high_precision"
    with pytest.raises(ValueError, match="'high_precision': give one of default, unquant, dequant"):
        linear(x, weight, bias, RECIPES["Float8BlockScaling"], mode)
