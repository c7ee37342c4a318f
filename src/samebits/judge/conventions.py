"""Layer 2: what a convention of the gradient contract costs, on a fixed checkpoint and batch.

Under quantization dX may be computed from the value that the forward used, which is the forward's own derivative, or
from the master weight; and dW from the quantized or the original activation. Both are run through one model whose
forward is the same, and compared for every quantized layer. Nothing here is right or wrong: what is demanded is that
all is there.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .quantized import RECIPES, Format
from .vjp import Bridge, Outputs, Problem, Tensors, visible_with_surrogate

CLASSES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")  # those that are quantized, in a layer's order
_BLOCK, _CURRENT, _MX, _NV = (
    RECIPES[name] for name in ("Float8BlockScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "NVFP4BlockScaling")
)
# Weight and activation; None: as it is.
COMBINATIONS: dict[str, tuple[Format, Format | None]] = {
    "FP8 128x128, BF16": (_BLOCK.weight, None),
    "FP8 128x128, FP8 1x128": (_BLOCK.weight, _BLOCK.x),
    "FP8 tensor, FP8 tensor": (_CURRENT.weight, _CURRENT.x),
    "MXFP8, MXFP8": (_MX.weight, _MX.x),
    "NVFP4, BF16": (_NV.weight, None),
    "NVFP4, FP8 1x128": (_NV.weight, _BLOCK.x),
    "NVFP4, NVFP4": (_NV.weight, _NV.x),
}
# An outlier: a layer further from the other convention than so many times the median of its class, or with norms so far
# apart. Set before anything was measured.
OUTLIER_TIMES, OUTLIER_RATIO = 2.0, 0.05


@dataclass
class Used:
    """One quantized layer of a forward: its operands, and after the backward their gradients."""

    x: Tensor
    weight: Tensor
    out: Tensor
    used_weight: Tensor


class Quantizing(Bridge):
    """Shows a composite quantized linear layers, and lets the gradient pass by one convention.

    master: dX from the master weight, and dW from the activation as it came; else both of what the forward used. The
    last linear of a model, its output layer, is not quantized: `layers` says how many are."""

    def __init__(self, of: Problem, weight: Format, x: Format | None, layers: int, master: bool):
        super().__init__(of.dtype, of.visible)
        self.formats, self.layers, self.master = (weight, x), layers, master
        self.used: list[Used] = []

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        if len(self.used) == self.layers:
            return super().linear(x, weight)
        x, weight = x.view_as(x), weight.view_as(weight)  # gradients of this use alone
        of_weight, of_x = self.formats
        with torch.no_grad():
            narrow_x, narrow_weight = (t.detach().to(self.dtype) for t in (x, weight))
            rows = narrow_x.reshape(-1, x.shape[-1])
            used_x = (of_x.quantize(rows).dequantize(self.dtype) if of_x else rows).double().view(x.shape)
            used_weight = of_weight.quantize(narrow_weight).dequantize(self.dtype).double()
            value = (used_x @ used_weight.T).to(self.dtype).double()
        if self.master:
            surrogate = x @ weight.T
        else:
            surrogate = visible_with_surrogate(used_x, x) @ visible_with_surrogate(used_weight, weight).T
        out = visible_with_surrogate(value, surrogate)
        for one in (x, weight, out):
            one.retain_grad()
        self.used.append(Used(x, weight, out, used_weight))
        return out


def compare(of: Problem, layers: int) -> list[dict[str, Any]]:
    """A row for each combination and quantized layer of a whole model's problem. layers: decoder layers.

    dx: of the whole backward, each convention with its own cotangents. dx_local: both of the cotangent that the
    forward's own derivative brings. dw: of the whole backward. Each as 1 - cosine and as the ratio of norms, master's
    over the other's."""
    rows = []
    for name, (weight, x) in COMBINATIONS.items():
        sides = {}
        for master in (False, True):
            bridge = Quantizing(of, weight, x, layers * len(CLASSES), master)
            leaves: Tensors = {n: t.double().requires_grad_() for n, t in of.inputs.items()}
            out: Outputs = of.surrogate(leaves, of.constants, bridge)
            assert isinstance(out, Tensor)
            out.backward(of.cotangents[0].double())
            sides[master] = bridge.used
        for i, (own, other) in enumerate(zip(sides[False], sides[True], strict=True)):
            if not torch.equal(own.out, other.out):
                raise ValueError(f"{name}, layer {i}: the conventions' forwards differ")
            grad = own.out.grad
            assert grad is not None
            row = {"combination": name, "layer": i // len(CLASSES), "class": CLASSES[i % len(CLASSES)]}
            row |= _beside("dx", other.x.grad, own.x.grad)
            row |= _beside("dx_local", grad @ other.weight, grad @ own.used_weight)
            row |= _beside("dw", other.weight.grad, own.weight.grad)
            rows.append(row)
    return [{**row, "outlier": is_outlier(row, rows)} for row in rows]


def _beside(name: str, master: Tensor | None, exact: Tensor | None) -> dict[str, float]:
    assert master is not None and exact is not None
    norms = float(master.norm()), float(exact.norm())
    cosine = float((master * exact).sum()) / (norms[0] * norms[1])
    return {f"{name}_from_one": float(f"{abs(1 - cosine):.4g}"), f"{name}_ratio": float(f"{norms[0] / norms[1]:.6g}")}


def is_outlier(row: Mapping[str, Any], rows: list[dict[str, Any]]) -> bool:
    """By `OUTLIER_TIMES` and `OUTLIER_RATIO`, of dX in the whole backward."""
    alike = [one for one in rows if (one["combination"], one["class"]) == (row["combination"], row["class"])]
    median = statistics.median(one["dx_from_one"] for one in alike)
    return row["dx_from_one"] > OUTLIER_TIMES * median or abs(row["dx_ratio"] - 1) > OUTLIER_RATIO


def summary(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each combination and class: the median and the worst of its layers."""
    found = []
    for name in COMBINATIONS:
        for kind in CLASSES:
            rows = [row for row in document["rows"] if (row["combination"], row["class"]) == (name, kind)]
            worst = max(rows, key=lambda row: row["dx_from_one"])
            found.append(
                {
                    "combination": name,
                    "class": kind,
                    "median": statistics.median(row["dx_from_one"] for row in rows),
                    "local": statistics.median(row["dx_local_from_one"] for row in rows),
                    "dw": statistics.median(row["dw_from_one"] for row in rows),
                    "worst": worst,
                    "ratios": [f([row["dx_ratio"] for row in rows]) for f in (min, max)],
                    "outliers": [row["layer"] for row in rows if row["outlier"]],
                }
            )
    return found


def missed(document: Mapping[str, Any]) -> list[str]:
    """What a document of `samebits check conventions` lacks, one text each."""
    rows = document["rows"]
    must = [(name, i, kind) for name in COMBINATIONS for i in range(document["layers"]) for kind in CLASSES]
    have = [(row["combination"], row["layer"], row["class"]) for row in rows]
    found = [f"{name}, layer {i}, {kind}: is not measured" for name, i, kind in must if (name, i, kind) not in have]
    if len(have) != len(set(have)) or set(have) - set(must):
        found.append("rows that nobody asked for, or twice")
    if found:
        return found
    for row in rows:
        place = f"{row['combination']}, layer {row['layer']}, {row['class']}"
        if row["outlier"] != is_outlier(row, rows):
            found.append(f"{place}: outlier is {row['outlier']}")
        # Of a format that quantizes, the two conventions' dX differ; if they do not, one was compared with itself.
        if not row["dx_local_from_one"] > 0:
            found.append(f"{place}: both conventions gave one dX")
    return found
