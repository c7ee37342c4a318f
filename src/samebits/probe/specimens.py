"""Right backwards, written by hand for a CPU, and the wrong ones that are planted into them: what layer 1 is tried on.

Each specimen is one module class of `samebits.judge.modules`, an autograd.Function in plain PyTorch that shares no code
with the judge. A fault is one wrong line in it, of a kind that was seen in public or that seed 000 warns of.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebits.judge.quantized import Float8, linear
from samebits.judge.vjp import Candidate, Outputs, Tensors

Saved = dict[str, Any]


@dataclass(frozen=True)
class Fault:
    """What is planted. module: the class of `samebits.judge.modules`. tensors: those whose gradient it makes wrong.

    case: of the module in which it shows, where not in all. report: the public one whose kind it is."""

    name: str
    module: str
    tensors: tuple[str, ...]
    report: str = ""


_DEQUANT = "quantized linear, Float8BlockScaling, dequant"
_STATIC = "quantized linear, Float8CurrentScaling, dequant"
FAULTS = (
    Fault("transposed dW", "linear with bias", ("weight",)),
    Fault("dropped bias reduction", "linear with bias", ("bias",)),
    Fault("cotangent of swapped batch and sequence", "linear with bias", ("x", "weight")),
    Fault("missing scale", _STATIC, ("x",)),
    Fault("dX from the master", _DEQUANT, ("x",)),
    Fault("re-quantized transpose for dX", _DEQUANT, ("x",), "axolotl#3745"),
    Fault("columnwise copy of zeros", _DEQUANT, ("x",), "mcore-bridge#125"),
    Fault("save_original_input overrides the mode", _DEQUANT, ("weight",), "TransformerEngine#3141"),
    Fault("clipped for identity STE", _STATIC, ("x",)),
    Fault("rounding differentiated", _DEQUANT, ("weight",)),
    Fault("norm weight twice", "rms_norm", ("x",)),
    Fault("wrong epsilon", "rms_norm", ("x", "weight")),
    Fault("rotated the wrong way", "rotary_embedding", ("query", "key")),
    Fault("gate and up exchanged", "silu_and_mul", ("x",)),
    Fault("softmax scale left out", "attention", ("query", "key")),
    Fault("one query head of a group", "attention", ("key", "value")),
    Fault("mask off by one", "attention", ("query", "key", "value")),
    Fault("cotangent read by dimensions", "attention", ("query", "key", "value")),
    Fault("base-2 LSE in a natural-log merge", "merged attention", ("query", "key", "value"), "sglang#40903"),
    Fault("padding rows counted", "masked loss", ("logits",)),
    Fault("shared parameter counted once", "tied embedding", ("weight",)),
    Fault("detached router", "router", ("x", "weight")),
    Fault("probabilities gathered after masking", "router", ("x", "weight"), "ISEEKYAN/Megatron-LM#79"),
    Fault("lost gradient of a repeated route", "routed experts", ("x",)),
    Fault("inverse of the dispatch permutation left out", "routed experts", ("x",)),
)


class _Specimen(torch.autograd.Function):
    """A forward that returns outputs and what is saved, and a backward from that: each a plain function."""

    @staticmethod
    def forward(
        ctx: Any,
        fault: str,
        run: Callable[..., Any],
        back: Callable[..., Tensors],
        constants: Any,
        names: Any,
        *ts: Any,
    ) -> Any:
        inputs = dict(zip(names, ts, strict=True))
        out, saved = run(inputs, constants)
        ctx.save_for_backward(*ts)
        ctx.rest = fault, back, constants, names, saved
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        fault, back, constants, names, saved = ctx.rest
        inputs = dict(zip(names, ctx.saved_tensors, strict=True))
        found = back(inputs, constants, saved, grads, fault)
        cast = [found[n].to(inputs[n].dtype).view(inputs[n].shape) if n in found else None for n in names]
        return None, None, None, None, None, *cast


def specimen(module: str, fault: str = "") -> Candidate:
    """The right module of a class, or the one with a fault. KeyError for a class that has no specimen."""
    if module.startswith("quantized linear"):
        run, back = _quantized_forward, _quantized_backward
        if not fault:
            return lambda t, c: linear(t["x"], t["weight"], t["bias"], c["recipe"], c["mode"])
    else:
        run, back = _SPECIMENS[module]

    def candidate(tensors: Tensors, constants: Mapping[str, Any]) -> Outputs:
        return _Specimen.apply(fault, run, back, constants, tuple(tensors), *tensors.values())

    return candidate


def _wide(t: Tensors) -> Tensors:
    return {name: one.float() for name, one in t.items()}


def _rows(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1])


# --- linear


def _linear_forward(t: Tensors, c: Any) -> tuple[Tensor, Saved]:
    w = _wide(t)
    return (w["x"] @ w["weight"].t() + w["bias"]).to(t["x"].dtype), {}


def _linear_backward(t: Tensors, c: Any, saved: Saved, grads: tuple[Tensor, ...], fault: str) -> Tensors:
    w, grad = _wide(t), grads[0].float()
    if fault == "cotangent of swapped batch and sequence" and grad.dim() == 3:
        grad = grad.transpose(0, 1).reshape(grad.shape)
    rows = _rows(grad)
    weight = rows.t() @ _rows(w["x"])
    if fault == "transposed dW" and weight.shape[0] == weight.shape[1]:
        weight = weight.t().contiguous()
    bias = rows.sum(0)
    if fault == "dropped bias reduction" and grad.dim() == 3:
        bias = grad[:, 0].sum(0)  # of the first of the batch alone
    return {"x": rows @ w["weight"], "weight": weight, "bias": bias}


# --- quantized linear, of the values that the forward used


def _quantized_forward(t: Tensors, c: Any) -> tuple[Tensor, Saved]:
    recipe = c["recipe"]
    x, weight = recipe.x.quantize(_rows(t["x"])), recipe.weight.quantize(t["weight"])
    out = x.dequantize(torch.float32).double() @ weight.dequantize(torch.float32).double().t() + t["bias"].double()
    return out.to(t["x"].dtype).view(*t["x"].shape[:-1], -1), {"x": x, "weight": weight}


def _quantized_backward(t: Tensors, c: Any, saved: Saved, grads: tuple[Tensor, ...], fault: str) -> Tensors:
    dtype, grad = t["x"].dtype, _rows(grads[0]).float()
    x, weight = (saved[name].dequantize(dtype).float() for name in ("x", "weight"))
    at_x = weight
    if fault == "missing scale":
        at_x = saved["weight"].data.float()
    elif fault == "dX from the master":
        at_x = t["weight"].float()
    elif fault == "re-quantized transpose for dX":  # by column, of what was decoded by square blocks
        at_x = Float8((128, 1)).quantize(weight).dequantize(dtype).float()
    elif fault == "columnwise copy of zeros":  # made before the weight was loaded
        at_x = torch.zeros_like(weight)
    elif fault == "save_original_input overrides the mode":
        x = _rows(t["x"]).float()
    found = {"x": grad @ at_x, "weight": grad.t() @ x, "bias": grad.sum(0)}
    if fault == "clipped for identity STE":
        largest = 448 * saved["x"].scale.max()
        found["x"] = found["x"] * (_rows(t["x"]).abs().float() <= largest)
    elif fault == "rounding differentiated":
        del found["weight"]
    return found


# --- norm, RoPE, activation


def _norm_forward(t: Tensors, c: Any) -> tuple[Tensor, Saved]:
    x = t["x"].float()
    out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + c["epsilon"]) * t["weight"].float()
    return out.to(t["x"].dtype), {}


def _norm_backward(t: Tensors, c: Any, saved: Saved, grads: tuple[Tensor, ...], fault: str) -> Tensors:
    x, weight, grad = t["x"].float(), t["weight"].float(), grads[0].float()
    epsilon = 10 * c["epsilon"] if fault == "wrong epsilon" else c["epsilon"]
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    normed, gained = x * scale, grad * weight
    if fault == "norm weight twice":
        gained = gained * weight
    along = (gained * normed).mean(-1, keepdim=True)
    return {"x": (gained - normed * along) * scale, "weight": _rows(grad * normed).sum(0)}


def _turn(x: Tensor, c: Any, sign: float) -> Tensor:
    cos, sin = (part[:, None] for part in c["table"].float()[c["positions"]].chunk(2, -1))
    low, high = x.float().chunk(2, -1)
    return torch.cat((low * cos - sign * high * sin, high * cos + sign * low * sin), -1).to(x.dtype)


def _rotary_forward(t: Tensors, c: Any) -> tuple[tuple[Tensor, ...], Saved]:
    return tuple(_turn(t[name], c, 1.0) for name in ("query", "key")), {}


def _rotary_backward(t: Tensors, c: Any, saved: Saved, grads: tuple[Tensor, ...], fault: str) -> Tensors:
    sign = 1.0 if fault == "rotated the wrong way" else -1.0
    return {name: _turn(grad, c, sign) for name, grad in zip(("query", "key"), grads, strict=True)}


def _activation_forward(t: Tensors, c: Any) -> tuple[Tensor, Saved]:
    gate, up = t["x"].float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(t["x"].dtype), {}


def _activation_backward(t: Tensors, c: Any, saved: Saved, grads: tuple[Tensor, ...], fault: str) -> Tensors:
    gate, up = t["x"].float().chunk(2, -1)
    if fault == "gate and up exchanged":
        gate, up = up, gate
    sigmoid, grad = gate.sigmoid(), grads[0].float()
    return {"x": torch.cat((grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid), -1)}


# --- attention, with the probabilities made again from the LSE


def _scores(t: Tensors, c: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key and value [B, H, S, D] in FP32, a key head for each query head, and the masked scores."""
    query, key, value = (t[name].float().permute(1, 2, 0, 3) for name in ("query", "key", "value"))
    group = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(group, 1) for one in (key, value))
    return query, key, value, _masked(query @ key.transpose(-1, -2) * c["scale"], c["prefix"])


def _masked(scores: Tensor, earlier: int) -> Tensor:
    rows, columns = scores.shape[-2:]
    return scores.masked_fill(torch.ones(rows, columns, dtype=torch.bool).triu(earlier + 1), -torch.inf)


def _attention_forward(t: Tensors, c: Any) -> tuple[Tensor, Saved]:
    _, _, value, scores = _scores(t, c)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    out = (torch.exp(scores - lse) @ value).to(t["query"].dtype)
    return out.permute(2, 0, 1, 3).flatten(2), {"out": out, "lse": lse}


def _merged_forward(t: Tensors, c: Any) -> tuple[Tensor, Saved]:
    """The prefix and the suffix by themselves, put together by their LSEs, natural logarithms both."""
    _, _, value, scores = _scores(t, c)
    parts = [(scores[..., : c["prefix"]], value[..., : c["prefix"], :])]
    parts.append((scores[..., c["prefix"] :], value[..., c["prefix"] :, :]))
    lses = [torch.logsumexp(s, -1, keepdim=True) for s, _ in parts]
    outs = [torch.softmax(s, -1) @ v for s, v in parts]
    lse = torch.logaddexp(*lses)
    out = sum(o * torch.exp(own - lse) for o, own in zip(outs, lses, strict=True))
    assert isinstance(out, Tensor)
    out = out.to(t["query"].dtype)
    return out.permute(2, 0, 1, 3).flatten(2), {"out": out, "lse": lse, "lses": lses}


def _attention_backward(t: Tensors, c: Any, saved: Saved, grads: tuple[Tensor, ...], fault: str) -> Tensors:
    query, key, value, scores = _scores(t, c)
    groups = t["key"].shape[2]
    length, batch, heads, size = t["query"].shape
    grad = grads[0].float().view(length, batch, heads, size).permute(1, 2, 0, 3)
    if fault == "cotangent read by dimensions":  # as if a row were [D, H]
        grad = grads[0].float().view(length, batch, size, heads).permute(1, 3, 0, 2)
    if fault == "mask off by one":
        scores = _masked(scores, c["prefix"] - 1)
    lse = saved["lse"]
    if fault == "base-2 LSE in a natural-log merge":
        prefix, suffix = saved["lses"]
        lse = torch.logaddexp(prefix / math.log(2), suffix)
    probabilities = torch.exp(scores - lse)
    delta = (grad * saved["out"].float()).sum(-1, keepdim=True)
    at_scores = probabilities * (grad @ value.transpose(-1, -2) - delta)
    if fault != "softmax scale left out":
        at_scores = at_scores * c["scale"]
    found = {"query": at_scores @ key, "key": at_scores.transpose(-1, -2) @ query}
    found["value"] = probabilities.transpose(-1, -2) @ grad
    for name in ("key", "value"):
        of_group = found[name].unflatten(1, (groups, -1))
        found[name] = of_group[:, :, 0] if fault == "one query head of a group" else of_group.sum(2)
    return {name: one.permute(2, 0, 1, 3).contiguous() for name, one in found.items()}


# --- loss, embedding


def _selected_forward(t: Tensors, c: Any) -> tuple[Tensor, Saved]:
    logits = t["logits"].float()
    return torch.log_softmax(logits, -1).gather(-1, c["index"][..., None])[..., 0], {}


def _selected_backward(t: Tensors, c: Any, saved: Saved, grads: tuple[Tensor, ...], fault: str) -> Tensors:
    found = -torch.softmax(t["logits"].float(), -1) * grads[0][..., None]
    return {"logits": found.scatter_add(-1, c["index"][..., None], grads[0][..., None])}


def _loss_forward(t: Tensors, c: Any) -> tuple[Tensor, Saved]:
    selected, _ = _selected_forward(t, c)
    return -(selected * c["mask"]).sum() / c["mask"].sum(), {}


def _loss_backward(t: Tensors, c: Any, saved: Saved, grads: tuple[Tensor, ...], fault: str) -> Tensors:
    each = -grads[0] * c["mask"] / c["mask"].sum()
    if fault == "padding rows counted":
        each = -grads[0] * torch.ones_like(each) / c["mask"].sum()
    return _selected_backward(t, c, saved, (each,), "")


def _embedding_forward(t: Tensors, c: Any) -> tuple[Tensor, Saved]:
    return t["weight"][c["tokens"]], {}


def _embedding_backward(t: Tensors, c: Any, saved: Saved, grads: tuple[Tensor, ...], fault: str) -> Tensors:
    return {"weight": torch.zeros_like(t["weight"], dtype=torch.float32).index_add(0, c["tokens"], grads[0].float())}


def _tied_forward(t: Tensors, c: Any) -> tuple[Tensor, Saved]:
    weight = t["weight"].float()
    return (weight[c["tokens"]] @ weight.t()).to(t["weight"].dtype), {}


def _tied_backward(t: Tensors, c: Any, saved: Saved, grads: tuple[Tensor, ...], fault: str) -> Tensors:
    weight, grad = t["weight"].float(), grads[0].float()
    found = grad.t() @ weight[c["tokens"]]
    if fault != "shared parameter counted once":
        found = found.index_add(0, c["tokens"], grad @ weight)
    return {"weight": found}


# --- mixture of experts


def _router_forward(t: Tensors, c: Any) -> tuple[Tensor, Saved]:
    probabilities = torch.softmax(t["x"].float() @ t["weight"].float().t(), -1)
    chosen = probabilities.gather(-1, c["routes"])
    return (chosen / chosen.sum(-1, keepdim=True)).to(t["x"].dtype), {"probabilities": probabilities}


def _router_backward(t: Tensors, c: Any, saved: Saved, grads: tuple[Tensor, ...], fault: str) -> Tensors:
    probabilities, grad = saved["probabilities"], grads[0].float()
    chosen = probabilities.gather(-1, c["routes"])
    if fault == "probabilities gathered after masking":  # a route that is not of this forward's own top k reads a zero
        own = probabilities.topk(c["routes"].shape[-1], -1).indices
        chosen = torch.zeros_like(probabilities).scatter(-1, own, probabilities.gather(-1, own)).gather(-1, c["routes"])
    # Of the normalized p / s the softmax's own normalization cancels: what is left is a softmax over the chosen.
    total = chosen.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    normalized = chosen / total
    at_chosen = normalized * (grad - (grad * normalized).sum(-1, keepdim=True))
    at_logits = torch.zeros_like(probabilities).scatter_add(-1, c["routes"], at_chosen)
    if fault == "detached router":
        at_logits = torch.zeros_like(at_logits)
    return {"x": at_logits @ t["weight"].float(), "weight": at_logits.t() @ _rows(t["x"].float())}


def _experts_forward(t: Tensors, c: Any) -> tuple[Tensor, Saved]:
    w, (tokens, count) = _wide(t), c["routes"].shape
    order = c["routes"].flatten().argsort(stable=True)  # the routes sorted by expert: the dispatch
    sizes = torch.bincount(c["routes"].flatten(), minlength=w["first"].shape[0]).tolist()
    sent = w["x"][order // count].split(sizes)
    gate_up = [one @ first.t() for one, first in zip(sent, w["first"], strict=True)]
    hidden = [torch.nn.functional.silu(one.chunk(2, -1)[0]) * one.chunk(2, -1)[1] for one in gate_up]
    returned = torch.cat([one @ second.t() for one, second in zip(hidden, w["second"], strict=True)])
    placed = torch.empty_like(returned)
    placed[order] = returned
    out = (placed.view(tokens, count, -1) * w["probabilities"][..., None]).sum(1)
    saved = {"order": order, "sizes": sizes, "sent": sent, "gate_up": gate_up, "hidden": hidden, "placed": placed}
    if "shared_first" in w:
        saved["shared"] = w["x"] @ w["shared_first"].t()
        gate, up = saved["shared"].chunk(2, -1)
        out = out + (torch.nn.functional.silu(gate) * up) @ w["shared_second"].t()
    return out.to(t["x"].dtype), saved


def _slope(gate_up: Tensor, grad: Tensor) -> Tensor:
    return _activation_backward({"x": gate_up}, None, {}, (grad,), "")["x"]


def _experts_backward(t: Tensors, c: Any, saved: Saved, grads: tuple[Tensor, ...], fault: str) -> Tensors:
    w, grad, order = _wide(t), grads[0].float(), saved["order"]
    tokens, count = c["routes"].shape
    at_placed = (grad[:, None] * w["probabilities"][..., None]).view(tokens * count, -1)
    found: dict[str, list[Tensor]] = {"first": [], "second": []}
    back = []
    for i, at_expert in enumerate(at_placed[order].split(saved["sizes"])):
        found["second"].append(at_expert.t() @ saved["hidden"][i])
        at_gate_up = _slope(saved["gate_up"][i], at_expert @ w["second"][i])
        found["first"].append(at_gate_up.t() @ saved["sent"][i])
        back.append(at_gate_up @ w["first"][i])
    at_sent, at_x = torch.cat(back), torch.zeros_like(w["x"])
    if fault == "lost gradient of a repeated route":
        at_x[order // count] = at_sent  # written, not added
    elif fault == "inverse of the dispatch permutation left out":
        at_x = at_sent.view(tokens, count, -1).sum(1)
    else:
        at_x = at_x.index_add(0, order // count, at_sent)
    result = {name: torch.stack(parts) for name, parts in found.items()}
    result["probabilities"] = (saved["placed"].view(tokens, count, -1) * grad[:, None]).sum(-1)
    if "shared_first" in w:
        gate, up = saved["shared"].chunk(2, -1)
        result["shared_second"] = grad.t() @ (torch.nn.functional.silu(gate) * up)
        at_shared = _slope(saved["shared"], grad @ w["shared_second"])
        result["shared_first"] = at_shared.t() @ w["x"]
        at_x = at_x + at_shared @ w["shared_first"]
    return {**result, "x": at_x}


_SPECIMENS: dict[str, tuple[Callable[..., Any], Callable[..., Tensors]]] = {
    "linear with bias": (_linear_forward, _linear_backward),
    "rms_norm": (_norm_forward, _norm_backward),
    "rotary_embedding": (_rotary_forward, _rotary_backward),
    "silu_and_mul": (_activation_forward, _activation_backward),
    "attention": (_attention_forward, _attention_backward),
    "merged attention": (_merged_forward, _attention_backward),
    "selected_log_prob": (_selected_forward, _selected_backward),
    "masked loss": (_loss_forward, _loss_backward),
    "embedding": (_embedding_forward, _embedding_backward),
    "tied embedding": (_tied_forward, _tied_backward),
    "router": (_router_forward, _router_backward),
    "routed experts": (_experts_forward, _experts_backward),
}


@functools.cache
def modules() -> tuple[str, ...]:
    """The module classes that have a specimen."""
    from samebits.judge.modules import MODULES

    return tuple(name for name in MODULES if name in _SPECIMENS or name.startswith("quantized linear"))
