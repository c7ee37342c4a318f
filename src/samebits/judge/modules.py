"""The module classes that layer 1 judges: each one's surrogate, and the inputs with which it is asked.

A surrogate is the module's formula, in FP64 where it is called, and shares no code with a module. Discrete choices
(tokens, selected indices, routes, quantized codes) are constants of a problem: no gradient goes to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from . import quantized
from .quantized import RECIPES, Float8, Quantized, Recipe
from .vjp import Bridge, Cotangent, Outputs, Problem, Surrogate, Tensors, cotangents_like, visible_with_surrogate

EPSILON = 1e-6
BASE = 10_000.0


@dataclass(frozen=True)
class Drawn:
    """inputs: differentiable. reduction: as of a `Problem`. padded: last entries of the outputs' first dimension
    that nothing reads, whose cotangents are zero."""

    inputs: Tensors
    constants: Mapping[str, Any]
    reduction: int
    padded: int = 0


class Draw:
    """Random tensors of one dtype and one seed."""

    def __init__(self, dtype: torch.dtype, seed: int):
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale + mean).to(self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator)


Case = Callable[[Draw], Drawn]


@dataclass(frozen=True)
class Module:
    """A module class. cases: by name, what it is asked. smooth: its surrogate can be compared with differences."""

    name: str
    surrogate: Surrogate
    cases: Mapping[str, Case]
    smooth: bool = True

    def problem(self, case: str, dtype: torch.dtype, cotangent: Cotangent, seed: int) -> Problem:
        """The problem of one case. Its outputs' shapes are the surrogate's; their dtype that of the inputs."""
        draw = Draw(dtype, seed)
        drawn = self.cases[case](draw)
        with torch.no_grad():
            wide = {n: t.double() for n, t in drawn.inputs.items()}
            outputs = self.surrogate(wide, drawn.constants, Bridge(dtype, {}))
        shapes = outputs if isinstance(outputs, tuple) else (outputs,)
        dtypes = drawn.constants.get("output_dtype", dtype)
        given = cotangents_like(cotangent, [torch.empty(o.shape, dtype=dtypes) for o in shapes], draw.generator)
        if drawn.padded and cotangent != "ones":  # y.sum() sums the padding too
            for one in given:
                one[-drawn.padded :] = 0
        problem = Problem(
            self.name, case, dtype, drawn.inputs, drawn.constants, cotangent, given, self.surrogate, drawn.reduction,
            seed=seed,
        )  # fmt: skip
        return fixed(problem)


def fixed(problem: Problem) -> Problem:
    """The problem with what quantization chose as constants: the values that a forward used, and the gradient's."""
    recipe, mode = problem.constants.get("recipe"), problem.constants.get("mode")
    if recipe is None:
        return problem
    x, weight = (problem.inputs[name] for name in ("x", "weight"))
    rows = x.reshape(-1, x.shape[-1])
    grad = problem.cotangents[0].reshape(-1, weight.shape[0])

    def kept(one: Quantized, dtype: torch.dtype) -> Tensor:
        return one.dequantize(dtype).double()

    chosen = {
        "forward_x": kept(recipe.x.quantize(rows), torch.float32).view(x.shape),
        "forward_weight": kept(recipe.weight.quantize(weight), torch.float32),
    }
    if mode == "dequant":
        chosen["backward_x"] = kept(recipe.x.quantize(rows), problem.dtype).view(x.shape)
        chosen["backward_weight"] = kept(recipe.weight.quantize(weight), problem.dtype)
    elif mode == "default":
        chosen["backward_x"] = kept(recipe.x_columns.quantize(rows), torch.float32).view(x.shape)
        chosen["backward_weight"] = kept(recipe.weight_columns.quantize(weight), torch.float32)
        chosen["grad_at_weight"] = kept(recipe.grad.quantize(grad), torch.float32)
        chosen["grad_at_x"] = kept(recipe.grad_columns.quantize(grad), torch.float32)
    return replace(problem, constants={**problem.constants, **chosen})


# --- the formulas


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + epsilon) * weight


class _Sigmoid(torch.autograd.Function):
    """A sigmoid that is known to one rounding, and its slope by what is known: close to 1 there is little left."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bridge: Bridge) -> Tensor:
        known = bridge.moved(torch.sigmoid(x))
        ctx.save_for_backward(known)
        return known

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (known,) = ctx.saved_tensors
        return grad * known * (1 - known), None


class _Softmax(torch.autograd.Function):
    """A softmax over the last dimension, known to one rounding: it has little slope where one takes all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bridge: Bridge) -> Tensor:
        known = bridge.moved(torch.softmax(x, -1))
        ctx.save_for_backward(known)
        return known

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (known,) = ctx.saved_tensors
        return known * (grad - (grad * known).sum(-1, keepdim=True)), None


def silu_and_mul(x: Tensor, bridge: Bridge) -> Tensor:
    gate, up = x.chunk(2, -1)
    return gate * _Sigmoid.apply(gate, bridge) * up


def rotate(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """x [T, H, D] by the angles of positions [T]; table [P, D], cosines beside sines."""
    cos, sin = (part[:, None] for part in table.double()[positions].chunk(2, -1))
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float, bridge: Bridge, earlier: int = 0) -> Tensor:
    """Causal attention of query [S, B, H, D] over key and value [earlier + S, B, KVH, D] -> [S, B, H, D]."""
    group = query.shape[2] // key.shape[2]
    key, value = (t.repeat_interleave(group, 2) for t in (key, value))
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * scale
    later = torch.arange(key.shape[0])[None] > torch.arange(query.shape[0])[:, None] + earlier
    # Kept in FP32: an error that is small beside a score is a relative one of its exponential.
    scores = bridge.known(scores, torch.float32)
    probabilities = _Softmax.apply(scores.masked_fill(later, -torch.inf), bridge)
    return torch.einsum("bhqk,kbhd->qbhd", probabilities, value)


def router(x: Tensor, weight: Tensor, routes: Tensor, bridge: Bridge) -> Tensor:
    """Probabilities [T, k] of the routes int64 [T, k], each token's summing to one."""
    chosen = _Softmax.apply(bridge.known(x @ weight.T, torch.float32), bridge).gather(-1, routes)
    return chosen / chosen.sum(-1, keepdim=True)


def experts(x: Tensor, first: Tensor, second: Tensor, probabilities: Tensor, routes: Tensor, bridge: Bridge) -> Tensor:
    """x [T, K] through SwiGLU experts [E, 2 F, K] and [E, K, F], summed by probabilities [T, k] over routes [T, k]."""
    hidden = silu_and_mul(torch.einsum("tk,tcfk->tcf", x, first[routes]), bridge)
    return torch.einsum("tcf,tckf,tc->tk", hidden, second[routes], probabilities)


# --- surrogates by module class


def _linear(t: Tensors, c: Mapping[str, Any], bridge: Bridge) -> Outputs:
    out = t["x"] @ t["weight"].T
    return out + t["bias"] if "bias" in t else out


def _rms_norm(t: Tensors, c: Mapping[str, Any], bridge: Bridge) -> Outputs:
    return rms_norm(t["x"], t["weight"], c["epsilon"])


def _rotary(t: Tensors, c: Mapping[str, Any], bridge: Bridge) -> Outputs:
    return rotate(t["query"], c["positions"], c["table"]), rotate(t["key"], c["positions"], c["table"])


def _silu_and_mul(t: Tensors, c: Mapping[str, Any], bridge: Bridge) -> Outputs:
    return silu_and_mul(t["x"], bridge)


def _attention(t: Tensors, c: Mapping[str, Any], bridge: Bridge) -> Outputs:
    return attention(t["query"], t["key"], t["value"], c["scale"], bridge).flatten(2)


def _merged_attention(t: Tensors, c: Mapping[str, Any], bridge: Bridge) -> Outputs:
    return attention(t["query"], t["key"], t["value"], c["scale"], bridge, c["prefix"]).flatten(2)


def _selected(t: Tensors, c: Mapping[str, Any], bridge: Bridge) -> Outputs:
    logits = t["logits"]
    return (logits - torch.logsumexp(logits, -1, keepdim=True)).gather(-1, c["index"][..., None])[..., 0]


def _masked_loss(t: Tensors, c: Mapping[str, Any], bridge: Bridge) -> Outputs:
    selected = _selected(t, c, bridge)
    assert isinstance(selected, Tensor)
    return -torch.where(c["mask"], selected, 0.0).sum() / c["mask"].sum()


def _embedding(t: Tensors, c: Mapping[str, Any], bridge: Bridge) -> Outputs:
    return t["weight"][c["tokens"]]


def _tied(t: Tensors, c: Mapping[str, Any], bridge: Bridge) -> Outputs:
    return t["weight"][c["tokens"]] @ t["weight"].T


def _router(t: Tensors, c: Mapping[str, Any], bridge: Bridge) -> Outputs:
    return router(t["x"], t["weight"], c["routes"], bridge)


def _experts(t: Tensors, c: Mapping[str, Any], bridge: Bridge) -> Outputs:
    out = experts(t["x"], t["first"], t["second"], t["probabilities"], c["routes"], bridge)
    if "shared_first" in t:
        out = out + silu_and_mul(t["x"] @ t["shared_first"].T, bridge) @ t["shared_second"].T
    return out


class _Given(torch.autograd.Function):
    """A value whose gradient is another than what comes: the quantized one of the contract."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.view(grad.shape), None


def _quantized_linear(t: Tensors, c: Mapping[str, Any], bridge: Bridge) -> Outputs:
    """Identity STE through both quantizations; dX and dW of the values that the mode names."""
    x, weight, bias = t["x"], t["weight"], t["bias"]
    if "forward_x" not in c:  # shapes alone are asked for
        return x @ weight.T + bias
    value = c["forward_x"] @ c["forward_weight"].T
    if c["mode"] == "unquant":
        surrogate = x @ weight.T
    else:
        at = {name: bridge.moved(c[name]) for name in ("backward_x", "backward_weight")}
        if c["mode"] == "dequant":
            used_x = visible_with_surrogate(at["backward_x"], x)
            surrogate = used_x @ visible_with_surrogate(at["backward_weight"], weight).T
        else:
            through_x = _Given.apply(x @ at["backward_weight"].T, bridge.moved(c["grad_at_weight"]))
            surrogate = through_x + _Given.apply(at["backward_x"] @ weight.T, bridge.moved(c["grad_at_x"]))
    return visible_with_surrogate(value, surrogate) + bias


# --- surrogates of composites, which are shown what their operators computed


def mlp(x: Tensor, first: Tensor, second: Tensor, bridge: Bridge) -> Tensor:
    gate_up = bridge.linear(x, first)
    return bridge.linear(bridge.show("silu_and_mul", silu_and_mul(gate_up, bridge), gate_up), second)


def self_attention(
    x: Tensor, t: Tensors, table: Tensor, bridge: Bridge, heads: int, groups: int, epsilon: float
) -> Tensor:
    """x [S, B, hidden]; t: the weights linear_qkv (groups of queries, a key, a value), q_layernorm, k_layernorm and
    linear_proj; table [S, D], cosines beside sines in the dtype under test."""
    length, batch, _ = x.shape
    size = table.shape[-1]
    packed = bridge.linear(x, t["linear_qkv.weight"]).view(length, batch, groups, -1)
    query, key, value = packed.split([heads // groups * size, size, size], -1)
    positions = torch.arange(length).repeat_interleave(batch)

    def turned(one: Tensor, gain: Tensor) -> Tensor:
        normed = bridge.show("rms_norm", rms_norm(one, gain, epsilon), one, gain, epsilon)
        flat = normed.reshape(length * batch, -1, size)
        return bridge.show("rotate", rotate(flat, positions, table), flat, positions, table).view(normed.shape)

    query = turned(query.reshape(length, batch, heads, size), t["q_layernorm.weight"])
    key = turned(key.reshape(length, batch, groups, size), t["k_layernorm.weight"])
    value = value.reshape(key.shape)
    context = attention(query, key, value, size**-0.5, bridge).flatten(2)
    context = bridge.show("attention", context, query, key, value, size**-0.5)
    return bridge.linear(context, t["linear_proj.weight"])


def layer(x: Tensor, t: Tensors, table: Tensor, bridge: Bridge, heads: int, groups: int, epsilon: float) -> Tensor:
    """One decoder layer; its residual sums are rounded as the forward rounds them."""

    def normed(one: Tensor, name: str) -> Tensor:
        return bridge.show("rms_norm", rms_norm(one, t[name], epsilon), one, t[name], epsilon)

    def added(a: Tensor, b: Tensor) -> Tensor:
        return bridge.show("add", a + b, a, b)

    of_attention = {n.removeprefix("self_attention."): v for n, v in t.items() if n.startswith("self_attention.")}
    attended = self_attention(normed(x, "input_layernorm.weight"), of_attention, table, bridge, heads, groups, epsilon)
    x = added(attended, x)
    fed = mlp(normed(x, "pre_mlp_layernorm.weight"), t["mlp.linear_fc1.weight"], t["mlp.linear_fc2.weight"], bridge)
    return added(fed, x)


def model(t: Tensors, c: Mapping[str, Any], bridge: Bridge) -> Outputs:
    """Log-probabilities [B, S] of `labels` [B, S] after `tokens` [B, S], as a decoder of these parameters has them."""
    embedding = t["embedding.word_embeddings.weight"]
    x = embedding[c["tokens"].T]
    for i in range(c["layers"]):
        prefix = f"decoder.layers.{i}."
        own = {n.removeprefix(prefix): v for n, v in t.items() if n.startswith(prefix)}
        x = layer(x, own, c["table"], bridge, c["heads"], c["groups"], c["epsilon"])
    gain = t["decoder.final_layernorm.weight"]
    x = bridge.show("rms_norm", rms_norm(x, gain, c["epsilon"]), x, gain, c["epsilon"])
    logits = bridge.linear(x, t.get("output_layer.weight", embedding))
    chosen = torch.log_softmax(logits, -1).gather(-1, c["labels"].T[..., None])[..., 0]
    return chosen.T


# --- what they are asked


def rope_table(length: int, size: int, dtype: torch.dtype) -> Tensor:
    """[length, size]: FP32 cosines beside sines, rounded to the dtype."""
    frequencies = BASE ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), -1).to(dtype)


def _linear_case(
    rows: tuple[int, ...], k: int, n: int, bias: bool, scale: float = 1.0, zeros: bool = False, padded: int = 0
) -> Case:
    def draw(d: Draw) -> Drawn:
        x = d(*rows, k, scale=scale)
        if zeros:
            x[::3] = 0
        inputs = {"x": x, "weight": d(n, k, scale=k**-0.5 / scale)}
        if bias:
            inputs["bias"] = d(n)
        tokens = x.numel() // k
        return Drawn(inputs, {}, max(tokens, n), padded)

    return draw


def _linear_cases(bias: bool) -> dict[str, Case]:
    return {
        "one row": _linear_case((1,), 80, 50, bias),
        "batched, square": _linear_case((17, 3), 96, 96, bias),
        "unaligned tails": _linear_case((257,), 81, 47, bias),
        "zeros, padding": _linear_case((34, 2), 80, 50, bias, zeros=True, padded=7),
        "large and small": _linear_case((33,), 80, 50, bias, scale=2.0**12),
    }


def _norm_case(rows: tuple[int, ...], size: int, scale: float = 1.0, zeros: bool = False, padded: int = 0) -> Case:
    def draw(d: Draw) -> Drawn:
        x = d(*rows, size, scale=scale)
        if zeros:
            x[::5] = 0
        weight = d(size, scale=0.3, mean=1.0)
        return Drawn({"x": x, "weight": weight}, {"epsilon": EPSILON}, max(size, x.numel() // size), padded)

    return draw


def _rotary_case(tokens: int, heads: int, groups: int, size: int, first: int = 0, padded: int = 0) -> Case:
    def draw(d: Draw) -> Drawn:
        positions = torch.arange(first, first + tokens)
        constants = {"positions": positions, "table": rope_table(first + tokens, size, d.dtype)}
        return Drawn({"query": d(tokens, heads, size), "key": d(tokens, groups, size)}, constants, 3, padded)

    return draw


def _activation_case(rows: tuple[int, ...], size: int, scale: float = 1.0, padded: int = 0) -> Case:
    def draw(d: Draw) -> Drawn:
        x = d(*rows, 2 * size, scale=scale)
        x[..., 0], x[..., 1] = 0, -30
        return Drawn({"x": x}, {}, 6, padded)  # the slope, times up, times the gradient

    return draw


def _attention_case(
    length: int, batch: int, heads: int, groups: int, size: int, scale: float = 1.0, prefix: int = 0, padded: int = 0
) -> Case:
    def draw(d: Draw) -> Drawn:
        query = d(length, batch, heads, size, scale=scale)
        key, value = (d(prefix + length, batch, groups, size) for _ in range(2))
        constants = {"scale": size**-0.5, "prefix": prefix}
        inputs = {"query": query, "key": key, "value": value}
        return Drawn(inputs, constants, max(prefix + length, size) * heads // groups, padded)

    return draw


def _logprob_case(tokens: int, vocabulary: int, scale: float = 1.0, padded: int = 0) -> Case:
    def draw(d: Draw) -> Drawn:
        index = d.integers(vocabulary, tokens)
        constants = {"index": index, "output_dtype": torch.float32}
        return Drawn({"logits": d(tokens, vocabulary, scale=scale)}, constants, vocabulary, padded)

    return draw


def _loss_case(tokens: int, vocabulary: int, padded: int) -> Case:
    def draw(d: Draw) -> Drawn:
        mask = torch.arange(tokens) < tokens - padded
        constants = {"index": d.integers(vocabulary, tokens), "mask": mask, "output_dtype": torch.float32}
        return Drawn({"logits": d(tokens, vocabulary)}, constants, vocabulary)

    return draw


def _embedding_case(tokens: int, vocabulary: int, hidden: int) -> Case:
    def draw(d: Draw) -> Drawn:
        chosen = d.integers(vocabulary // 2, tokens)  # half of the rows are never read, the others often
        scale = 1.0 if hidden == 1 else hidden**-0.25
        return Drawn({"weight": d(vocabulary, hidden, scale=scale)}, {"tokens": chosen}, max(tokens, vocabulary))

    return draw


def _routes(d: Draw, tokens: int, count: int, k: int) -> Tensor:
    return torch.rand(tokens, count, generator=d.generator).argsort(-1)[:, :k]


def _router_case(tokens: int, count: int, k: int, hidden: int, ties: bool = False, replayed: bool = False) -> Case:
    def draw(d: Draw) -> Drawn:
        x, weight = d(tokens, hidden), d(count, hidden, scale=hidden**-0.5)
        if ties:
            weight[1] = weight[0]
        logits = x.double() @ weight.double().T
        routes = _routes(d, tokens, count, k) if replayed else logits.topk(k, -1).indices
        return Drawn({"x": x, "weight": weight}, {"routes": routes}, max(tokens, count, hidden))

    return draw


def _experts_case(tokens: int, count: int, k: int, hidden: int, repeated: bool = False, shared: bool = False) -> Case:
    def draw(d: Draw) -> Drawn:
        routes = _routes(d, tokens, count - 1, k)  # the last expert has no token
        if repeated:
            routes[::2, -1] = routes[::2, 0]
        width = hidden // 2
        inputs = {
            "x": d(tokens, hidden),
            "first": d(count, 2 * width, hidden, scale=hidden**-0.5),
            "second": d(count, hidden, width, scale=width**-0.5),
            "probabilities": torch.rand(tokens, k, generator=d.generator).to(d.dtype),
        }
        if shared:
            inputs["shared_first"] = d(2 * width, hidden, scale=hidden**-0.5)
            inputs["shared_second"] = d(hidden, width, scale=width**-0.5)
        return Drawn(inputs, {"routes": routes}, max(tokens, 2 * hidden))

    return draw


SATURATING = Recipe(*(Float8(static_scale=256.0),) * 6)  # what is above 1.75 saturates


def _quantized_case(
    recipe: Recipe, mode: quantized.Mode, rows: tuple[int, ...], k: int, n: int, kind: str = ""
) -> Case:
    def draw(d: Draw) -> Drawn:
        x, weight = d(*rows, k), d(n, k, scale=k**-0.5)
        if kind == "zeros":
            x[::2], weight[: n // 2] = 0, 0
        elif kind == "scales":  # blocks of very different sizes, and one that is much smaller than its neighbours
            x = x * torch.logspace(-3, 3, k, base=2).to(d.dtype)
            weight[-1] *= 2.0**-6
        elif kind == "threshold":  # midway between two codes of E4M3, and an ulp to each side
            middle = torch.tensor([1.0625, 1.0625 - 2.0**-7, 1.0625 + 2.0**-7]).to(d.dtype)
            x = middle.repeat(x.numel() // 3 + 1)[: x.numel()].view(x.shape) * torch.where(x < 0, -1, 1)
        inputs = {"x": x, "weight": weight, "bias": d(n)}
        return Drawn(inputs, {"recipe": recipe, "mode": mode}, max(x.numel() // k, n))

    return draw


def _quantized(name: str, recipe: Recipe, mode: quantized.Mode) -> Module:
    cases = {
        "plain": _quantized_case(recipe, mode, (2, 32), 128, 64),
        "zeros": _quantized_case(recipe, mode, (64,), 64, 32, "zeros"),
        "scales": _quantized_case(recipe, mode, (64,), 256, 96, "scales"),
        "thresholds": _quantized_case(recipe, mode, (32,), 64, 32, "threshold"),
    }
    if mode != "default":
        cases["saturation"] = _quantized_case(SATURATING, mode, (3, 32), 64, 64)
    if name.startswith("Float8"):
        cases |= {
            "one row": _quantized_case(recipe, mode, (1,), 80, 50),
            "unaligned tails": _quantized_case(recipe, mode, (131,), 257, 129),
        }
    return Module(f"quantized linear, {name}, {mode}", _quantized_linear, cases, smooth=False)


def _all() -> dict[str, Module]:
    plain = [
        Module("linear", _linear, _linear_cases(bias=False)),
        Module("linear with bias", _linear, _linear_cases(bias=True)),
        Module(
            "rms_norm",
            _rms_norm,
            {
                "one row": _norm_case((1,), 80),
                "heads": _norm_case((17, 2, 4), 64),
                "unaligned tails": _norm_case((257,), 81),
                "zeros, padding": _norm_case((34, 2), 80, zeros=True, padded=7),
                "small": _norm_case((33,), 80, scale=2.0**-10),
                "large": _norm_case((33,), 80, scale=2.0**12),
            },
        ),
        Module(
            "rotary_embedding",
            _rotary,
            {
                "one row": _rotary_case(1, 4, 2, 64, first=5),
                "heads of 64": _rotary_case(33, 4, 2, 64, padded=3),
                "heads of 128, from position 1000": _rotary_case(17, 2, 1, 128, first=1000),
            },
        ),
        Module(
            "silu_and_mul",
            _silu_and_mul,
            {
                "one row": _activation_case((1,), 80),
                "unaligned tails": _activation_case((257,), 81),
                "padding": _activation_case((17, 3), 80, padded=4),
                "large": _activation_case((33,), 80, scale=8.0),
                "small": _activation_case((33,), 80, scale=2.0**-8),
            },
        ),
        Module(
            "attention",
            _attention,
            {
                "two tokens": _attention_case(2, 3, 4, 2, 64),
                "batched": _attention_case(33, 3, 4, 2, 64),
                "past a block": _attention_case(67, 1, 4, 1, 64, padded=5),
                "heads of 128, no groups": _attention_case(33, 1, 2, 2, 128),
                "few keys take all": _attention_case(33, 1, 2, 1, 64, scale=4.0),
            },
        ),
        Module(
            "merged attention",
            _merged_attention,
            {
                "prefix longer": _attention_case(16, 2, 4, 2, 64, prefix=48),
                "suffix longer": _attention_case(33, 1, 4, 2, 64, prefix=5),
                "one token": _attention_case(1, 2, 2, 1, 64, prefix=40),
            },
        ),
        Module(
            "selected_log_prob",
            _selected,
            {
                "one row": _logprob_case(1, 97),
                "padding": _logprob_case(33, 97, padded=4),
                "large": _logprob_case(33, 257, scale=8.0),
            },
        ),
        Module("masked loss", _masked_loss, {"padding": _loss_case(33, 97, 9), "no padding": _loss_case(17, 33, 0)}),
        Module("embedding", _embedding, {"repeated tokens": _embedding_case(65, 33, 40)}),
        Module("tied embedding", _tied, {"repeated tokens": _embedding_case(33, 33, 40)}),
        Module(
            "router",
            _router,
            {
                "top two": _router_case(33, 8, 2, 40),
                "ties": _router_case(33, 8, 2, 40, ties=True),
                "replayed routes": _router_case(33, 8, 2, 40, replayed=True),
                "one token": _router_case(1, 8, 3, 40),
            },
        ),
        Module(
            "routed experts",
            _experts,
            {
                "an expert without tokens": _experts_case(33, 5, 2, 32),
                "repeated routes": _experts_case(33, 5, 2, 32, repeated=True),
                "shared expert": _experts_case(17, 5, 2, 32, shared=True),
                "one token": _experts_case(1, 5, 3, 32),
            },
        ),
    ]
    for name, recipe in RECIPES.items():
        plain += [_quantized(name, recipe, mode) for mode in quantized.MODES]
    return {one.name: one for one in plain}


MODULES: Mapping[str, Module] = MappingProxyType(_all())
