"""The parameters that a vLLM engine holds after a weight sync, tensor by tensor, under Hugging Face names.

Of a weight that a CPU kernel reads from a packed copy this is the plain parameter that the copy is made from; that
the copy follows is seen in what the engine says. vLLM fuses q, k, v and gate, up into one parameter each and pads the vocabulary; here they are cut apart again,
so that the bytes compare with those that the trainer exported.
"""

import json
import os
import pathlib
from collections.abc import Iterator

import torch

from verl.utils.log_prob_record import contract_name, describe, described


def resident_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (Hugging Face name, tensor) for every parameter of a vLLM model on one tensor-parallel rank.

    Raises:
        NotImplementedError: a fused module of a kind that has no rule here.
        RuntimeError: an engine that kept no readable weight.
    """
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    packed = getattr(model, "packed_modules_mapping", {})
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        path, _, kind = name.rpartition(".")
        module, weight = modules[path], parameter.detach()
        if weight.numel() == 0:
            raise RuntimeError(f"{name} is empty: the engine kept only its packed copy, so it cannot be read back")
        parent, _, leaf = path.rpartition(".")
        if isinstance(module, VocabParallelEmbedding):
            yield name, weight[: module.org_vocab_size]
        elif leaf not in packed or packed[leaf] == [leaf]:
            yield name, weight
        else:
            if isinstance(module, QKVParallelLinear):
                heads = (module.num_heads, module.num_kv_heads, module.num_kv_heads)
                sizes = [count * module.head_size for count in heads]
            elif isinstance(module, MergedColumnParallelLinear):
                sizes = module.output_partition_sizes
            else:
                raise NotImplementedError(f"{path}: no rule to take a fused {type(module).__name__} apart")
            for part, rows in zip(packed[leaf], weight.split(list(sizes)), strict=True):
                yield f"{parent}.{part}.{kind}", rows


def rope_table(model: torch.nn.Module) -> dict | None:
    """Describes the cosines and sines that every layer of a vLLM model reads; None if layers have tables of their own."""
    tables = {id(m.cos_sin_cache): m.cos_sin_cache for m in model.modules() if hasattr(m, "cos_sin_cache")}
    return describe(*tables.values()) if len(tables) == 1 else None


def write_resident_weights(model: torch.nn.Module, path: str, tensors: bool = True) -> None:
    """Writes what an engine holds as JSON, whole or not at all; without ``tensors`` that table is empty.

    ``{"contract": name or null, "rope": {dtype, shape, sha256} or null, "tensors": {name: {dtype, shape, sha256}}}``
    """
    table: dict[str, dict] = {}
    for _ in described(resident_weights(model) if tensors else (), table):
        pass
    target = pathlib.Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    draft.write_text(json.dumps({"contract": contract_name(), "rope": rope_table(model), "tensors": table}))
    draft.replace(target)
