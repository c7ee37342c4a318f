"""Operators of BI=1 on one GPU other than products: row operators, attention of decode steps, FlashAttention 3 itself.

Bits are compared with the same operator's own (a row alone and in a batch, again and again, in a graph) or with
FlashAttention 3's without splits. A time is of launches back to back in one CUDA graph, clocks left alone: row
operators on one input, which the L2 cache holds where it fits, as it does behind the kernel that made it; attention
over the caches of several layers, more bytes than the L2 cache holds. `samebits.judge.operators` lists the cases.
"""

import datetime
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich import box
from rich.table import Table

from samebits.evidence.measurement import OPERATORS, MeasurementError
from samebits.judge import operators as plan
from samebits.judge.operators import HEAD, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, VOCABULARY

from .engine import card
from .graph import Counted, captured, in_turn, middle

DEVICE = "cuda"
EPSILON, ROPE_BASE, POSITIONS = 1e-6, 1e6, 40_960
ROWS_IN_FP64 = 64
LAUNCHES = 24
PAGE, MORE, SPLITS = 16, 256, 32  # of the timed steps: MORE tokens that a request could still get, SPLITS at BI=0
LAYER_BYTES, MOST_LAYERS, LEAST_LAYERS = 160e6, 36, 3  # of caches in a graph: three times the L2 cache
NEIGHBOUR_KEYS, NEIGHBOUR_MORE, NEIGHBOUR_TABLE = 1537, 5, 2048  # of the request; before a neighbour's query; of pages

Tensors = tuple[Any, ...]


def measure(say: Callable[[str], None]) -> dict[str, Any]:
    """Compare and time; needs the CUDA libraries of the installed vllm loaded.

    Raises:
        MeasurementError: an operator's output holds a NaN or an infinity where fp64 has a number.
    """
    import torch

    torch.manual_seed(0)
    row_operators = _row_operators()
    bits, errors, times = [], [], []
    for name, operator in row_operators.items():
        say(f"{name}: bits")
        bits += [{"operator": name, "m": m, **_row_bits(operator, m)} for m in plan.ROWS]
        say(f"{name}: errors and times")
        errors.append({"operator": name, **_errors(name, operator)})
        times += [{"operator": name, "m": m, "microseconds": _row_times(operator, m)} for m in plan.TIMED_ROWS]
    rows = {"bits": bits, "errors": errors, "times": times}
    said = [
        {"heads": heads, "kv_heads": kv_heads, "page": page, "scale": scale, **counts}
        for heads, kv_heads in plan.GROUPS
        for page in plan.PAGES
        for scale, counts in _attention_bits(heads, kv_heads, page, say).items()
    ]
    steps = []
    for requests, context in plan.STEPS:
        say(f"attention: {requests} requests of {context} tokens")
        read = plan.cache_bytes(requests, context)
        taken = _attention_times(requests, context)
        steps.append({"requests": requests, "context": context, "bytes": read, "microseconds": taken})
    neighbours = [
        row
        for head in plan.NEIGHBOUR_HEADS
        for page in plan.NEIGHBOUR_PAGES
        for row in _beside_neighbours(head, page, say)
    ]
    return {"rows": rows, "attention": {"bits": said, "times": steps}, "neighbours": neighbours}


def _bf16(*shape: int, scale: float = 1.0) -> Any:
    import torch

    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * scale


def _count(counted: Counted) -> dict[str, int]:
    return {"differ": counted.differ, "of": counted.of}


@dataclass(frozen=True)
class _RowOperator:
    """inputs: tensors [m, ...] for m rows. The others take these and give outputs of m rows each.

    ours: the operator. vllm: what BI=0 runs without torch.compile; it may overwrite its inputs, and may give fewer
    outputs. exact: the same in fp64, rounded nowhere.
    """

    inputs: Callable[[int], Tensors]
    ours: Callable[..., Tensors]
    vllm: Callable[..., Tensors]
    exact: Callable[..., Tensors]


def _row_operators() -> dict[str, _RowOperator]:
    """By the names of the plan; weights are drawn here, once."""
    import torch
    from vllm._custom_ops import fused_add_rms_norm, rms_norm, rotary_embedding

    operators, vllms = torch.ops.batch_invariant, torch.ops._C
    weight = 1 + _bf16(HIDDEN, scale=0.1)
    head_weights = 1 + _bf16(HEAD, scale=0.1), 1 + _bf16(HEAD, scale=0.1)
    table = _cos_sin()
    queries, keys = HEADS * HEAD, KV_HEADS * HEAD

    def norm_in_fp64(x: Any, gain: Any) -> Any:
        return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * gain.double()

    def vllms_norm(x: Any, gain: Any) -> Any:
        out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
        rms_norm(out, x, gain, EPSILON)
        return out

    def vllms_add_norm(x: Any, residual: Any) -> Tensors:
        fused_add_rms_norm(x, residual, weight, EPSILON)
        return x, residual

    def by_head(qkv: Any) -> Tensors:
        """Queries and keys [m, heads, 128], where they lie."""
        return tuple(x.unflatten(1, (-1, HEAD)) for x in (qkv[:, :queries], qkv[:, queries : queries + keys]))

    def turned(positions: Any, qkv: Any) -> Tensors:
        query, key = qkv[:, :queries], qkv[:, queries : queries + keys]
        return tuple(operators.norm_rotary_embedding(positions, query, key, *head_weights, table, EPSILON))

    def vllms_turned(positions: Any, qkv: Any) -> Tensors:
        normed = tuple(vllms_norm(x, w).flatten(1) for x, w in zip(by_head(qkv), head_weights, strict=True))
        rotary_embedding(positions, *normed, HEAD, table, True)
        return normed

    def turned_in_fp64(positions: Any, qkv: Any) -> Tensors:
        cosines, sines = table[positions].double()[:, None].chunk(2, dim=-1)
        out = []
        for x, gain in zip(by_head(qkv), head_weights, strict=True):
            first, second = norm_in_fp64(x.double(), gain).chunk(2, dim=-1)
            both = (first * cosines - second * sines, second * cosines + first * sines)
            out.append(torch.cat(both, dim=-1).flatten(1))
        return tuple(out)

    def vllms_silu(x: Any) -> Tensors:
        out = torch.empty((x.shape[0], INTERMEDIATE), device=x.device, dtype=x.dtype)
        vllms.silu_and_mul(out, x)
        return (out,)

    def silu_in_fp64(x: Any) -> Tensors:
        gate, up = x.double().chunk(2, dim=-1)
        return (gate * gate.sigmoid() * up,)

    def spread(m: int, limit: int) -> Any:
        return torch.arange(m, device=DEVICE) * 7919 % limit

    def chosen(logprobs: Any, index: Any) -> Any:
        return logprobs.gather(1, index[:, None])[:, 0]

    return {
        "rms_norm": _RowOperator(
            lambda m: (_bf16(m, HIDDEN),),
            lambda x: (operators.rms_norm(x, weight, EPSILON),),
            lambda x: (vllms_norm(x, weight),),
            lambda x: (norm_in_fp64(x.double(), weight),),
        ),
        "add_rms_norm": _RowOperator(
            lambda m: (_bf16(m, HIDDEN), _bf16(m, HIDDEN)),
            lambda x, residual: tuple(operators.add_rms_norm(x, residual, weight, EPSILON)),
            vllms_add_norm,
            lambda x, residual: (norm_in_fp64(x.double() + residual, weight), x.double() + residual),
        ),
        "norm_rotary_embedding": _RowOperator(
            lambda m: (spread(m, POSITIONS), _bf16(m, queries + 2 * keys)),
            turned,
            vllms_turned,
            turned_in_fp64,
        ),
        "silu_and_mul": _RowOperator(
            lambda m: (_bf16(m, 2 * INTERMEDIATE),),
            lambda x: (operators.silu_and_mul(x),),
            vllms_silu,
            silu_in_fp64,
        ),
        "log_softmax": _RowOperator(
            lambda m: (_bf16(m, VOCABULARY, scale=4),),
            lambda logits: (operators.log_softmax(logits),),
            lambda logits: (logits.log_softmax(-1, dtype=torch.float32),),
            lambda logits: (logits.double().log_softmax(-1),),
        ),
        "selected_log_softmax": _RowOperator(
            lambda m: (_bf16(m, VOCABULARY, scale=4), spread(m, VOCABULARY)),
            lambda logits, index: tuple(operators.selected_log_softmax(logits, index)),
            lambda logits, index: (chosen(logits.log_softmax(-1, dtype=torch.float32), index),),
            lambda logits, index: (chosen(logits.double().log_softmax(-1), index), logits.double().logsumexp(-1)),
        ),
    }


def _cos_sin() -> Any:
    """The table of the rotary embedding [POSITIONS, 128] in bf16: 64 cosines, then 64 sines, of a position a row."""
    import torch

    frequencies = ROPE_BASE ** -(torch.arange(0, HEAD, 2, device=DEVICE, dtype=torch.float32) / HEAD)
    angles = torch.arange(POSITIONS, device=DEVICE, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(torch.bfloat16)


def _row_bits(operator: _RowOperator, m: int) -> dict[str, dict[str, int]]:
    """Elements that differ from those of a batch of m rows: rows alone, the batch again, and a graph's replay of it."""
    alone, repeated, replayed = Counted(), Counted(), Counted()
    inputs = operator.inputs(m)
    batch = operator.ours(*inputs)
    for i in plan.sampled(m):
        for one, whole in zip(operator.ours(*(x[i : i + 1] for x in inputs)), batch, strict=True):
            alone.compare(one, whole[i : i + 1])
    for _ in range(plan.REPEATS):
        for again, first in zip(operator.ours(*inputs), batch, strict=True):
            repeated.compare(again, first)
    graph, outputs = captured(partial(operator.ours, *inputs))
    for out in outputs:
        out.fill_(math.nan)  # what a replay does not write must not be what an earlier run left there
    graph.replay()
    for out, first in zip(outputs, batch, strict=True):
        replayed.compare(out, first)
    return {"alone": _count(alone), "repeated": _count(repeated), "graph": _count(replayed)}


def _errors(name: str, operator: _RowOperator) -> dict[str, float]:
    """The largest error of ours and of vLLM's against fp64, over ROWS_IN_FP64 rows."""
    inputs = operator.inputs(ROWS_IN_FP64)
    exact = operator.exact(*inputs)
    found = {"ours": operator.ours(*inputs), "vllm": operator.vllm(*(x.clone() for x in inputs))}
    return {who: _error(f"{name}: {who}", outputs, exact, name) for who, outputs in found.items()}


def _error(place: str, outputs: Tensors, exact: Tensors, name: str) -> float:
    """Relative to the largest magnitude of the fp64 row, or absolute, as the plan has it for operator `name`."""
    worst = 0.0
    for out, must in zip(outputs, exact, strict=False):
        error = (out.double() - must).abs()
        if not plan.ROW_OPERATORS[name].absolute:
            error = error / must.abs().amax(-1, keepdim=True)
        largest = float(error.max())
        if not math.isfinite(largest):
            raise MeasurementError(f"{place}: an output is no number where fp64 has one; mend the operator")
        worst = max(worst, largest)
    return float(f"{worst:.4g}")


def _row_times(operator: _RowOperator, m: int) -> dict[str, float]:
    inputs = operator.inputs(m)
    ways = {"vllm": lambda _: operator.vllm(*inputs), "ours": lambda _: operator.ours(*inputs)}
    return {name: middle(taken) for name, taken in in_turn(ways, LAUNCHES).items()}


@dataclass(frozen=True)
class _Step:
    """One decode step over one layer's paged cache, bf16: a new token a request, which lies in the cache or not yet.

    query [requests, heads, 128], key and value [requests, kv heads, 128], cache [pages, kv heads, page, 256] with a
    token's key and value side by side; table [requests, pages of one], starts [requests + 1] and lengths [requests] in
    int32, slots [requests] in int64: where the new token goes. longest: the most keys that a request may have.
    """

    query: Any
    key: Any
    value: Any
    cache: Any
    table: Any
    starts: Any
    lengths: Any
    slots: Any
    longest: int

    @classmethod
    def draw(cls, heads: int, kv_heads: int, page: int, lengths: Sequence[int], longest: int) -> "_Step":
        import torch

        requests, pages = len(lengths), -(-longest // page)
        # As in a layer: queries and keys made anew by the rotary embedding, values where the projection left them.
        both = _bf16(requests, (heads + 2 * kv_heads) * HEAD)
        table = torch.randperm(requests * pages, device=DEVICE).to(torch.int32).view(requests, pages)
        keys = torch.tensor(lengths, device=DEVICE, dtype=torch.int32)
        last = keys.long() - 1
        of_last = table.long().gather(1, (last // page)[:, None])[:, 0]
        return cls(
            query=_bf16(requests, heads, HEAD),
            key=_bf16(requests, kv_heads, HEAD),
            value=both[:, (heads + kv_heads) * HEAD :].view(requests, kv_heads, HEAD),
            cache=_bf16(requests * pages, kv_heads, page, 2 * HEAD),
            table=table,
            starts=torch.arange(requests + 1, device=DEVICE, dtype=torch.int32),
            lengths=keys,
            slots=of_last * page + last % page,
            longest=longest,
        )

    def requests(self, some: slice) -> "_Step":
        """The step of some of its requests, over the same cache."""
        parts = (self.query, self.key, self.value, self.table, self.lengths, self.slots)
        query, key, value, table, lengths, slots = (x[some] for x in parts)
        starts = self.starts[: len(query) + 1]
        return _Step(query, key, value, self.cache, table, starts, lengths, slots, self.longest)

    def ours(self, out: Any) -> Any:
        """Into `out`, of the query's shape; writes the new tokens into the cache."""
        import torch

        torch.ops.batch_invariant.decode_attention(
            self.query,
            self.key,
            self.value,
            *_keys_and_values(self.cache),
            self.table,
            self.lengths,
            self.slots,
            HEAD**-0.5,
            out,
        )
        return out

    def flash(self, out: Any, told: int = 1, splits: int = 1, schedule: Any = None) -> Any:
        """FlashAttention 3 into `out`, over the cache as it is; `told`: what it takes for the step's longest query."""
        return _flash(
            self.query,
            self.cache,
            out,
            cu_seqlens_q=self.starts,
            max_seqlen_q=told,
            seqused_k=self.lengths,
            max_seqlen_k=self.longest,
            block_table=self.table,
            num_splits=splits,
            scheduler_metadata=schedule,
        )

    def schedule(self, splits: int) -> Any:
        """What FlashAttention 3 wants to know of a step, made once for all layers."""
        import torch
        from vllm.vllm_flash_attn import get_scheduler_metadata

        return get_scheduler_metadata(
            batch_size=self.query.shape[0],
            max_seqlen_q=1,
            max_seqlen_k=self.longest,
            num_heads_q=self.query.shape[1],
            num_heads_kv=self.key.shape[1],
            headdim=HEAD,
            cache_seqlens=self.lengths,
            qkv_dtype=torch.bfloat16,
            cu_seqlens_q=self.starts,
            page_size=self.cache.shape[2],
            causal=True,
            window_size=(-1, -1),
            num_splits=splits,
        )


def _keys_and_values(cache: Any) -> Tensors:
    """Keys and values [pages, page, kv heads, head] of a cache [pages, kv heads, page, 2 * head], where they lie."""
    return tuple(cache.transpose(1, 2).chunk(2, dim=-1))


def _flash(query: Any, cache: Any, out: Any, **told: Any) -> Any:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    keys, values = _keys_and_values(cache)
    scale = query.shape[-1] ** -0.5
    flash_attn_varlen_func(q=query, k=keys, v=values, out=out, softmax_scale=scale, causal=True, fa_version=3, **told)
    return out


def _attention_bits(
    heads: int, kv_heads: int, page: int, say: Callable[[str], None]
) -> dict[int, dict[str, dict[str, int]]]:
    """By the scale of queries: elements that differ from FlashAttention 3's.

    told_1, told_5: by what it is told of the longest query. scheduled: its own, with the schedule that an engine makes
    once a step. served: in steps of as many requests as are served at once. cache: what ours wrote there. repeated.
    """
    import torch
    from vllm.model_executor.layers import batch_invariant_attention

    say(f"attention of {heads} heads on {kv_heads}, pages of {page}: bits")
    drawn = _Step.draw(heads, kv_heads, page, plan.LENGTHS, max(plan.LENGTHS))
    found = {}
    for scale in plan.SCALES:
        mine = replace(drawn, query=drawn.query * scale, cache=drawn.cache.clone())
        whole = replace(mine, cache=drawn.cache.clone())
        at = drawn.slots // page, drawn.slots % page
        for new, part in zip((drawn.key, drawn.value), _keys_and_values(whole.cache), strict=True):
            part[at] = new
        counted = {name: Counted() for name in ("told_1", "told_5", "scheduled", "served", "cache", "repeated")}
        out = mine.ours(torch.full_like(mine.query, math.nan))
        counted["cache"].compare(mine.cache, whole.cache)
        for told in (1, 5):
            counted[f"told_{told}"].compare(out, whole.flash(torch.empty_like(out), told=told))
        whole_out = whole.flash(torch.empty_like(out))
        scheduled = whole.flash(torch.empty_like(out), schedule=whole.schedule(1))
        counted["scheduled"].compare(scheduled, whole_out)
        for first in range(0, len(plan.LENGTHS), batch_invariant_attention.MOST_REQUESTS):
            step = mine.requests(slice(first, first + batch_invariant_attention.MOST_REQUESTS))
            served = step.ours(torch.full_like(step.query, math.nan))
            counted["served"].compare(served, whole_out[first : first + len(served)])
        for _ in range(plan.REPEATS):
            counted["repeated"].compare(mine.ours(torch.full_like(out, math.nan)), out)
        found[scale] = {name: _count(one) for name, one in counted.items()}
    return found


def _attention_times(requests: int, context: int) -> dict[str, float]:
    """Microseconds a layer: the cache written and attention, by FlashAttention 3 with and without splits, and by ours.

    FlashAttention 3's schedule, which BI=0 makes once a step, is made before.
    """
    import torch
    from vllm._custom_ops import reshape_and_cache_flash

    step = _Step.draw(HEADS, KV_HEADS, PAGE, [context] * requests, context + MORE)
    wanted = math.ceil(LAYER_BYTES / plan.cache_bytes(requests, context))
    others = range(1, max(LEAST_LAYERS, min(MOST_LAYERS, wanted)))
    layers = [step, *(replace(step, cache=torch.randn_like(step.cache)) for _ in others)]
    out, unscaled = torch.empty_like(step.query), torch.ones((), device=DEVICE)
    schedule = step.schedule(SPLITS)

    def write(layer: _Step) -> None:
        where = _keys_and_values(layer.cache)
        reshape_and_cache_flash(layer.key, layer.value, *where, layer.slots, "auto", unscaled, unscaled)

    def bi0(i: int) -> None:
        write(layers[i])
        layers[i].flash(out, splits=SPLITS, schedule=schedule)

    def bi1(i: int) -> None:
        write(layers[i])
        layers[i].flash(out)

    def ours(i: int) -> None:
        layers[i].ours(out)

    ways = {"bi0": bi0, "bi1": bi1, "ours": ours}
    return {name: middle(taken) for name, taken in in_turn(ways, len(layers)).items()}


def _beside_neighbours(head: int, page: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """How a request's output differs from the one that it has alone, by the tokens of its neighbour's query.

    `true`: FlashAttention 3 is told the step's longest query. `told`: what vLLM tells it at BI=1.
    """
    import torch
    from vllm.model_executor.layers import batch_invariant_fa3

    say(f"neighbours: heads of {head}, pages of {page}")
    heads, pages = plan.NEIGHBOUR_GROUP * plan.NEIGHBOUR_KV_HEADS, -(-NEIGHBOUR_TABLE // page)
    cache = _bf16(2 * pages, plan.NEIGHBOUR_KV_HEADS, page, 2 * head)
    table = torch.arange(2 * pages, device=DEVICE, dtype=torch.int32).view(2, pages)
    query = _bf16(1 + max(plan.NEIGHBOURS), heads, head)

    def output(neighbour: int, told: int) -> Any:
        """Of the request [1, heads, head], whose query and keys are always the same."""
        requests, together = (2, query[: 1 + neighbour]) if neighbour else (1, query[:1])
        return _flash(
            together,
            cache,
            torch.empty_like(together),
            cu_seqlens_q=torch.tensor([0, 1, 1 + neighbour][: requests + 1], device=DEVICE, dtype=torch.int32),
            max_seqlen_q=told,
            seqused_k=torch.tensor(
                [NEIGHBOUR_KEYS, neighbour + NEIGHBOUR_MORE][:requests], device=DEVICE, dtype=torch.int32
            ),
            max_seqlen_k=NEIGHBOUR_KEYS,
            block_table=table[:requests],
            num_splits=1,
        )[:1]

    refused, rows = _refuses(head, page), []
    tells = {"true": lambda longest: longest, "told": lambda longest: batch_invariant_fa3.longest_query(head, longest)}
    alone = {name: output(0, tell(1)) for name, tell in tells.items()}
    for neighbour in plan.NEIGHBOURS:
        counted = {name: Counted() for name in tells}
        for name, tell in tells.items():
            counted[name].compare(output(neighbour, tell(max(1, neighbour))), alone[name])
        counts = {name: _count(one) for name, one in counted.items()}
        rows.append({"head": head, "page": page, "neighbour": neighbour, "refused": refused, **counts})
    return rows


def _refuses(head: int, page: int) -> bool:
    """Whether vLLM refuses these sizes at BI=1."""
    from vllm.model_executor.layers import batch_invariant_fa3

    try:
        batch_invariant_fa3.check_tiles(head, page)
    except ValueError:
        return True
    return False


def summary(finding: Mapping[str, Any]) -> dict[str, float]:
    """The figures that are asked for: ours against vLLM's at BI=0 and against FlashAttention 3, and what differs."""

    def mean(ratios: Sequence[float]) -> float:
        return math.exp(sum(map(math.log, ratios)) / len(ratios))

    rows = [row["microseconds"]["vllm"] / row["microseconds"]["ours"] for row in finding["rows"]["times"]]
    steps = [row["microseconds"] for row in finding["attention"]["times"]]
    counts = plan.counts(finding)
    return {
        "row operators, vLLM's ÷ ours, geometric mean": mean(rows),
        "row operators, vLLM's ÷ ours, worst": min(rows),
        "attention, BI=0 ÷ ours, geometric mean": mean([times["bi0"] / times["ours"] for times in steps]),
        "attention, BI=0 ÷ ours, worst": min(times["bi0"] / times["ours"] for times in steps),
        "attention, FlashAttention 3 without splits ÷ ours, geometric mean": mean(
            [times["bi1"] / times["ours"] for times in steps]
        ),
        "elements that were compared": float(sum(count["of"] for count in counts)),
        "elements that differ": float(sum(count["differ"] for count in counts)),
    }


def tables(finding: Mapping[str, Any]) -> list[Table]:
    """Row operators, attention of decode steps, and how many neighbours change a request's bits by what is told."""
    name = finding["card"]["name"]
    errors = {row["operator"]: row for row in finding["rows"]["errors"]}
    rows = _table(
        f"row operators of Qwen3-8B on {name}: µs in one graph; error against fp64",
        ("operator", "M", "vLLM's", "ours", "vLLM's ÷ ours", "vLLM's error", "our error"),
    )
    for row in finding["rows"]["times"]:
        times, error = row["microseconds"], errors[row["operator"]]
        rows.add_row(
            row["operator"],
            str(row["m"]),
            *(f"{times[way]:.1f}" for way in ("vllm", "ours")),
            f"{times['vllm'] / times['ours']:.2f}",
            *(f"{error[who]:.2g}" for who in ("vllm", "ours")),
        )
    steps = _table(
        f"attention of a decode step on {name}, the cache written: µs a layer, layers in one graph",
        ("requests", "context", "BI=0", "FA3, no splits", "ours", "BI=0 ÷ ours", "BI=0, TB/s", "ours, TB/s"),
    )
    for row in finding["attention"]["times"]:
        times = row["microseconds"]
        steps.add_row(
            *(str(row[key]) for key in ("requests", "context")),
            *(f"{times[way]:.1f}" for way in ("bi0", "bi1", "ours")),
            f"{times['bi0'] / times['ours']:.2f}",
            *(f"{row['bytes'] / times[way] / 1e6:.2f}" for way in ("bi0", "ours")),
        )
    neighbours = _table(
        f"neighbours beside which FlashAttention 3 changes a request's bits, of {len(plan.NEIGHBOURS)}",
        ("head", "page", "told their length", "told as at BI=1", "at BI=1"),
    )
    for head, page in dict.fromkeys((row["head"], row["page"]) for row in finding["neighbours"]):
        beside = [row for row in finding["neighbours"] if (row["head"], row["page"]) == (head, page)]
        neighbours.add_row(
            str(head),
            str(page),
            *(str(sum(row[tell]["differ"] > 0 for row in beside)) for tell in ("true", "told")),
            "refused" if beside[0]["refused"] else "served",
        )
    return [rows, steps, neighbours]


def _table(title: str, columns: Sequence[str]) -> Table:
    drawn = Table(title=title, box=box.SIMPLE)
    for column in columns:
        drawn.add_column(column, justify="right", no_wrap=True)
    return drawn


def document(say: Callable[[str], None]) -> dict[str, Any]:
    """Measure, as a document of schema operators-1: with the card, and the hash of each library that was measured."""
    from vllm.model_executor.layers import batch_invariant_attention, batch_invariant_linear, batch_invariant_rows

    say("libraries")
    batch_invariant_rows.enable()
    batch_invariant_attention.enable()
    libraries = [batch_invariant_linear.library_file(name) for name in ("rows", "attention")]
    return OPERATORS.build(
        command="samebits bench operators",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        card=card(),
        libraries={file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in libraries},
        **measure(say),
    )
