"""NeMo-RL#2895: after a weight sync the engine decodes with the weights from before it.

There a captured graph kept the address of the old copy of some weights: the parameter was the new one, prefill read it,
and decode did not. So neither the hash of a resident weight nor the logprobs of a prompt show it; what the engine says
when it decodes does, against an engine freshly started on the same weights. Siblings: one weight that stays behind, all
of them, a sync that exports the old ones, and rollout logprobs that are the old policy's.
"""

from pathlib import Path
from typing import Any

import pytest
from runs import BOUNDS, make_run, rewrite

from samebits.evidence.capsule import read_capsule
from samebits.judge import judge_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = make_run(tmp_path / "run", 1)
    assert judge_run(made, "zero", BOUNDS)["verdict"] == "pass", "the control"
    return made


def reasons(run: Path, claim: str = "zero") -> list[str]:
    document = judge_run(run, claim, BOUNDS)
    assert document["verdict"] == "fail"
    return [f"{r['where']}: {r['what']}" for r in document["reasons"]]


@pytest.mark.parametrize("sync", [1, 2])
@pytest.mark.parametrize("claim", ["zero", "observe"])
def test_decode_that_reads_the_old_copy_is_seen_although_every_weight_is_the_new_one(
    run: Path, sync: int, claim: str
) -> None:
    before = read_capsule(run / "capsules" / f"sync-{sync - 1:04d}").tensors["probe_log_probs"].read()
    after = read_capsule(run / "capsules" / f"sync-{sync:04d}").tensors
    prompt = after["probe_prompt_length"].read()

    def stale(meta: dict[str, Any], tensors: dict[str, Any]) -> None:
        """The first token comes of the prefill, those after it of decoding."""
        for row, first in enumerate(prompt):
            tensors["probe_log_probs"][row, first + 1 :] = before[row, first + 1 :]

    rewrite(run, f"sync-{sync:04d}", stale)
    assert reasons(run, claim) == [f"sync theta{sync}: 9 of 12 probe logprobs differ from a fresh engine's"]


def test_a_weight_that_stays_behind_is_counted(run: Path) -> None:
    old = read_capsule(run / "capsules/sync-0000").meta["loaded"]
    name = sorted(old)[0]
    rewrite(run, "sync-0001", lambda meta, tensors: meta["loaded"].update({name: old[name]}))
    assert reasons(run) == ["sync theta1: 1 of 3 tensors in the engine are not the exported ones"]


def test_weights_that_all_stay_behind_are_counted(run: Path) -> None:
    old = read_capsule(run / "capsules/sync-0001").meta["loaded"]
    rewrite(run, "sync-0002", lambda meta, tensors: meta.update(loaded=old))
    assert reasons(run) == ["sync theta2: 3 of 3 tensors in the engine are not the exported ones"]


def test_a_sync_that_sends_the_old_weights_again_is_seen_although_all_agrees(run: Path) -> None:
    """Exported, resident and fresh are one: only the update knows that there should be others."""
    old = read_capsule(run / "capsules/sync-0000").meta["exported"]
    rewrite(run, "sync-0001", lambda meta, tensors: meta.update(exported=old, loaded=old))
    rewrite(run, "fresh-0001", lambda meta, tensors: meta.update(loaded=old))
    assert any("its weights are those of the sync before" in reason for reason in reasons(run))


def test_a_rollout_by_the_old_policy_differs_from_the_trainer(run: Path) -> None:
    def stale(meta: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["rollout"][:] = tensors["rollout"] * 1.01

    rewrite(run, "step-0002", stale)
    found = reasons(run)
    assert len(found) == 2 and all(f"theta1 {path}: " in " ".join(found) for path in ("recompute", "actor"))
