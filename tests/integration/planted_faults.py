"""Faults to plant into the rollout of a real run: worker extensions of vLLM in place of verl's own.

verl's engine is told to take one by `engine_kwargs.vllm.worker_extension_cls`.
"""

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

PARAMETER, ELEMENT, BIT = "model.norm.weight", 7, 0


class OneFlippedBit(vLLMColocateWorkerExtension):
    """After each weight sync the last bit of one element of one weight is the other one."""

    def update_weights_from_ipc(self, *arguments, **options) -> None:
        super().update_weights_from_ipc(*arguments, **options)
        weight = dict(self.model_runner.model.named_parameters())[PARAMETER]
        weight.data.view(torch.int16)[ELEMENT] ^= 1 << BIT
