"""verl#7434: weights sent to an engine that sleeps arrive nowhere.

A sleeping vLLM has no memory behind its weights. They must be back before the first bucket, and keys and values of the
old weights must not: their memory comes back after the last one. The worker of a recorded run wraps the rollout to see
what passes, and must keep that order.
"""

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

os.environ["VERL_PLATFORM"] = "cpu"

from verl.workers.recording_workers import (
    ObservingActorRolloutRefWorker,
    RecordingActorRolloutRefWorker,
    _DescribedRollout,
)

del os.environ["VERL_PLATFORM"]


class Sleeper:
    """A rollout that refuses weights while it has no memory for them."""

    def __init__(self) -> None:
        self.has: list[str] = []
        self.calls: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}

    async def resume(self, tags: list[str]) -> None:
        self.has += tags
        self.calls.append(f"resume {', '.join(tags)}")

    async def update_weights(self, weights: Any, **_: Any) -> None:
        if "weights" not in self.has:
            raise RuntimeError("the engine sleeps: its weights have no memory")
        assert "kv_cache" not in self.has
        self.weights = dict(weights)
        self.calls.append("update")


def worker(kind: type, sleeper: Any, sleeps: bool) -> Any:
    class Rollout(SimpleNamespace):
        def get(self, name: str, default: Any = None) -> Any:
            return getattr(self, name, default)

    made: Any = object.__new__(kind)
    engine = SimpleNamespace(
        get_per_tensor_param=lambda **_: (iter([("a.weight", torch.ones(2))]), None), is_param_offload_enabled=False
    )
    made.actor = SimpleNamespace(engine=engine)
    made.config = SimpleNamespace(rollout=Rollout(name="vllm", free_cache_engine=sleeps))
    made.rollout, made.peft_merge, made.base_sync_done, made.layered_summon = sleeper, False, True, False
    return made


@pytest.fixture(autouse=True)
def one_rank() -> Any:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", [ObservingActorRolloutRefWorker, RecordingActorRolloutRefWorker])
def test_weights_wake_first_and_the_cache_last(kind: type) -> None:
    sleeper = Sleeper()
    rollout = _DescribedRollout(sleeper) if kind is RecordingActorRolloutRefWorker else sleeper
    asyncio.run(worker(kind, rollout, True).update_weights(global_steps=1, mode="naive"))
    assert sleeper.calls == ["resume weights", "update", "resume kv_cache"]
    assert sleeper.weights.keys() == {"a.weight"}
    if isinstance(rollout, _DescribedRollout):
        assert rollout.exported.keys() == {"a.weight"}


def test_a_sync_to_a_sleeper_is_an_error_and_not_silence() -> None:
    """The control: without the wake-up, which a run that says its engine never sleeps leaves out, nothing arrives."""
    with pytest.raises(RuntimeError, match="the engine sleeps"):
        asyncio.run(worker(RecordingActorRolloutRefWorker, Sleeper(), False).update_weights(mode="naive"))
