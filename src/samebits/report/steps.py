"""Curves of training runs side by side, step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from samebits.judge.steps import differ

from . import charts
from .tables import Figure

CURVES: tuple[tuple[str, Callable[[Mapping[str, Any]], float]], ...] = (
    ("mean reward", lambda step: step["reward"]),
    ("share of logprobs that differ from the rollout's", lambda step: differ(step) / (2 * step["compared"])),
    ("k3 estimate of the KL divergence from the rollout", lambda step: step["k3"]),
    ("norm of the gradient", lambda step: step["grad_norm"]),
)


def figures(document: Mapping[str, Any]) -> list[Figure]:
    """Each of CURVES, a line a run; runs are told apart by colour, dash and name."""
    runs = document["runs"].items()
    return [
        (what, charts.curves([(name, [way(step) for step in steps]) for name, steps in runs], what))
        for what, way in CURVES
    ]
