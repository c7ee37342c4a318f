"""Hugging Face names for a dense decoder of Megatron Core, on one model-parallel rank.

Megatron keeps q, k and v of a query group side by side in one weight, and gate above up in another; Hugging
Face keeps five weights. The rows are the same numbers in another order, so both directions are exact.
"""

import json
import pathlib
import re
from collections.abc import Iterable, Iterator

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PretrainedConfig

from verl.utils.megatron_utils import unwrap_model

_PER_LAYER = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "mlp.linear_fc2": "mlp.down_proj",
    # Transformer Engine keeps the gain of a norm with the linear layer behind it.
    "self_attention.linear_qkv.layer_norm": "input_layernorm",
    "mlp.linear_fc1.layer_norm": "post_attention_layernorm",
}


class DenseDecoderNames:
    """Reads, writes and streams Hugging Face tensors of a dense Qwen3-like model.

    Args:
        hf_config: gives layer count, heads, head_dim and whether the output is tied to the embedding.
    """

    def __init__(self, hf_config: PretrainedConfig):
        self.hf_config = hf_config

    def _split_qkv(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """(groups·(heads_per_group+2)·head_dim, hidden) → q, k, v of (·, hidden)."""
        hf = self.hf_config
        groups, per_group = hf.num_key_value_heads, hf.num_attention_heads // hf.num_key_value_heads
        rows = weight.view(groups, per_group + 2, hf.head_dim, -1)
        return [part.reshape(-1, weight.shape[-1]) for part in rows.split([per_group, 1, 1], dim=1)]

    def _join_qkv(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The inverse of `_split_qkv`."""
        hf = self.hf_config
        shaped = [part.view(hf.num_key_value_heads, -1, hf.head_dim, part.shape[-1]) for part in parts]
        return torch.cat(shaped, dim=1).reshape(-1, parts[0].shape[-1])

    def _names_of(self, name: str) -> list[str]:
        """The Hugging Face names behind one Megatron parameter, in the order of `export_weights`."""
        top = {
            "embedding.word_embeddings.weight": "model.embed_tokens.weight",
            "decoder.final_layernorm.weight": "model.norm.weight",
            "output_layer.weight": "lm_head.weight",
        }
        if name in top:
            return [top[name]]
        prefix, _, rest = name.removeprefix("decoder.layers.").partition(".")
        layer, module = f"model.layers.{prefix}.", re.sub(r"[._]weight$", "", rest)
        if module == "self_attention.linear_qkv":
            return [f"{layer}self_attn.{x}_proj.weight" for x in "qkv"]
        if module == "mlp.linear_fc1":
            return [f"{layer}mlp.{x}_proj.weight" for x in ("gate", "up")]
        if module in _PER_LAYER:
            return [f"{layer}{_PER_LAYER[module]}.weight"]
        raise KeyError(f"parameter {name!r} has no Hugging Face name: is it of a model that this table does not cover?")

    def _parameters(self, models: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for model in models:
            yield from unwrap_model(model).named_parameters()

    @torch.no_grad()
    def export_weights(self, models: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (Hugging Face name, tensor) for every parameter, contiguous, in the parameter's dtype."""
        for name, parameter in self._parameters(models):
            names, weight = self._names_of(name), parameter.detach()
            if len(names) == 3:
                parts = self._split_qkv(weight)
            elif len(names) == 2:
                parts = list(weight.chunk(2))
            else:
                parts = [weight]
            for hf_name, part in zip(names, parts, strict=True):
                yield hf_name, part.contiguous()

    @torch.no_grad()
    def load_weights(self, models: list[torch.nn.Module], path: str) -> None:
        """Copies a Hugging Face checkpoint folder into the parameters, each cast to its parameter's dtype.

        Raises:
            KeyError: the checkpoint lacks a tensor, or has one that no parameter takes.
        """
        files = {}
        for file in sorted(pathlib.Path(path).glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                files.update({name: file for name in tensors.keys()})  # noqa: SIM118: safe_open has no __iter__

        def read(name: str) -> torch.Tensor:
            if name not in files:
                raise KeyError(f"{path}: tensor {name} is missing from the checkpoint")
            with safe_open(files.pop(name), framework="pt") as tensors:
                return tensors.get_tensor(name)

        for name, parameter in self._parameters(models):
            parts = [read(hf_name) for hf_name in self._names_of(name)]
            joined = self._join_qkv(parts) if len(parts) == 3 else torch.cat(parts)
            parameter.copy_(joined)
        if self.hf_config.tie_word_embeddings:
            files.pop("lm_head.weight", None)
        if files:
            raise KeyError(f"{path}: no parameter takes {', '.join(sorted(files))}")

    def save_weights(self, models: list[torch.nn.Module], path: str, **_: object) -> None:
        """Writes ``model.safetensors`` in Hugging Face names into the folder ``path``."""
        write_checkpoint(self.export_weights(models), pathlib.Path(path))


def write_checkpoint(weights: Iterable[tuple[str, torch.Tensor]], folder: pathlib.Path) -> None:
    """Writes named tensors as a Hugging Face checkpoint of one shard (config and tokenizer are the caller's)."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
