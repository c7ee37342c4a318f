"""axolotl#3745: dX is of a transposed copy of the weight that was quantized again, not of the value of the forward.

A kernel for dX wants the weight by columns. Where that copy is made by decoding the quantized weight, transposing and
quantizing it anew, by other blocks or with other scales, it holds other values; cosines stay near one, and so it goes
unseen. A copy of square blocks whose codes and scales are transposed is the same weight.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samebits.judge import vjp
from samebits.judge.modules import MODULES
from samebits.judge.quantized import Float8, Quantized
from samebits.judge.vjp import Measured

MODULE = MODULES["quantized linear, Float8BlockScaling, dequant"]


class Frozen(torch.autograd.Function):
    """A linear layer whose weight is frozen, in quantized form; `copy` makes the weight that dX multiplies with."""

    @staticmethod
    def forward(ctx: Any, x: Any, recipe: Any, weight: Quantized, bias: Any, copy: Any) -> Any:
        rows = x.reshape(-1, x.shape[-1])
        ctx.weight, ctx.copy, ctx.shape = weight, copy, x.shape
        wide = [one.dequantize(torch.float32).double() for one in (recipe.x.quantize(rows), weight)]
        return (wide[0] @ wide[1].t() + bias.double()).to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        rows = grad.reshape(-1, grad.shape[-1]).float()
        at_x = (rows @ ctx.copy(ctx.weight, grad.dtype).float()).to(grad.dtype)
        return at_x.view(ctx.shape), None, None, None, None


def decoded(weight: Quantized, dtype: torch.dtype) -> torch.Tensor:
    return weight.dequantize(dtype)


def transposed_codes(weight: Quantized, dtype: torch.dtype) -> torch.Tensor:
    copy = Quantized(weight.data.t().contiguous(), weight.scale.t().contiguous(), weight.block[::-1])
    return copy.dequantize(dtype).t()


def requantized(block: tuple[int, int], power_of_two: bool) -> Any:
    def copy(weight: Quantized, dtype: torch.dtype) -> torch.Tensor:
        by_column = weight.dequantize(torch.float32).t().contiguous()
        return Float8(block, power_of_two).quantize(by_column).dequantize(dtype).t()

    return copy


def dx(copy: Any, case: str = "unaligned tails") -> Measured:
    problem = MODULE.problem(case, torch.bfloat16, "random", 0)
    frozen = problem.constants["recipe"].weight.quantize(problem.inputs["weight"])

    def layer(t: Any, c: Any) -> Any:
        return Frozen.apply(t["x"], c["recipe"], frozen, t["bias"].detach(), copy)

    return next(one for one in vjp.compare(layer, problem) if one.tensor == "x")


@pytest.mark.parametrize("case", list(MODULE.cases))
@pytest.mark.parametrize("copy", [decoded, transposed_codes, requantized((128, 128), power_of_two=True)])
def test_a_copy_with_the_forwards_values_gives_its_dx(copy: Any, case: str) -> None:
    """The same square blocks under powers of two decode to what they were: nothing is rounded a second time."""
    assert dx(copy, case).wrong is None


@pytest.mark.parametrize("block", [(1, 128), (128, 128)], ids=str)
def test_a_copy_that_is_quantized_again_is_named(block: tuple[int, int]) -> None:
    one = dx(requantized(block, power_of_two=False))
    print(f"{block}: relative {one.relative:.2e}, cosine 1 - {1 - (one.cosine or 0):.1e}, {one.multiple:.0f} floors")
    assert one.wrong == "off" and one.cosine is not None and one.cosine > 0.999
