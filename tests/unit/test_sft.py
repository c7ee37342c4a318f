"""Layer 3's rules without a run: what passes, what is named, what is inconclusive, and what tells nothing."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest

from samebits.judge import sft
from samebits.judge.sft import ARMS, NATIVE, REFERENCE, STEPS, TEST

Document = dict[str, Any]


def arm(shift: float = 0.0, start: float = 0.0) -> Document:
    """Forty steps whose loss falls; shift: what its losses are apart from step 20 on, start: from the first on."""

    def nll(step: int) -> float:
        return 4.0 * 0.97**step + start + (shift if step >= 20 else 0.0)

    rows = [
        {
            "step": n, "loss": nll(n), "grad_norm": 1.5, "update_rms": 1e-4, "clip": 0.7, "nonfinite": 0, "tokens": 90,
            "seconds": 1.0,
        }
        for n in range(1, STEPS + 1)
    ]  # fmt: skip
    return {
        "weights_sha256": "0" * 64,
        "steps": rows,
        "validation": [{"step": n, "nll": nll(n)} for n in range(0, STEPS + 1, 5)],
    }


def first(wrong: str | None = None) -> list[Document]:
    tensors = ("a.weight", "b.weight")
    row = {"relative": 0.001, "floor": 0.002, "tolerance": 0.004}
    return [
        {"what": what, "tensor": tensor, **row, "wrong": wrong if (what, tensor) == ("update", "b.weight") else None}
        for what in ("gradient", "update", "gradient of the reference")
        for tensor in tensors
    ]


def document(**changes: Any) -> Document:
    config = {"learning rate": dict.fromkeys(ARMS, 3e-4), **{k: dict(of) for k, of in sft.DIFFERENCES.items()}}
    plain = {
        "steps": STEPS,
        "layers": 2,
        "config": config,
        "arms": {name: arm() for name in ARMS},
        "seeds": [{"seed": n, "validation": [{"step": STEPS, "nll": 1.0 + 0.004 * n}]} for n in (1, 2, 3)],
        "first": first(),
    }
    return {**plain, **changes}


def arms(**of: Document) -> Document:
    return {name: of.get(name.split()[0], arm()) for name in ARMS}


def test_equal_arms_pass_and_the_bound_is_three_spreads_or_a_fiftieth() -> None:
    plain = document()
    assert sft.verdict(plain) == ("pass", [])
    assert sft.spread(plain) == pytest.approx(0.004) and sft.bound(plain) == pytest.approx(0.012)
    wide = document(seeds=[{"seed": n, "validation": [{"step": STEPS, "nll": float(n)}]} for n in (1, 2, 3)])
    assert sft.bound(wide) == sft.MOST == 0.02


def test_a_small_difference_late_passes_and_a_larger_one_is_inconclusive_and_says_from_where() -> None:
    assert sft.verdict(document(arms=arms(gradient=arm(0.01), native=arm(0.011))))[0] == "pass"
    said, why = sft.verdict(document(arms=arms(native=arm(0.05))))
    assert said == "inconclusive"
    assert why == [
        "under test and native baseline: one step agrees, and the validation NLL is 0.05 apart, 0.012 is allowed; the "
        "loss of step 20 first is further apart: keep the weights before it, look at recomputation, refreshed "
        "quantized values, learning rate and random state, and replay it"
    ]


def test_initial_losses_that_differ_are_the_forwards() -> None:
    """Under test and reference share a forward, bit for bit; the baseline's may round otherwise, and no more."""
    said, why = sft.verdict(document(arms=arms(gradient=arm(start=1e-6))))
    assert said == "fail" and "look at the forward, the data and the mask" in why[0]
    assert "under test and gradient reference" in why[0]
    assert sft.verdict(document(arms=arms(native=arm(start=1e-6))))[0] == "pass"
    said, why = sft.verdict(document(arms=arms(native=arm(start=0.5))))
    assert said == "fail" and "under test and native baseline: the losses of the initial weights" in why[0]


def test_one_step_that_differs_is_the_backwards_and_its_tensor_is_named() -> None:
    said, why = sft.verdict(document(first=first("off")))
    assert said == "fail" and "update of b.weight: look at the backward, reduction, scale, clipping" in why[0]


def test_a_forward_that_differs_is_said_before_a_backward() -> None:
    said, why = sft.verdict(document(first=first("off"), arms=arms(gradient=arm(start=0.1))))
    assert said == "fail" and "look at the forward" in why[0] and "backward, reduction" not in why[0]


def _rows(d: Document, name: str = TEST) -> list[Document]:
    return d["arms"][name]["steps"]


LACKS: dict[str, tuple[Callable[[Document], object], str]] = {
    "no arm": (lambda d: d["arms"].pop(REFERENCE), "no arm gradient reference"),
    "few steps": (lambda d: d.update(steps=8), "8 steps, fewer than 40"),
    "few seeds": (lambda d: d["seeds"].pop(), "the spread is of 2 seeds, 3 are needed"),
    "a seed twice": (lambda d: d["seeds"][0].update(seed=2), "3 are needed"),
    "no spread": (lambda d: [s["validation"][-1].update(nll=1.0) for s in d["seeds"]], "the seeds have no spread"),
    "a step is gone": (lambda d: _rows(d).pop(3), "under test: not every step is there"),
    "not finite": (lambda d: _rows(d, NATIVE)[3].update(nonfinite=2), "native baseline: 2 values are not finite"),
    "nothing moves": (lambda d: _rows(d)[0].update(update_rms=0.0), "a step without tokens, gradient or update"),
    "no tokens": (lambda d: _rows(d)[0].update(tokens=0), "a step without tokens, gradient or update"),
    "no learning": (lambda d: [r.update(loss=4.0) for r in _rows(d)], "under test: its loss does not fall"),
    "other weights": (lambda d: d["arms"][NATIVE].update(weights_sha256="1" * 64), "other initial weights"),
    "other data": (lambda d: _rows(d, NATIVE)[0].update(tokens=91), "native baseline: other tokens"),
    "other looks": (lambda d: d["arms"][NATIVE]["validation"].pop(), "validated at other steps"),
    "another setting": (lambda d: d["config"]["learning rate"].update({NATIVE: 1e-3}), "differ in .*learning rate"),
    "nothing differs": (lambda d: d.update(config={}), "the arms differ in nothing, not in layer spec, backward"),
    "no first step": (lambda d: d.update(first=[]), "no first step was compared"),
}


@pytest.mark.parametrize("name", list(LACKS))
def test_a_run_that_lacks_something_is_inconclusive(name: str) -> None:
    change, said = LACKS[name]
    lacking = copy.deepcopy(document())
    change(lacking)
    found, why = sft.verdict(lacking)
    assert found == "inconclusive"
    with pytest.raises(AssertionError, match=said):
        assert not why, "; ".join(why)


@pytest.mark.parametrize("name", [REFERENCE, NATIVE])
@pytest.mark.parametrize("step", [20, 30, 40])
def test_a_nan_is_never_within_the_bound(name: str, step: int) -> None:
    bad = copy.deepcopy(document())
    next(row for row in bad["arms"][name]["validation"] if row["step"] == step)["nll"] = math.nan
    assert sft.verdict(bad)[0] == "inconclusive"
