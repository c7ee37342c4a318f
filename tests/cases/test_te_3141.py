"""TransformerEngine#3141: `save_original_input` overrides the backward mode, so dW is not of what the forward used.

A linear layer may keep its original input instead of the quantized one, to save memory. In the mode `dequant` the
weight's gradient is of the quantized input, and keeping the other one changed it silently. A mode decides what is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from samebits.judge import vjp
from samebits.judge.modules import MODULES
from samebits.judge.quantized import RECIPES, Mode

RECIPE = RECIPES["Float8BlockScaling"]


@dataclass(frozen=True)
class Layer:
    """obeys: the mode decides what is kept; else `save_original_input` does."""

    mode: Mode
    save_original_input: bool
    obeys: bool

    def __call__(self, t: Any, c: Any) -> torch.Tensor:
        original = {"unquant": True, "dequant": False}[self.mode] if self.obeys else self.save_original_input
        return _Function.apply(t["x"], t["weight"], t["bias"], self.mode, original)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, mode: Mode, keep_original: bool) -> Any:
        rows = x.reshape(-1, x.shape[-1])
        used = RECIPE.x.quantize(rows), RECIPE.weight.quantize(weight)
        ctx.kept = rows if keep_original else used[0].dequantize(x.dtype)
        ctx.weight = weight if mode == "unquant" else used[1].dequantize(x.dtype)
        ctx.shape = x.shape
        wide = [one.dequantize(torch.float32).double() for one in used]
        return (wide[0] @ wide[1].t() + bias.double()).to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        rows = grad.reshape(-1, grad.shape[-1]).float()
        at_x = (rows @ ctx.weight.float()).to(grad.dtype).view(ctx.shape)
        return at_x, (rows.t() @ ctx.kept.float()).to(grad.dtype), rows.sum(0).to(grad.dtype), None, None


def named(layer: Layer) -> set[str]:
    """The tensors whose gradients are not those of the mode, over all cases of a quantized linear."""
    module = MODULES[f"quantized linear, Float8BlockScaling, {layer.mode}"]
    found: set[str] = set()
    for case in ("plain", "scales", "unaligned tails"):
        problem = module.problem(case, torch.bfloat16, "random", 0)
        found |= {one.tensor for one in vjp.compare(layer, problem) if one.wrong}
    return found


@pytest.mark.parametrize("save_original_input", [False, True])
@pytest.mark.parametrize("mode", ["unquant", "dequant"])
def test_a_mode_decides_what_is_kept(mode: Mode, save_original_input: bool) -> None:
    assert named(Layer(mode, save_original_input, obeys=True)) == set()


@pytest.mark.parametrize(("mode", "save_original_input"), [("dequant", True), ("unquant", False)])
def test_an_input_that_is_kept_against_the_mode_is_named_by_the_weights_gradient(
    mode: Mode, save_original_input: bool
) -> None:
    assert named(Layer(mode, save_original_input, obeys=False)) == {"weight"}
