"""Workers that keep what a recorded run needs: the update's own logprobs, what the optimizer changed, what was sent.

They add observation around the inherited work and change none of it.
"""

import pathlib
from functools import partial
from typing import Any, Optional

import torch
from tensordict import TensorDict

from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils as tu
from verl.utils.log_prob_record import contract_name, describe, described
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.padding import no_padding_2_padding


def _observed_loss(model_output, data: TensorDict, dp_group=None, *, loss_fn, seen: list):
    """Notes the grad-enabled logprobs of a micro-batch, then computes the loss."""
    log_probs = model_output["log_probs"]
    if not log_probs.requires_grad:
        raise RuntimeError("the update computed its logprobs without gradients: this is not the actor's forward")
    seen.append((data["record_index"].cpu(), no_padding_2_padding(log_probs.detach(), data).cpu()))
    return loss_fn(model_output=model_output, data=data, dp_group=dp_group)


@torch.no_grad()
def _moved(now: list[torch.Tensor], before: list[torch.Tensor]) -> tuple[int, float]:
    """How many elements changed, and the sum of the squared changes; one tensor at a time in float64."""
    count, square_sum = 0, 0.0
    for new, old in zip(now, before, strict=True):
        change = new.double() - old.double()
        count += int(change.count_nonzero())
        square_sum += float(change.square().sum())
    return count, square_sum


class ObservingTrainingWorker(TrainingWorker):
    """A `TrainingWorker` that remembers the logprobs of its update."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.log_probs_seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.updates_seen: list[dict[str, Any]] = []

    def set_loss_fn(self, loss_fn) -> None:
        self.loss_fn = partial(_observed_loss, loss_fn=loss_fn, seen=self.log_probs_seen)


class RecordingTrainingWorker(ObservingTrainingWorker):
    """It also remembers what the optimizer step changed, for which it keeps all parameters twice during the step."""

    def _mains(self) -> list[torch.Tensor]:
        """The tensors that the optimizer steps: Megatron's FP32 mains."""
        return [p for group in self.engine.optimizer.param_groups for p in group["params"]]

    def _masters(self) -> list[torch.Tensor]:
        """The trainable model parameters, which mains are cast into."""
        return [p for module in self.engine.module for p in module.parameters() if p.requires_grad]

    def train_batch(self, data: TensorDict) -> Optional[TensorDict]:
        with torch.no_grad():
            mains = [p.detach().clone() for p in self._mains()]
            masters = [p.detach().clone() for p in self._masters()]
        # Read now: the scheduler moves it on after the step.
        learning_rate = float(self.engine.optimizer.param_groups[0]["lr"])
        output = super().train_batch(data)
        changed, square_sum = _moved(self._mains(), mains)
        changed_masters, _ = _moved(self._masters(), masters)
        self.updates_seen.append(
            {
                "parameters": sum(m.numel() for m in mains),
                "changed_parameters": changed,
                "masters": sum(m.numel() for m in masters),
                "changed_masters": changed_masters,
                "update_square_sum": square_sum,
                "learning_rate": learning_rate,
                "grad_norm": float(tu.get(output, "metrics")["grad_norm"]),
            }
        )
        return output


class _DescribedRollout:
    """Stands before a rollout adapter and describes the weights that pass through `update_weights`."""

    def __init__(self, rollout: Any):
        self._rollout = rollout
        self.exported: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rollout, name)

    async def update_weights(self, weights, **kwargs: Any) -> None:
        self.exported = {}
        await self._rollout.update_weights(described(weights, self.exported), **kwargs)


class ObservingActorRolloutRefWorker(ActorRolloutRefWorker):
    """The hybrid worker of a run that compares and keeps nothing."""

    actor_worker_cls = ObservingTrainingWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_update_record(self) -> dict[str, Any]:
        """Hands over, and forgets, this rank's logprobs [(sample index (b,), logprobs (b, T))] and update figures."""
        record = {"log_probs": list(self.actor.log_probs_seen), "updates": list(self.actor.updates_seen)}
        self.actor.log_probs_seen.clear()
        self.actor.updates_seen.clear()
        return record

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def contract_name(self) -> Optional[str]:
        """The numerical contract of this rank's operators; see `verl.utils.log_prob_record.contract_name`."""
        return contract_name()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rope_table(self) -> Optional[dict[str, Any]]:
        """Describes the cosines and sines of this rank's layers; None of an engine that has no such table."""
        table = getattr(self.actor.engine, "rope_table", lambda: None)()
        return None if table is None else describe(table)


class RecordingActorRolloutRefWorker(ObservingActorRolloutRefWorker):
    """The hybrid worker of a recorded run."""

    actor_worker_cls = RecordingTrainingWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        self.rollout = _DescribedRollout(self.rollout)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_exported(self, weights_folder: Optional[str] = None) -> dict[str, Any]:
        """Descriptions of the tensors of the last sync; with a folder, their checkpoint in Hugging Face names too."""
        if weights_folder is not None and self.rank == 0:
            from verl.workers.engine.megatron.hf_names import write_checkpoint

            weights, _ = self.actor.engine.get_per_tensor_param()
            folder = pathlib.Path(weights_folder)
            write_checkpoint(weights, folder)
            self.actor.model_config.hf_config.save_pretrained(folder)
            self.actor.model_config.tokenizer.save_pretrained(folder)
        return self.rollout.exported
