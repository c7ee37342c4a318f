"""What training steps side by side must show: the same bits, no slower, and a reward that rises."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from samebits.judge import steps

Document = dict[str, Any]


def step(number: int, seconds: float, differ: int, reward: float) -> dict[str, Any]:
    return {
        "step": number,
        "seconds": {"generate": seconds, "compare": 0.001},
        "compared": 100,
        "recompute_differ": differ,
        "actor_differ": differ,
        "k3": 1e-4 * differ,
        "reward": reward,
    }


def whole(count: int = 40) -> Document:
    """Forty steps in which nothing is missed."""
    runs = {
        name: [step(i + 1, seconds, differ, i / count) for i in range(count)]
        for name, seconds, differ in (("bi0", 1.0, 9), ("bi1", 1.01, 0), ("bi0-tis", 1.0, 9))
    }
    return {"steps": count, "runs": runs}


def test_runs_that_hold_all_lack_nothing() -> None:
    assert steps.missed_speed(whole(4)) == [] and steps.missed_quality(whole()) == []


def first(**changes: Any) -> Callable[[Document], None]:
    return lambda document: document["runs"]["bi1"][0].update(changes)


def every(run: str, **changes: Any) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        for one in document["runs"][run]:
            one.update(copy.deepcopy(changes))

    return change


BITS: list[tuple[Callable[[Document], Any], str]] = [
    (first(actor_differ=1), "bi1, step 1: 1 logprobs differ, k3 0"),
    (first(recompute_differ=2), "bi1, step 1: 2 logprobs differ"),
    (first(k3=1e-9), "bi1, step 1: 0 logprobs differ, k3 1e-09"),
    (first(compared=0), "bi1, step 1: nothing was compared"),
    (lambda document: document["runs"].pop("bi1"), "bi1: did not run"),
]


@pytest.mark.parametrize(("change", "text"), BITS)
def test_a_bit_that_differs_counts_for_both(change: Callable[[Document], Any], text: str) -> None:
    document = whole()
    change(document)
    for missed in (steps.missed_speed, steps.missed_quality):
        assert any(text in one for one in missed(document)), missed(document)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d["runs"].pop("bi0"), "bi0 and bi1 did not both run"),
        (lambda d: d.update(steps=3), "2 steps are timed, fewer than 3"),
        (every("bi0", recompute_differ=0, actor_differ=0), "bi0: no logprob differs"),
        (every("bi1", seconds={"generate": 1.06, "compare": 0.001}), "takes 1.060 of bi0's time, must be ≤ 1.05"),
        (every("bi1", seconds={"generate": 0.9, "compare": 0.01}), "comparing takes 1.10% of a step of bi1"),
    ],
)
def test_a_figure_of_speed_that_is_missed_is_named(change: Callable[[Document], Any], text: str) -> None:
    document = whole(4)
    change(document)
    assert any(text in one for one in steps.missed_speed(document)), steps.missed_speed(document)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d.update(steps=39), "39 steps, fewer than 40"),
        (lambda d: d["runs"].pop("bi0-tis"), "bi0-tis: did not run"),
        (every("bi1", reward=0.5), "bi1: the reward does not rise, from 0.5 to 0.5"),
    ],
)
def test_what_forty_steps_lack_is_named(change: Callable[[Document], Any], text: str) -> None:
    document = whole()
    change(document)
    assert any(text in one for one in steps.missed_quality(document)), steps.missed_quality(document)


def test_the_first_step_is_not_timed() -> None:
    document = whole(4)
    document["runs"]["bi1"][0]["seconds"]["generate"] = 99.0
    assert steps.missed_speed(document) == []
