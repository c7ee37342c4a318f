"""verl's engine on the aligned layer spec scores what a rollout served: `python aligned_trainer.py JOB`, JOB a folder.

JOB/job.json: {"model": folder, "tokens": [[...]], "temperatures": [...]}. JOB/results.json: {"log_probs": of each
temperature, each row's tokens but the first; "kernels": [operator, module] of the forwards, with and without gradients;
"rope": the trainer's table and vLLM's, described}.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from types import SimpleNamespace
from typing import Any

os.environ |= {"VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1"}

import torch
from kernels import Kernels
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from transformers import AutoConfig
from verl.models.mcore.config_converter import get_hf_rope_theta
from verl.utils.log_prob_record import describe
from verl.workers.engine.megatron.local_spec_impl import MegatronLocalSpecEngine
from verl.workers.rollout.vllm_rollout.resident_weights import rope_table
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

NOTHING_ELSE: dict[str, Any] = {
    "calculate_sum_pi_squared": False,
    "calculate_entropy": False,
    "distillation_use_topk": False,
    "distillation_only": False,
}


def engine_of(model: str) -> MegatronLocalSpecEngine:
    """The engine with its model built and loaded as verl builds and loads it, without optimizer."""
    engine = object.__new__(MegatronLocalSpecEngine)
    engine.model_config = SimpleNamespace(hf_config=AutoConfig.from_pretrained(model), local_path=model)
    engine.engine_config = SimpleNamespace(dtype="bfloat16", forward_only=True, override_ddp_config={})
    engine.optimizer_config = None
    engine._build_tf_config()
    assert engine.is_aligned
    engine.module = engine._build_megatron_module()
    return engine


def main(job: pathlib.Path) -> None:
    task = json.loads((job / "job.json").read_text())
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    engine = engine_of(task["model"])
    rows = [torch.tensor(row) for row in task["tokens"]]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    label = tokens.roll(-1, dims=1)
    said = []
    for gradients in (True, False):
        with Kernels() as kernels, torch.set_grad_enabled(gradients):
            logits = engine.module[0](input_ids=tokens, position_ids=positions)
            of_each = []
            for temperature in task["temperatures"]:
                divisor = torch.full(tokens.shape, temperature)
                answer = engine._lm_head_logits_processor(logits, label, divisor, **NOTHING_ELSE)["log_probs"]
                assert answer.requires_grad is gradients
                of_each.append([one[: len(row) - 1].tolist() for one, row in zip(answer, rows, strict=True)])
        said.append((of_each, sorted(set(kernels.seen))))
    (with_gradients, kernels_with), (without, kernels_without) = said
    assert with_gradients == without
    table = engine.rope_table()
    assert table is not None
    hf = engine.model_config.hf_config
    with set_current_vllm_config(VllmConfig()):
        theirs = RotaryEmbedding(
            hf.head_dim, hf.head_dim, hf.max_position_embeddings, get_hf_rope_theta(hf), True, table.dtype
        )
    result = {
        "log_probs": with_gradients,
        "kernels": sorted({*kernels_with, *kernels_without}),
        "rope": [describe(table), rope_table(torch.nn.ModuleList([theirs, theirs]))],
    }
    (job / "results.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
