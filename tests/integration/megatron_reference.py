"""What the tests of Megatron Core share: a run of `megatron_steps`, comparison by bits, and an independent model.

The model is plain PyTorch in FP64 with autograd's own gradients; it shares no code with what it judges.
"""

from __future__ import annotations

import importlib.util
import math
import os
import pathlib
import subprocess
import sys
from typing import Any

import torch
from megatron_steps import EPS, GROUPS, HEAD_DIM, HEADS, LAYERS, ROPE_BASE, SEQ, batches

STEPS = pathlib.Path(__file__).with_name("megatron_steps.py")

# Relative L2 error of a gradient whose path crosses N roundings, each independent and at most the unit roundoff u:
# about u * sqrt(N). N is 14 a layer (two norms, q/k norms, RoPE, scores, softmax, context, four GEMMs, gate, two
# residuals) and 4 outside, forward and again backward. FP32 sums of a few hundred terms round as well, hence N in place
# of its root there.
ROUNDINGS = 2 * (14 * LAYERS + 4)
TOLERANCE = {torch.bfloat16: 2**-8 * math.sqrt(ROUNDINGS), torch.float32: 2**-24 * ROUNDINGS}

Result = dict[str, Any]


def installed() -> pathlib.Path:
    """The folder that holds the installed, patched `megatron`."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None, "megatron-core is not installed: install the patched wheels"
    return pathlib.Path(spec.origin).parents[2]


def run(out: pathlib.Path, packages: pathlib.Path, *flags: str) -> dict[str, Result]:
    environment = {**os.environ, "PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(STEPS), str(out), str(packages), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-3000:]}"
    assert "RNG state changed within GPU RNG context" not in done.stderr
    return {path.stem: torch.load(path, weights_only=False) for path in out.glob("*.pt")}


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Equal dtype, shape and bits, of finite values."""
    if one.dtype != two.dtype or one.shape != two.shape or not one.numel() or not torch.isfinite(one).all():
        return False
    bits = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.contiguous().view(bits), two.contiguous().view(bits))


def unequal(one: Any, two: Any, path: str = "") -> list[str]:
    """The places at which two results differ by a bit."""
    if isinstance(one, torch.Tensor):
        return [] if same(one, two) else [path]
    if isinstance(one, dict):
        if one.keys() != two.keys():
            return [f"{path}: keys {sorted(one.keys() ^ two.keys())}"]
        return [place for key in one for place in unequal(one[key], two[key], f"{path}/{key}") if key != "seconds"]
    if isinstance(one, list):
        return [p for n, (a, b) in enumerate(zip(one, two, strict=True)) for p in unequal(a, b, f"{path}/{n}")]
    return [] if one == two else [f"{path}: {one} against {two}"]


def plain(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under the names of the model, without those of its wrapper."""
    return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}


def rms_norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * gain


def rotate(x: torch.Tensor, base: float) -> torch.Tensor:
    """RoPE on [batch, sequence, head, HEAD_DIM], pairs half a head apart."""
    angle = torch.outer(torch.arange(SEQ), base ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)).to(x.dtype)
    cosine, sine = angle.cos()[None, :, None], angle.sin()[None, :, None]
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1)


def reference_loss(weights: dict[str, torch.Tensor], tokens: torch.Tensor, labels: torch.Tensor, base: float) -> Any:
    x = weights["embedding.word_embeddings.weight"][tokens]
    causal = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    for layer in range(LAYERS):
        w = {k.removeprefix(f"decoder.layers.{layer}."): v for k, v in weights.items()}
        packed = rms_norm(x, w["input_layernorm.weight"]) @ w["self_attention.linear_qkv.weight"].T
        q, k, v = packed.view(*x.shape[:2], GROUPS, -1).split([HEADS // GROUPS * HEAD_DIM, HEAD_DIM, HEAD_DIM], dim=-1)
        q = rms_norm(q.reshape(*x.shape[:2], HEADS, HEAD_DIM), w["self_attention.q_layernorm.weight"])
        q, k = rotate(q, base), rotate(rms_norm(k, w["self_attention.k_layernorm.weight"]), base)
        k, v = (t.repeat_interleave(HEADS // GROUPS, dim=2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(HEAD_DIM)
        attention = scores.masked_fill(~causal, -torch.inf).softmax(-1)
        context = torch.einsum("bhqk,bkhd->bqhd", attention, v).reshape(*x.shape[:2], -1)
        x = x + context @ w["self_attention.linear_proj.weight"].T
        gate, up = (rms_norm(x, w["pre_mlp_layernorm.weight"]) @ w["mlp.linear_fc1.weight"].T).chunk(2, dim=-1)
        x = x + (gate * torch.sigmoid(gate) * up) @ w["mlp.linear_fc2.weight"].T
    output = weights.get("output_layer.weight", weights["embedding.word_embeddings.weight"])
    logits = rms_norm(x, weights["decoder.final_layernorm.weight"]) @ output.T
    return -logits.log_softmax(-1).gather(-1, labels[..., None]).mean()


def reference(result: Result, base: float = ROPE_BASE) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and FP64 gradients of the first step, from the parameters with which it started."""
    weights = {name: t.double().clone().requires_grad_() for name, t in plain(result["initial"]).items()}
    both = batches()
    tokens, labels = (torch.cat([batch[key] for batch in both]) for key in ("tokens", "labels"))
    loss = reference_loss(weights, tokens, labels, base)
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in weights.items() if weight.grad is not None}


def errors(result: Result, gradients: dict[str, torch.Tensor]) -> tuple[float, float, str]:
    """Relative L2 error over all gradients together; the largest one of a single tensor, and its name."""
    ours = plain(result["steps"][0]["gradients"])
    assert ours.keys() == gradients.keys()
    of = {name: ((ours[name] - g).norm() / g.norm()).item() for name, g in gradients.items()}
    square = sum((ours[name] - g).pow(2).sum() for name, g in gradients.items())
    whole = math.sqrt(square / sum(g.pow(2).sum() for g in gradients.values()))
    worst = max(of, key=lambda name: of[name])
    return whole, of[worst], worst


def assert_gradients_are_the_references(name: str, result: Result) -> None:
    """Loss and gradients of the first step, against the independent model's and within `TOLERANCE`."""
    dtype = result["case"]["dtype"]
    loss, gradients = reference(result)
    whole, worst, where = errors(result, gradients)
    print(
        f"{name}: loss {result['steps'][0]['loss']:.6f}, reference {loss:.6f}; gradient error {whole:.2e}, "
        f"worst tensor {worst:.2e} ({where}), tolerance {TOLERANCE[dtype]:.2e}"
    )
    assert abs(result["steps"][0]["loss"] - loss) <= TOLERANCE[dtype] * loss
    assert whole <= TOLERANCE[dtype] and worst <= 2 * TOLERANCE[dtype]
