"""What is said of the backward modes measured on a card: what a document must show, and what counts as a problem."""

import copy
import io
import pathlib
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from rich.console import Console

from samebits.bench import backward
from samebits.evidence.measurement import BACKWARD, MeasurementError
from samebits.judge import backward_modes as judge

Document = dict[str, Any]


def arm() -> Document:
    """One that lacks nothing."""
    rows = [
        {
            "module": module,
            "recipe": recipe,
            "mode": mode,
            "forward": {"differ": 0, "of": 64},
            "error": {"dx": 1.7e-3 if mode != "default" else 5.9e-2, "dw": 1.7e-3},
            "distance": {"dx": 2.7e-2, "dw": 2.7e-2},
            "roundings": {"dx": 1, "dw": 1},
            "kept_bytes": 10**6,
            "peak_bytes": 10**7,
            "milliseconds": 2.0 if mode == "default" else 3.0,
        }
        for module, recipe, mode in product(judge.MODULES, judge.RECIPES, judge.MODES)
    ]
    said = dict.fromkeys(judge.REFUSED, "ValueError: say another mode")
    return {
        "rows": rows,
        "formats": [{"format": name, "differ": 0, "of": judge.LEAST_ELEMENTS} for name in judge.FORMATS],
        "frozen_weight_bias_gradient": {f"{name} {mode}": True for name, mode in product(judge.BIASED, judge.MODES)},
        "behaviours": {**said, judge.RUNS: "", judge.RESOLVED: judge.RESOLVES_TO},
        "tests": {"passed": 9, "failed": 0, "skipped": 1},
    }


def whole() -> Document:
    return BACKWARD.build(
        command="samebits bench backward --tests TESTS",
        date="2026-01-31",
        card={"name": "a card", "torch": "2.11.0", "cuda": "13.0", "driver": "580"},
        transformer_engine="2.20.2",
        sizes={"rows": 8, "features": 8, "out": 8, "splits": [8]},
        arms={"release": arm(), "patched": arm()},
    )


def test_a_measurement_that_holds_all_lacks_nothing() -> None:
    assert judge.missed(whole()) == []


def row(**changes: Any) -> Callable[[Document], None]:
    """Change the first row in mode unquant: Linear under current scaling."""
    return lambda arm: arm["rows"][1].update(changes)


# In the patched package, and in both.
PROBLEMS: list[tuple[Callable[[Document], Any], str]] = [
    (row(error={"dx": 1.7e-3, "dw": 2.6e-2}), "Linear, Float8CurrentScaling, unquant: dw is 0.026 away, bound 0.0024"),
    (row(error={"dx": float("nan"), "dw": 1.7e-3}), "dx is nan away"),
    (row(error={"dx": 1.7e-3, "dw": None}), "dw is None away"),
    (lambda arm: arm["rows"][0]["error"].update(dx=None), "Float8CurrentScaling, default: dx is None away"),
    (lambda arm: arm["rows"][0]["error"].update(dx=float("inf")), "Float8CurrentScaling, default: dx is inf away"),
    (row(forward={"differ": 3, "of": 64}), "the forward differs in 3 of 64"),
    (row(refused="RuntimeError: no kernel"), "Linear, Float8CurrentScaling, unquant: RuntimeError: no kernel"),
    (
        lambda arm: arm["frozen_weight_bias_gradient"].update({"GroupedLinear dequant": False}),
        "GroupedLinear, dequant: the bias beside a frozen weight gets no gradient",
    ),
    (lambda arm: arm["behaviours"].update({judge.RUNS: "ValueError: no"}), f"{judge.RUNS}: ValueError: no"),
    (lambda arm: arm["behaviours"].pop(judge.RUNS), f"{judge.RUNS}: was not tried"),
    (lambda arm: arm["behaviours"].update({judge.REFUSED[1]: ""}), f"{judge.REFUSED[1]}: is not refused"),
    (lambda arm: arm["behaviours"].update({judge.RESOLVED: "None"}), "None, must be high_precision"),
]
LACKING: list[tuple[Callable[[Document], Any], str]] = [
    (lambda arm: arm["rows"].pop(), "ops chain, Float8BlockScaling, dequant: is measured 0 times"),
    (lambda arm: arm["rows"].append(arm["rows"][0]), "Linear, Float8CurrentScaling, default: is measured 2 times"),
    (lambda arm: arm["formats"].pop(0), "E4M3 of the whole: 0 elements are compared, too few"),
    (lambda arm: arm["formats"][3].update(differ=1), "E4M3 in 128 x 128: 1 of 100000 elements differ"),
    (lambda arm: arm["tests"].update(passed=0), "none of Transformer Engine's own tests passed"),
    (lambda arm: arm["tests"].update(failed=2), "2 of Transformer Engine's own tests failed"),
]


@pytest.mark.parametrize(("change", "text"), PROBLEMS)
def test_a_problem_of_the_patched_package_is_named(change: Callable[[Document], Any], text: str) -> None:
    document = copy.deepcopy(whole())
    change(document["arms"]["patched"])
    (found,) = judge.missed(document)
    assert found.startswith("patched: ") and text in found


@pytest.mark.parametrize(("change", "text"), PROBLEMS)
def test_what_the_patch_mends_may_be_wrong_in_the_release(change: Callable[[Document], Any], text: str) -> None:
    document = copy.deepcopy(whole())
    change(document["arms"]["release"])
    assert judge.missed(document) == [] and [one for one in judge.problems(document["arms"]["release"]) if text in one]


@pytest.mark.parametrize("name", ["release", "patched"])
@pytest.mark.parametrize(("change", "text"), LACKING)
def test_what_is_not_measured_is_named_in_either(change: Callable[[Document], Any], text: str, name: str) -> None:
    document = copy.deepcopy(whole())
    change(document["arms"][name])
    (found,) = judge.missed(document)
    assert found.startswith(f"{name}: ") and text in found


def test_an_edited_measurement_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "backward.json"
    BACKWARD.write(path, whole())
    assert BACKWARD.read(path) == whole()
    path.write_text(path.read_text().replace('"passed": 9', '"passed": 10'))
    with pytest.raises(MeasurementError, match="edited"):
        BACKWARD.read(path)


def test_the_table_says_what_a_mode_costs() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(backward.table(whole()))
    text = " ".join(console.export_text().split())
    assert "Linear Float8CurrentScaling unquant 0.0017 0.027 1 10 3.00 1.50" in text


def test_a_missing_gradient_has_no_distance_and_a_zero_one_its_own_norm() -> None:
    one = torch.tensor([3.0, 4.0])
    assert backward.distance(None, one) is None
    assert backward.distance(one, torch.zeros(2)) == 5
    assert backward.distance(2 * one, one) == 1


def test_tests_are_counted_by_their_outcome(tmp_path: pathlib.Path) -> None:
    (tmp_path / backward.OWN_TESTS).write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', range(3))\n"
        "def test_passes(n): pass\n"
        "def test_fails(): assert False\n"
        "@pytest.fixture\n"
        "def broken(): raise RuntimeError\n"
        "def test_error(broken): pass\n"
        "def test_skipped(): pytest.skip('no card')\n"
    )
    assert backward.own_tests(tmp_path) == {"passed": 3, "failed": 2, "skipped": 1}
    assert backward.own_tests(None) == {"passed": 0, "failed": 0, "skipped": 0}


def test_a_package_that_is_not_there_is_an_error_with_the_remedy() -> None:
    script = "from samebits.cli import app; app()"
    done = subprocess.run([sys.executable, "-c", script, "bench", "backward"], capture_output=True, text=True)
    assert done.returncode == 1 and "no transformer_engine on PYTHONPATH: unpack its wheels" in done.stderr
