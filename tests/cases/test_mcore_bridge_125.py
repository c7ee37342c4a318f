"""mcore-bridge#125: a weight is loaded into its quantized rows, and the columns that dX reads stay the zeros of before.

A quantized weight has two copies, by rows for the forward and by columns for dX. Both are made when the module is, of
whatever is there then. A loader that fills the first and finds the second "not None" leaves it: losses look right, dW
too, and next to nothing reaches the layers below.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from samebits.judge import vjp
from samebits.judge.modules import MODULES
from samebits.judge.quantized import Quantized, Recipe
from samebits.judge.vjp import Measured

NAMES = ("Float8BlockScaling", "Float8CurrentScaling", "MXFP8BlockScaling")


class Weight:
    """rows: for the forward. columns: for dX, made at construction and, as `mended`, at each load."""

    def __init__(self, recipe: Recipe, shape: torch.Size, dtype: torch.dtype, mended: bool):
        self.recipe, self.mended = recipe, mended
        empty = torch.zeros(shape, dtype=dtype)
        self.rows = recipe.weight.quantize(empty)
        self.columns: Quantized | None = recipe.weight_columns.quantize(empty)

    def load(self, value: Tensor) -> None:
        self.rows = self.recipe.weight.quantize(value)
        if self.columns is None or self.mended:
            self.columns = self.recipe.weight_columns.quantize(value)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, master: Any, bias: Any, weight: Weight) -> Any:
        rows = x.reshape(-1, x.shape[-1])
        ctx.weight, ctx.rows, ctx.shape = weight, rows, x.shape
        wide = [one.dequantize(torch.float32).double() for one in (weight.recipe.x.quantize(rows), weight.rows)]
        return (wide[0] @ wide[1].t() + bias.double()).to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        recipe, rows = ctx.weight.recipe, grad.reshape(-1, grad.shape[-1])
        wide = [recipe.grad.quantize(rows), ctx.weight.columns, recipe.grad_columns.quantize(rows)]
        at_x, weight, at_rows = (one.dequantize(torch.float32).double() for one in wide)
        used = recipe.x_columns.quantize(ctx.rows).dequantize(torch.float32).double()
        grads = ((at_x @ weight).view(ctx.shape), at_rows.t() @ used, rows.double().sum(0))
        return *(one.to(grad.dtype) for one in grads), None


def judged(name: str, mended: bool) -> dict[str, Measured]:
    module = MODULES[f"quantized linear, {name}, default"]
    problem = module.problem("plain", torch.bfloat16, "random", 0)
    master = problem.inputs["weight"]
    weight = Weight(problem.constants["recipe"], master.shape, master.dtype, mended)
    weight.load(master)
    found = vjp.compare(lambda t, c: _Linear.apply(t["x"], t["weight"], t["bias"], weight), problem)
    return {one.tensor: one for one in found}


@pytest.mark.parametrize("name", NAMES)
def test_columns_that_a_load_makes_anew_are_right(name: str) -> None:
    assert [one for one in judged(name, mended=True).values() if one.wrong] == []


@pytest.mark.parametrize("name", NAMES)
def test_columns_of_zeros_are_named_by_dx_alone(name: str) -> None:
    """With a norm of zero a cosine is undefined, and none is made up."""
    found = judged(name, mended=False)
    assert {one.tensor for one in found.values() if one.wrong} == {"x"}
    assert found["x"].norm_ratio == 0 and found["x"].cosine is None and found["x"].relative == 1
