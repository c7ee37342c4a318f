"""What is said of the backward modes measured on a card: the values that a mode names, and what counts as a problem."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samebits.bench.backward import MODES, RECIPES, ROUNDING, distance, problems, rounded

ROW: dict[str, Any] = {
    "module": "Linear",
    "recipe": "Float8CurrentScaling",
    "mode": "unquant",
    "forward": {"differ": 0, "of": 64},
    "error": {"dx": 1.7e-3, "dw": 1.7e-3},
    "bound": {"dx": ROUNDING, "dw": ROUNDING},
}


def arm(**changes: Any) -> dict[str, Any]:
    return {"rows": [copy.deepcopy(ROW) | changes]}


def test_a_measured_arm_without_problems() -> None:
    assert problems(arm()) == []
    assert problems(arm(mode="default", error={"dx": 5.9e-2, "dw": 5.9e-2})) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"error": {"dx": 1.7e-3, "dw": 2.6e-2}}, ["dw", "0.026", "bound"]),
        ({"error": {"dx": float("nan"), "dw": 1.7e-3}}, ["dx", "nan"]),
        ({"error": {"dx": 1.7e-3, "dw": None}}, ["dw", "None"]),
        ({"mode": "default", "error": {"dx": None, "dw": 5.9e-2}}, ["default", "dx", "None"]),
        ({"forward": {"differ": 3, "of": 64}}, ["forward", "3 of 64"]),
        ({"refused": "RuntimeError: no kernel"}, ["RuntimeError: no kernel"]),
    ],
)
def test_a_problem_names_the_row_and_the_figure(changes: dict[str, Any], words: list[str]) -> None:
    (found,) = problems(arm(**changes))
    assert all(word in found for word in ["Linear, Float8CurrentScaling", *words])


def test_a_missing_gradient_has_no_distance_and_a_zero_one_its_own_norm() -> None:
    one = torch.tensor([3.0, 4.0])
    assert distance(None, one) is None
    assert distance(one, torch.zeros(2)) == 5
    assert distance(2 * one, one) == 1


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    exponent=st.integers(-20, 20),
    recipe=st.sampled_from(RECIPES),
    weight=st.booleans(),
)
def test_rounded_values_are_near_and_rounded_once(
    seed: int, rows: int, columns: int, exponent: int, recipe: str, weight: bool
) -> None:
    """E4M3 has a mantissa of three bits: half a step of 2^-3, or of the smallest number under the block's scale."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16().float() * 2.0**exponent
    found = rounded(x, recipe, weight=weight)
    assert found.shape == x.shape
    error, largest = (found - x).abs(), x.abs().max()
    assert (error <= torch.maximum(x.abs() * 2**-4, largest * 2**-10 / 224) * (1 + 2**-20)).all()
    if recipe == "Float8BlockScaling":
        assert torch.equal(rounded(found, recipe, weight=weight), found)


def test_a_block_of_zeros_stays_zero() -> None:
    x = torch.zeros(2, 256)
    x[0, 0] = 1
    assert torch.equal(rounded(x, "Float8BlockScaling"), x)


def test_the_modes_are_transformer_engines_overrides() -> None:
    assert MODES == {"default": None, "unquant": "high_precision", "dequant": "dequantized"}
