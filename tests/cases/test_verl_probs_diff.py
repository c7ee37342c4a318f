"""verl's `training/rollout_probs_diff_*` compares probabilities: logprobs of -200 and -300 are one and the same zero.

It also sees the recomputed path alone, and nothing at all in bypass mode. The judge compares the bits of logprobs, on
both paths. Siblings: the other values that exp() makes equal or hides.
"""

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import BOUNDS, make_run, rewrite

from samebits.evidence.capsule import Tensor
from samebits.judge import compare, judge_run

os.environ["VERL_PLATFORM"] = "cpu"

from verl.protocol import DataProto
from verl.utils.debug.metrics import calculate_debug_metrics

del os.environ["VERL_PLATFORM"]


def verls(rollout: list[float], trainer: list[float]) -> float:
    """verl's own metric of one sequence, its largest difference."""
    data = DataProto.from_dict(
        {
            "rollout_log_probs": torch.tensor([rollout]),
            "old_log_probs": torch.tensor([trainer]),
            "response_mask": torch.ones(1, len(rollout)),
            "responses": torch.zeros(1, len(rollout), dtype=torch.long),
        }
    )
    return float(calculate_debug_metrics(data)["training/rollout_probs_diff_max"])


def ours(rollout: list[float], trainer: list[float]) -> int:
    left, right = (Tensor.of(np.array([x], np.float32)) for x in (rollout, trainer))
    return compare(left, right, Tensor.of(np.ones((1, len(rollout)), np.bool_))).mismatched


@pytest.mark.parametrize(
    ("a", "b"),
    [(-200.0, -300.0), (-110.0, -math.inf), (-1e30, -200.0), (-1e-9, -2e-9), (0.0, -0.0), (0.0, -1e-45)],
)
def test_what_verls_metric_calls_equal_is_a_mismatch(a: float, b: float) -> None:
    assert verls([-1.0, a], [-1.0, b]) == 0
    assert ours([-1.0, a], [-1.0, b]) == 1


def test_a_difference_that_both_see() -> None:
    assert verls([-1.0, -2.0], [-1.0, -2.5]) > 0 and ours([-1.0, -2.0], [-1.0, -2.5]) == 1
    assert verls([-1.0, -2.0], [-1.0, -2.0]) == 0 and ours([-1.0, -2.0], [-1.0, -2.0]) == 0


@pytest.mark.parametrize("path", ["recompute", "actor"])
@pytest.mark.parametrize(("claim", "arm"), [("zero", 1), ("observe", 0)])
def test_the_judge_refuses_it_on_either_path(tmp_path: Path, path: str, claim: str, arm: int) -> None:
    """As a mismatch where none may be, and as more than rounding explains where some may."""
    run = make_run(tmp_path / "run", arm)

    def far_out(meta: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in ("rollout", "recompute", "actor"):
            tensors[name][0, 5] = -200.0
        tensors[path][0, 5] = -300.0

    assert judge_run(run, claim, BOUNDS)["verdict"] == "pass", "the control"
    rewrite(run, "step-0002", far_out)
    document = judge_run(run, claim, BOUNDS)
    assert document["verdict"] == "fail"
    assert any(r["where"] == f"theta1 {path}" for r in document["reasons"])
    (found,) = (c for c in document["compares"] if (c["weights"], c["path"]) == ("theta1", path))
    assert found["max_abs"] == 100.0


def test_bypass_mode_proves_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1)
    rewrite(run, "step-0001", lambda meta, tensors: meta.update(bypass=True))
    assert judge_run(run, "zero")["verdict"] == "inconclusive"
