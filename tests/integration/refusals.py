"""What vLLM at VLLM_BATCH_INVARIANT=1 on a CPU says to settings and layers: `python refusals.py JOB`, JOB a folder.

JOB/job.json: {"model": folder, "settings": {name: engine arguments}, "requests": {name: sampling parameters}}.
JOB/results.json: {name: the error, or ""}, for those settings and requests and for the layers below.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.batch_invariant_cpu import check_model, enable
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.v1.attention.backends.cpu_batch_invariant_attn import CPUBatchInvariantAttentionImpl
from vllm.v1.engine.input_processor import InputProcessor

from vllm import SamplingParams


def said(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def configure(**arguments: Any) -> Any:
    return EngineArgs(**arguments).create_engine_config()


def rope(**parameters: Any) -> torch.nn.Module:
    return get_rope(64, max_position=128, rope_parameters={"rope_theta": 1e6, "rope_type": "default", **parameters})


def with_product(make: Callable[..., Any], meta: bool) -> Any:
    """A layer with the product that it is given after its weights were loaded, here or elsewhere."""
    layer = make(64, 64, params_dtype=torch.bfloat16)
    if meta:
        layer.weight = torch.nn.Parameter(layer.weight.to("meta"), requires_grad=False)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def attention(**settings: Any) -> Any:
    stock: dict[str, Any] = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", **settings}
    return CPUBatchInvariantAttentionImpl(num_heads=2, head_size=64, scale=0.125, num_kv_heads=2, **stock)


LAYERS_WITH_WEIGHTS: dict[str, Callable[..., Any]] = {
    "linear": lambda *sizes, **dtype: ReplicatedLinear(*sizes, bias=False, disable_tp=True, **dtype),
    "embedding": VocabParallelEmbedding,
    "output": ParallelLMHead,
}
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "RMSNorm": lambda: RMSNorm(64, dtype=torch.bfloat16),
    "SiluAndMul": SiluAndMul,
    "rope": rope,
    "rope, scaled": lambda: rope(rope_type="linear", factor=2.0),
    "rope, partial": lambda: rope(partial_rotary_factor=0.5),
    "RMSNorm, float32": lambda: RMSNorm(64, dtype=torch.float32),
    "RMSNorm, no weight": lambda: RMSNorm(64, has_weight=False, dtype=torch.bfloat16),
    "GemmaRMSNorm": lambda: GemmaRMSNorm(64),
    "GeluAndMul": GeluAndMul,
    "LayerNorm": lambda: torch.nn.LayerNorm(64, dtype=torch.bfloat16),
    "Linear": lambda: torch.nn.Linear(64, 64, dtype=torch.bfloat16),
}
ATTENTION: dict[str, dict[str, Any]] = {
    "attention": {},
    "attention, window": {"sliding_window": 16},
    "attention, ALiBi": {"alibi_slopes": [0.5, 0.25]},
    "attention, soft cap": {"logits_soft_cap": 30.0},
    "attention, sinks": {"sinks": torch.zeros(2)},
    "attention, encoder": {"attn_type": "encoder_only"},
    "attention, shared cache": {"kv_sharing_target_layer_name": "model.layers.0"},
}


def one_rank() -> None:
    """What a layer with a vocabulary or with ranks asks for."""
    enable()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    init_distributed_environment(world_size=1, rank=0, local_rank=0, distributed_init_method="env://", backend="gloo")
    ensure_model_parallel_initialized(1, 1)


def main(job: pathlib.Path) -> None:
    task = json.loads((job / "job.json").read_text())
    common = {"model": task["model"], "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 128}
    results = {name: said(configure, **{**common, **arguments}) for name, arguments in task["settings"].items()}
    with set_current_vllm_config(configure(**common)):
        for name, make in LAYERS.items():
            results[name] = said(check_model, torch.nn.Sequential(make()), torch.bfloat16)
        for name, settings in ATTENTION.items():
            results[name] = said(attention, **settings)
        one_rank()
        for name, make in LAYERS_WITH_WEIGHTS.items():
            for where, meta in ((name, False), (f"{name}, its weight elsewhere", True)):
                model = torch.nn.Sequential(with_product(make, meta))
                results[where] = said(check_model, model, torch.bfloat16)
        processor = InputProcessor(configure(**common))
        for name, parameters in task["requests"].items():
            results[name] = said(processor._validate_params, SamplingParams(**parameters), ("generate",))
    (job / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
