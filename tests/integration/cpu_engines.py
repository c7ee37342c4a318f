"""Real vLLM engines on the CPU for tests: a small random Qwen3, and a runner that gives each engine its own process.

"Patched" is the vLLM installed here; "release" is the pinned wheel, unpacked.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import zipfile
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config

from samebits.sources.fetch import fetch
from samebits.sources.pins import load_pins

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCABULARY = 2, 1024, 16, 8, 64, 3072, 64
QKV = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
BUCKETS = 4  # of a weight load

Weights = dict[str, torch.Tensor]
Outputs = list[dict[str, Any]]


def random_weights(tied: bool) -> Weights:
    random = torch.Generator().manual_seed(2)

    def normal(*shape: int, scale: float, mean: float = 0.0) -> torch.Tensor:
        return (mean + scale * torch.randn(*shape, generator=random)).bfloat16()

    # As the output layer too it must give logits of about 1, or a logprob is 0 whatever the weights.
    weights = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN, scale=0.04 if tied else 1.0)}
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        for name, rows in zip("qkv", QKV, strict=True):
            weights[f"{layer}.self_attn.{name}_proj.weight"] = normal(rows, HIDDEN, scale=0.04)
        weights[f"{layer}.self_attn.o_proj.weight"] = normal(HIDDEN, QKV[0], scale=0.04)
        for name in ("gate", "up"):
            weights[f"{layer}.mlp.{name}_proj.weight"] = normal(MLP, HIDDEN, scale=0.04)
        weights[f"{layer}.mlp.down_proj.weight"] = normal(HIDDEN, MLP, scale=0.04)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            weights[f"{layer}.{name}.weight"] = normal(HEAD_DIM, scale=0.1, mean=1.0)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = normal(HIDDEN, scale=0.1, mean=1.0)
    weights["model.norm.weight"] = normal(HIDDEN, scale=0.1, mean=1.0)
    if not tied:
        weights["lm_head.weight"] = normal(VOCABULARY, HIDDEN, scale=0.04)
    return weights


def write_model(folder: pathlib.Path, weights: Weights, tied: bool) -> pathlib.Path:
    folder.mkdir()
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        dtype="bfloat16",
    ).save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Models:
    """Two checkpoints, `original` and `scaled` (every tensor differs), tied or not."""

    def __init__(self, folder: pathlib.Path, tied: bool) -> None:
        weights = random_weights(tied)
        self.weights = {
            "original": weights,
            "scaled": {name: tensor * 1.25 for name, tensor in weights.items()},
        }
        self.folder = {name: write_model(folder / name, w, tied) for name, w in self.weights.items()}

    def load(self, name: str, process: bool) -> dict[str, Any]:
        return {"load": str(self.folder[name] / "model.safetensors"), "buckets": BUCKETS, "process": process}


def unpack_release(folder: pathlib.Path) -> pathlib.Path:
    """The pinned CPU wheel of the release that ships, unpacked into `folder`, which then holds `vllm`."""
    upstream = load_pins().upstreams["vllm"]
    artefact = next(a for a in upstream.artefact if "cpu" in a.profiles)
    with zipfile.ZipFile(fetch(artefact)) as wheel:
        wheel.extractall(folder)
    return folder


def run_script(script: str, job: pathlib.Path, release: pathlib.Path | None = None, **variables: str) -> None:
    """Run a script of this folder on `job` with no VLLM_ variable of the caller's; `variables` come on top."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment |= {
        "PYTHONPATH": str(release or ""),
        "PYTHONPYCACHEPREFIX": str(job.parent / "bytecode"),  # the engines after the first start in half the time
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # takes the vector instructions as the kernel reports them, without a trial
        "VLLM_CACHE_ROOT": str(job.parent / ("cache" if release is None else "cache-of-release")),
        "VLLM_NO_USAGE_STATS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(pathlib.Path(__file__).with_name(script)), str(job)]
    done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"


def run_engine(
    job: pathlib.Path,
    model: pathlib.Path,
    steps: list[dict],
    release: pathlib.Path | None = None,
    batch_invariant: bool = False,
    **engine: Any,
) -> list[Any]:
    """The results of an engine's steps. `release`: run that vLLM in place of the one installed here."""
    settings = {"model": str(model), "enforce_eager": True, **engine}
    (job / "job.json").write_text(json.dumps({"engine": settings, "steps": steps}))
    variables = {"VLLM_BATCH_INVARIANT": "1"} if batch_invariant else {}
    if settings["enforce_eager"]:
        variables["TORCH_COMPILE_DISABLE"] = "1"  # else the sampler is compiled, which takes longer than the test
    run_script("vllm_engine.py", job, release, **variables)
    said = json.loads((job / "results.json").read_text())
    assert said["origin"]["patched"] is (release is None), said["origin"]
    assert release is None or pathlib.Path(said["origin"]["vllm"]).is_relative_to(release)
    assert said["origin"]["batch_invariant"] is batch_invariant, said["origin"]
    return said["results"]
