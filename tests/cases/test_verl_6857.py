"""verl#6857: two answers of one GRPO group drawn with the same seed are one sample counted twice.

There the number of an answer within its group was assigned inside each worker's chunk, so that answers of one group in
two chunks got one number, and with deterministic sampling one seed. Seeds here come from the step, the question and the
answer's number alone. Its siblings: one seed for a whole replica, one pair only, and what is allowed, the same seed in
two groups.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import make_run, rewrite
from verl.utils.log_prob_record import sampling_seed

from samebits.judge import judge_run
from samebits.recipe import launch

REASON = "two sequences of one group share a sampling seed: one sample, counted twice"


def test_no_two_requests_of_a_run_have_one_seed() -> None:
    """Three steps of the recipe's own batch, and of a base seed beside it."""
    config = launch.plan(1, 3).config
    prompts, samples = config["data"]["train_batch_size"], config["actor_rollout_ref"]["rollout"]["n"]
    asked = [
        (base, step, step * prompts + question, answer)
        for base in (0, 1)
        for step in range(1, 4)
        for question in range(prompts)
        for answer in range(samples)
    ]
    seeds = [sampling_seed(*request) for request in asked]
    assert len(set(seeds)) == len(seeds) == 2 * 3 * prompts * samples
    assert seeds == [sampling_seed(*request) for request in asked], "a rerun samples the same"


@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_a_seed_does_not_depend_on_the_chunk_that_a_request_travels_in(chunk: int) -> None:
    requests = [(0, 1, question, answer) for question in range(4) for answer in range(8)]
    whole = [sampling_seed(*request) for request in requests]
    chunks = [requests[i : i + chunk] for i in range(0, len(requests), chunk)]
    assert [sampling_seed(*request) for one in chunks for request in one] == whole


def one_pair(seed: np.ndarray[Any, Any], group: np.ndarray[Any, Any]) -> None:
    first, second = np.flatnonzero(group == 1)[:2]
    seed[second] = seed[first]


def one_seed_for_all(seed: np.ndarray[Any, Any], group: np.ndarray[Any, Any]) -> None:
    seed[:] = 7


def numbered_by_chunk(seed: np.ndarray[Any, Any], group: np.ndarray[Any, Any]) -> None:
    """Chunks of two: the third answer of a group is numbered as its first."""
    for g in np.unique(group):
        members = np.flatnonzero(group == g)
        seed[members] = 100 * g + np.arange(members.size) % 2


@pytest.mark.parametrize("collide", [one_pair, one_seed_for_all, numbered_by_chunk])
@pytest.mark.parametrize("step", [1, 3])
def test_a_collision_is_never_a_pass(tmp_path: Path, collide: Any, step: int) -> None:
    run = make_run(tmp_path / "run", 1)
    rewrite(run, f"step-{step:04d}", lambda meta, tensors: collide(tensors["seed"], tensors["group"]))
    document = judge_run(run, "zero")
    assert document["verdict"] == "inconclusive"
    assert document["reasons"] == [{"verdict": "inconclusive", "where": f"capsules/step-{step:04d}", "what": REASON}]


def test_one_seed_in_two_groups_is_two_samples(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1)

    def alike(meta: dict[str, Any], tensors: dict[str, Any]) -> None:
        for g in np.unique(tensors["group"]):
            tensors["seed"][tensors["group"] == g] = np.arange(np.count_nonzero(tensors["group"] == g))

    rewrite(run, "step-0002", alike)
    assert judge_run(run, "zero")["verdict"] == "pass"
