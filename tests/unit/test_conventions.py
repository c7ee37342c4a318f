"""Layer 2 on a model of two linear layers: each convention's gradients by hand, and what a document must hold."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from samebits.judge import conventions
from samebits.judge.conventions import CLASSES, COMBINATIONS, Quantizing, is_outlier, missed
from samebits.judge.vjp import Bridge, Problem, Tensors

Row = dict[str, Any]


def two_layers(t: Tensors, c: Mapping[str, Any], bridge: Bridge) -> torch.Tensor:
    return bridge.linear(bridge.linear(t["x"], t["first"]), t["second"])


def problem() -> Problem:
    generator = torch.Generator().manual_seed(2)
    shapes = {"x": (48, 64), "first": (32, 64), "second": (64, 32)}
    inputs = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    grad = torch.randn(48, 64, generator=generator).bfloat16()
    return Problem("two", "", torch.bfloat16, inputs, {}, "random", (grad,), two_layers, 64)


@pytest.mark.parametrize("master", [False, True], ids=["dequantized", "master"])
@pytest.mark.parametrize("name", list(COMBINATIONS))
def test_each_convention_multiplies_what_it_says(name: str, master: bool) -> None:
    of, (weight_format, x_format) = problem(), COMBINATIONS[name]
    bridge = Quantizing(of, weight_format, x_format, 2, master)
    leaves = {n: t.double().requires_grad_() for n, t in of.inputs.items()}
    out = two_layers(leaves, {}, bridge)
    grad = of.cotangents[0].double()
    out.backward(grad)

    def used(one: Any, t: torch.Tensor) -> torch.Tensor:
        return (one.quantize(t).dequantize(torch.bfloat16) if one else t).double()

    x, first, second = (of.inputs[n] for n in ("x", "first", "second"))
    middle = (used(x_format, x) @ used(weight_format, first).T).bfloat16()
    assert torch.equal(out, (used(x_format, middle) @ used(weight_format, second).T).bfloat16().double())
    at = [t.double() if master else used(weight_format, t) for t in (first, second)]
    seen = [t.double() if master else used(x_format, t) for t in (x, middle)]
    grads = [leaves[n].grad for n in ("second", "first", "x")]
    expected = [grad.T @ seen[1], (grad @ at[1]).T @ seen[0], grad @ at[1] @ at[0]]
    assert all(one is not None and torch.allclose(one, two) for one, two in zip(grads, expected, strict=True))


def test_a_layer_that_is_not_quantized_is_shown_as_it_is() -> None:
    of = problem()
    shown = {"linear": lambda x, w: torch.nn.functional.linear(x, w)}
    bridge = Quantizing(Problem(**{**vars(of), "visible": shown}), *COMBINATIONS["NVFP4, NVFP4"], 0, False)
    out = two_layers({n: t.double() for n, t in of.inputs.items()}, {}, bridge)
    plain = shown["linear"](shown["linear"](of.inputs["x"], of.inputs["first"]), of.inputs["second"])
    assert bridge.used == [] and torch.equal(out, plain.double())


def row(combination: str, layer: int, kind: str) -> Row:
    numbers = {f"{n}_{what}": v for n in ("dx", "dx_local", "dw") for what, v in (("from_one", 1e-3), ("ratio", 1.0))}
    return {"combination": combination, "layer": layer, "class": kind, **numbers, "outlier": False}


def document() -> dict[str, Any]:
    rows = [row(name, i, kind) for name in COMBINATIONS for i in range(3) for kind in CLASSES]
    return {"layers": 3, "steps": 20, "rows": rows}


def test_a_whole_document_lacks_nothing_and_is_summed_up() -> None:
    assert missed(document()) == []
    found = conventions.summary(document())
    assert len(found) == len(COMBINATIONS) * len(CLASSES) and found[0]["median"] == 1e-3 and found[0]["outliers"] == []


@pytest.mark.parametrize(("change", "outlier"), [({"dx_from_one": 2.1e-3}, True), ({"dx_from_one": 1.9e-3}, False),
                                                 ({"dx_ratio": 0.94}, True), ({"dx_ratio": 1.04}, False)])  # fmt: skip
def test_an_outlier_is_far_from_its_class(change: Row, outlier: bool) -> None:
    rows = document()["rows"]
    rows[0] |= change
    assert is_outlier(rows[0], rows) is outlier


LACKS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a layer": (lambda d: d["rows"].pop(0), "FP8 128x128, BF16, layer 0, linear_qkv: is not measured"),
    "twice": (lambda d: d["rows"].append(d["rows"][0]), "rows that nobody asked for, or twice"),
    "another outlier": (lambda d: d["rows"][0].update(outlier=True), "outlier is True"),
    "one convention": (lambda d: d["rows"][0].update(dx_local_from_one=0.0), "both conventions gave one dX"),
}


@pytest.mark.parametrize("name", list(LACKS))
def test_what_a_document_lacks_is_said(name: str) -> None:
    change, said = LACKS[name]
    lacking = copy.deepcopy(document())
    change(lacking)
    assert [text for text in missed(lacking) if said in text]
