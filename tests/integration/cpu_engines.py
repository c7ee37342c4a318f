"""Real vLLM engines on the CPU for tests: a small random Qwen3, and a runner that gives each engine its own process.

"Patched" is the vLLM installed here; "release" is the pinned wheel, unpacked.
"""

from __future__ import annotations

import dataclasses
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

LAYERS, MLP, VOCABULARY = 2, 3072, 64
BUCKETS = 4  # of a weight load

Weights = dict[str, torch.Tensor]
Outputs = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Shape:
    """What two models of these tests may differ in."""

    tied: bool = False
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 64

    @property
    def qkv(self) -> tuple[int, int, int]:
        """Rows of the weights of q, k and v."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim


def random_weights(shape: Shape) -> Weights:
    random = torch.Generator().manual_seed(2)

    def normal(*size: int, scale: float, mean: float = 0.0) -> torch.Tensor:
        return (mean + scale * torch.randn(*size, generator=random)).bfloat16()

    hidden = shape.hidden
    deviation = 1.28 * hidden**-0.5
    # As the output layer too it must give logits of about 1, or a logprob is 0 whatever the weights.
    weights = {"model.embed_tokens.weight": normal(VOCABULARY, hidden, scale=deviation if shape.tied else 1.0)}
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        for name, rows in zip("qkv", shape.qkv, strict=True):
            weights[f"{layer}.self_attn.{name}_proj.weight"] = normal(rows, hidden, scale=deviation)
        weights[f"{layer}.self_attn.o_proj.weight"] = normal(hidden, shape.qkv[0], scale=deviation)
        for name in ("gate", "up"):
            weights[f"{layer}.mlp.{name}_proj.weight"] = normal(MLP, hidden, scale=deviation)
        weights[f"{layer}.mlp.down_proj.weight"] = normal(hidden, MLP, scale=deviation)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            weights[f"{layer}.{name}.weight"] = normal(shape.head_dim, scale=0.1, mean=1.0)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = normal(hidden, scale=0.1, mean=1.0)
    weights["model.norm.weight"] = normal(hidden, scale=0.1, mean=1.0)
    if not shape.tied:
        weights["lm_head.weight"] = normal(VOCABULARY, hidden, scale=deviation)
    return weights


def write_model(folder: pathlib.Path, weights: Weights, shape: Shape) -> pathlib.Path:
    folder.mkdir()
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=256,
        tie_word_embeddings=shape.tied,
        dtype="bfloat16",
    ).save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Models:
    """Two checkpoints, `original` and `scaled` (every tensor differs), of one shape."""

    def __init__(self, folder: pathlib.Path, shape: Shape) -> None:
        weights = random_weights(shape)
        self.weights = {
            "original": weights,
            "scaled": {name: tensor * 1.25 for name, tensor in weights.items()},
        }
        self.folder = {name: write_model(folder / name, w, shape) for name, w in self.weights.items()}

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
