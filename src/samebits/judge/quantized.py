"""Quantized formats, and a linear layer with its declared backward, in plain PyTorch.

Written from the formats' definitions and from what Transformer Engine 2.20.2 documents and computes, so that on a card
its quantized bytes and scales can be compared with these bit for bit. Nothing of Transformer Engine is imported.

| format | data | scale of a block |
|---|---|---|
| FP8, whole tensor or blocks | E4M3 or E5M2 | FP32, 1 / (largest ÷ amax), or that with its mantissa cleared |
| MXFP8 | E4M3 | E8M0, amax ÷ 448 rounded up to a power of two; blocks of 1 x 32 |
| NVFP4 | E2M1 | E4M3 under one FP32 scale of the tensor; blocks of 1 x 16 or 16 x 16 |

Data is rounded to the nearest value, ties to even, and saturates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

FP32_MAX = torch.finfo(torch.float32).max
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the magnitudes of the codes 0 to 7; 8 to 15 are their negatives
E2M1_MAX, E4M3_MAX = E2M1[-1], 448.0
# A tie between two codes goes to the even one, so the code above a midpoint begins at it or just after it.
_MIDPOINTS = tuple((low + high) / 2 for low, high in itertools.pairwise(E2M1))
_SIXTH, _ALL_RANGE = (float(torch.tensor(1.0 / n, dtype=torch.float32)) for n in (E2M1_MAX, E2M1_MAX * E4M3_MAX))

Mode = Literal["default", "unquant", "dequant"]
MODES: tuple[Mode, ...] = ("default", "unquant", "dequant")


@dataclass(frozen=True)
class Quantized:
    """A tensor [M, K] in a format.

    data: [M, K], the FP8 values, or uint8 codes of E2M1 one an element. scale: what a block is multiplied with to be
    decoded, [blocks of rows, blocks of columns], as the format stores it: FP32, uint8 exponents biased by 127 (E8M0),
    or E4M3. block: rows and columns of a block. amax: FP32 scalar, the tensor's, if the format has a second scale.
    """

    data: Tensor
    scale: Tensor
    block: tuple[int, int]
    amax: Tensor | None = None

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The values [M, K]: data times scale in FP32, rounded once to `dtype`. Of no rows, none."""
        if self.data.dtype == torch.uint8:
            magnitudes = torch.tensor(E2M1, device=self.data.device)
            values = torch.where(self.data >= 8, -1.0, 1.0) * magnitudes[(self.data & 7).long()]
            assert self.amax is not None
            scale = self.scale.float() * self.amax * _ALL_RANGE
        elif self.scale.dtype == torch.uint8:
            values, scale = self.data.float(), _power_of_two(self.scale.int() - 127)
        else:
            values, scale = self.data.float(), self.scale
        return (values * _spread(scale, self.block, self.data.shape)).to(dtype)


class Format(Protocol):
    """One way to quantize a tensor [M, K]."""

    def quantize(self, x: Tensor) -> Quantized: ...


@dataclass(frozen=True)
class Float8:
    """FP8 with an FP32 scale a block: Transformer Engine's Float8BlockScaling and Float8CurrentScaling.

    block: rows and columns of a block; None: the whole tensor. power_of_two: the scale's mantissa is cleared, so that
    the block's largest value is below the format's by less than two. amax_epsilon: the least amax that a scale is made
    of. static_scale: what values are multiplied with, in place of one made of the amax; then values may saturate.
    """

    block: tuple[int, int] | None = None
    power_of_two: bool = False
    amax_epsilon: float = 0.0
    dtype: torch.dtype = torch.float8_e4m3fn
    static_scale: float | None = None

    def quantize(self, x: Tensor) -> Quantized:
        """x: [M, K], finite, bf16 or fp32. ValueError otherwise."""
        _check(x)
        block = self.block or (max(x.shape[0], 1), max(x.shape[1], 1))
        largest = torch.finfo(self.dtype).max
        amax = _amax(x, block).clamp(min=self.amax_epsilon)
        if self.static_scale is not None:
            scale = torch.full_like(amax, self.static_scale)
        else:
            scale = _quotient(largest, amax)
            # Where the quotient overflows: the largest value of the tensor's dtype for a block, of FP32 for the whole.
            scale = torch.where(scale.isinf(), torch.finfo(x.dtype).max if self.block else FP32_MAX, scale)
            scale = torch.where(amax == 0, 1.0, scale)
        if self.power_of_two:
            scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
        data = (x.float() * _spread(scale, block, x.shape)).clamp(-largest, largest).to(self.dtype)
        return Quantized(data, _quotient(1.0, scale), block)


@dataclass(frozen=True)
class MXFP8:
    """E4M3 in blocks of 32 values of a row, or of a column, under a power of two: MXFP8BlockScaling."""

    columnwise: bool = False

    def quantize(self, x: Tensor) -> Quantized:
        """x: [M, K], finite, bf16 or fp32, the scaled dimension a multiple of 32. ValueError otherwise."""
        _check(x)
        block = (32, 1) if self.columnwise else (1, 32)
        _fits(x, block)
        bits = (_amax(x, block) * float(torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32))).view(torch.int32)
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        # Rounded up, but for a subnormal that 2^-127, the least scale, holds.
        up = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 0x400000))
        biased = exponent + up.int()
        data = (x.float() * _spread(_power_of_two(127 - biased), block, x.shape)).clamp(-E4M3_MAX, E4M3_MAX)
        return Quantized(data.to(torch.float8_e4m3fn), biased.to(torch.uint8), block)


@dataclass(frozen=True)
class NVFP4:
    """E2M1 in blocks of 16 values of a row or column, or of 16 x 16, under an E4M3 scale and one of the tensor.

    NVFP4BlockScaling without random Hadamard transforms, stochastic rounding and the choice between four and six.
    """

    block: tuple[int, int] = (1, 16)

    def quantize(self, x: Tensor) -> Quantized:
        """x: [M, K], finite, bf16 or fp32, its sizes multiples of the block's. ValueError otherwise."""
        _check(x)
        _fits(x, self.block)
        amax = x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
        encode = _quotient(E4M3_MAX * E2M1_MAX, amax).clamp(max=FP32_MAX)
        encode = torch.where((amax == 0) | (encode == 0), 1.0, encode)
        scale = (_amax(x, self.block) * (encode * _SIXTH)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
        factor = _quotient(1.0, scale.float() * _quotient(1.0, encode)).clamp(max=FP32_MAX)
        return Quantized(_to_e2m1(x.float() * _spread(factor, self.block, x.shape)), scale, self.block, amax)


def _to_e2m1(values: Tensor) -> Tensor:
    """FP32 values to uint8 codes: nearest, ties to the even code, beyond 6 to 6; the sign of a zero is kept."""
    magnitude, codes = values.abs(), torch.zeros_like(values, dtype=torch.uint8)
    for below, midpoint in enumerate(_MIDPOINTS):
        codes += (magnitude > midpoint) if below % 2 == 0 else (magnitude >= midpoint)
    return codes + 8 * torch.signbit(values).to(torch.uint8)


def _quotient(number: float, by: Tensor) -> Tensor:
    """An FP32 quotient rounded once; torch's number / tensor is a product with the reciprocal, rounded twice."""
    return torch.full_like(by, number) / by


def _power_of_two(exponent: Tensor) -> Tensor:
    """2 to an int exponent from -127 to 127, in FP32; the least is a subnormal."""
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)


def _check(x: Tensor) -> None:
    if x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"a tensor of {x.dtype}, {tuple(x.shape)}: quantize bf16 or fp32 [M, K]")
    if not torch.isfinite(x).all():
        raise ValueError(
            "a tensor with NaN or infinity: what a kernel makes of one is in no definition; quantize finite"
        )


def _fits(x: Tensor, block: tuple[int, int]) -> None:
    if any(size % of for size, of in zip(x.shape, block, strict=True)):
        raise ValueError(f"a tensor {tuple(x.shape)} is no whole number of blocks {block}: pad it")


def _amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest magnitude of each block, FP32; the last blocks may be smaller."""
    rows, columns = (math.ceil(size / of) for size, of in zip(x.shape, block, strict=True))
    short = (rows * block[0] - x.shape[0], columns * block[1] - x.shape[1])
    padded = torch.nn.functional.pad(x.abs().float(), (0, short[1], 0, short[0]))
    if not padded.numel():
        return padded.new_zeros(rows, columns)
    return padded.view(rows, block[0], columns, block[1]).amax(dim=(1, 3))


def _spread(scale: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """A value a block to one an element."""
    whole = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return whole[: shape[0], : shape[1]]


@dataclass(frozen=True)
class Recipe:
    """How a linear layer's operands are quantized: inputs [M, K], weights [N, K], gradients [M, N].

    `x`, `weight` and `grad` serve the products along their last dimension; the `_columns` ones those along the first:
    dX contracts the weight's rows, dW the tokens.
    """

    x: Format
    weight: Format
    grad: Format
    x_columns: Format
    weight_columns: Format
    grad_columns: Format


_SQUARE, _ROW, _COLUMN = (Float8(block, power_of_two=True) for block in ((128, 128), (1, 128), (128, 1)))
_TENSOR, _WIDE = Float8(), Float8(dtype=torch.float8_e5m2)
_MX, _MX_COLUMNS = MXFP8(), MXFP8(columnwise=True)
_NV, _NV_COLUMNS, _NV_SQUARE = NVFP4((1, 16)), NVFP4((16, 1)), NVFP4((16, 16))
# By the names of Transformer Engine's recipes, with their defaults but for what NVFP4 leaves out.
RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "Float8BlockScaling": Recipe(_ROW, _SQUARE, _ROW, _COLUMN, _SQUARE, _COLUMN),
        "Float8CurrentScaling": Recipe(_TENSOR, _TENSOR, _WIDE, _TENSOR, _TENSOR, _WIDE),
        "MXFP8BlockScaling": Recipe(_MX, _MX, _MX, _MX_COLUMNS, _MX_COLUMNS, _MX_COLUMNS),
        "NVFP4BlockScaling": Recipe(_NV, _NV_SQUARE, _NV, _NV_COLUMNS, _NV_SQUARE, _NV_COLUMNS),
    }
)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, mode: Mode) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        used_x, used_weight = recipe.x.quantize(rows), recipe.weight.quantize(weight)
        ctx.recipe, ctx.mode, ctx.shape = recipe, mode, x.shape
        ctx.used = used_x, used_weight
        ctx.save_for_backward(rows, weight)
        out = product(used_x.dequantize(torch.float32), used_weight.dequantize(torch.float32).t())
        if bias is not None:
            out = out + bias.double()
        return out.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        rows, weight = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        at_weight = at_rows = grad
        if ctx.mode == "dequant":
            rows, weight = (one.dequantize(rows.dtype) for one in ctx.used)
        elif ctx.mode == "default":
            recipe = ctx.recipe
            weight = recipe.weight_columns.quantize(weight).dequantize(torch.float32)
            rows = recipe.x_columns.quantize(rows).dequantize(torch.float32)
            at_weight = recipe.grad.quantize(grad).dequantize(torch.float32)
            at_rows = recipe.grad_columns.quantize(grad).dequantize(torch.float32)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = product(at_weight, weight).to(grad.dtype).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = product(at_rows.t(), rows).to(grad.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.double().sum(0).to(grad.dtype)
        return grad_x, grad_weight, grad_bias, None, None


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] times b [K, N] in FP64: a reference has no order of summation of its own."""
    return a.double() @ b.double()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, mode: Mode) -> Tensor:
    """x [..., K] and weight [N, K], bf16 or fp32, quantized, multiplied, rounded once to the dtype of x -> [..., N].

    The modes are seed 003's. `default`: dX and dW of operands quantized along the dimension that each contracts, the
    gradient too. `unquant`: of x and weight as they came. `dequant`: of the values that the forward used, rounded to
    the dtype of x. The gradient of the bias is the unquantized gradient's sum in each.

    Raises:
        ValueError: another mode, NaN or infinity, or sizes that the recipe's blocks do not divide.
    """
    if mode not in MODES:
        raise ValueError(f"backward mode {mode!r}: give one of {', '.join(MODES)}")
    return _Linear.apply(x, weight, bias, recipe, mode)
