"""The model that the matrix is run on: the recipe's Qwen3, drawn from a seed, with room for longer prompts."""

from __future__ import annotations

import pathlib

import torch
from safetensors.torch import save_file
from transformers import Qwen3ForCausalLM

from samebits.recipe import model

VOCABULARY_SIZE = len(model.VOCABULARY)
POSITIONS = 4096


def write_weights(folder: pathlib.Path, seed: int, layers: int, hidden: int, head: int = 64) -> None:
    """Write config and bf16 weights as a Hugging Face checkpoint. Norm gains are not 1, so that each of them counts."""
    settings = model.config(layers, hidden, head)
    settings.max_position_embeddings = POSITIONS
    settings.architectures = ["Qwen3ForCausalLM"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Qwen3ForCausalLM(settings)
        for name, parameter in net.named_parameters():
            if "norm" in name:
                parameter.data = 1 + 0.1 * torch.randn_like(parameter)
        weights = {name: tensor.contiguous() for name, tensor in net.to(torch.bfloat16).state_dict().items()}
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings.save_pretrained(folder)
