"""verl#4162, verl#4252: a rollout that reports logprobs of raw logits, and a trainer that divides by a temperature.

At another temperature than 1 the two are logprobs of different distributions, and no arithmetic makes them equal. Such
a run is refused at start, with its siblings: top-p, top-k, no logprobs at all, and vLLM's runner V2, whose quotient is
no IEEE quotient.
"""

import os
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

os.environ["VERL_PLATFORM"] = "cpu"

from verl.trainer.ppo.v1.trainer_sync_recorded import PPOTrainerSyncRecorded

del os.environ["VERL_PLATFORM"]

PLAIN: dict[str, Any] = {
    "calculate_log_probs": True,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "logprobs_mode": "processed_logprobs",
}


def refuse(**changes: Any) -> None:
    PPOTrainerSyncRecorded._refuse_other_distributions(OmegaConf.create({**PLAIN, **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"temperature": 0.7, "logprobs_mode": "raw_logprobs"},
            "set logprobs_mode=processed_logprobs, or temperature=1",
        ),
        ({"top_p": 0.95}, "set top_p=1 and top_k=-1"),
        ({"top_k": 50}, "set top_p=1 and top_k=-1"),
        ({"calculate_log_probs": False}, "set rollout.calculate_log_probs=True"),
    ],
)
def test_logprobs_of_another_distribution_are_refused_with_the_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refuse(**changes)


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.7}, {"logprobs_mode": "raw_logprobs"}, {"top_k": 0}])
def test_logprobs_of_the_same_distribution_are_taken(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    refuse(**changes)


@pytest.mark.parametrize("arm", ["0", "1"])
def test_a_quotient_that_is_not_ieees_is_refused_where_bits_count(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", arm)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    refuse()
    if arm == "0":
        refuse(temperature=0.7)
    else:
        with pytest.raises(ValueError, match="set temperature=1, or VLLM_USE_V2_MODEL_RUNNER=0"):
            refuse(temperature=0.7)


def test_raw_and_divided_logits_have_other_logprobs() -> None:
    """The control: what was reported is no rounding."""
    logits = torch.randn(64, 32, generator=torch.Generator().manual_seed(4162))
    raw, divided = (one.log_softmax(-1)[:, 0] for one in (logits, logits / 0.7))
    assert (raw - divided).abs().min() > 0 and (raw - divided).abs().max() > 0.1
