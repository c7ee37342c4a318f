"""Cases for the operators of the contract, and how their bits are compared: one place for all operator tests.

A `RowOperator` is an operator whose output row depends on its input row alone: how to draw rows and what all rows share
(a weight, a bias), how to call it, its reference in the library, and its exact value in fp64. Attention has cases of
its own: `Sequence`, and `attend`, which lays sequences out in a paged cache and takes them apart again.
"""

from __future__ import annotations

import importlib.util
import math
import pathlib
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sequences
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies

Rows = tuple[torch.Tensor, ...]

DTYPES = (torch.float32, torch.bfloat16)
SIZES = (0, 1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 257, 1024)
KINDS = ("normal", "cancellation", "outliers", "zeros", "subnormals", "infinite", "nan")
EPSILON = 1e-6
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def library() -> pathlib.Path:
    """The operators' library inside of the installed vLLM, which is not imported."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations, "vLLM is not installed: run `make env`"
    return pathlib.Path(spec.submodule_search_locations[0]) / "batch_invariant_cpu.so"


def load() -> Any:
    """torch.ops.batch_invariant."""
    if not hasattr(torch.ops.batch_invariant, "linear"):
        torch.ops.load_library(str(library()))
    return torch.ops.batch_invariant


ops = load()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with this many threads an operator."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tuple_of(outputs: Any) -> Rows:
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, every NaN as the same one: which NaN comes out is not part of the contract."""
    if not tensor.is_floating_point():
        return tensor
    return torch.where(tensor.isnan(), math.nan, tensor).contiguous().view(INTEGERS[tensor.element_size()])


def assert_same_bits(found: Any, wanted: Any, what: str = "") -> None:
    """Every output has the dtype, the shape and the bits of its counterpart."""
    for n, (one, other) in enumerate(zip(tuple_of(found), tuple_of(wanted), strict=True)):
        assert one.dtype == other.dtype and one.shape == other.shape, (what, n, one.dtype, one.shape, other.shape)
        integers = INTEGERS[one.element_size()]
        if torch.equal(one.contiguous().view(integers), other.contiguous().view(integers)):
            continue
        different = bits(one) != bits(other)
        if different.any():
            place = tuple(different.nonzero()[0].tolist())
            raise AssertionError(
                f"{what} output {n}: {int(different.sum())} of {different.numel()} differ, the first at {place}: "
                f"{one[place].item()!r} and {other[place].item()!r}"
            )


def values(shape: Sequences[int], dtype: torch.dtype, kind: str = "normal", seed: int = 0) -> torch.Tensor:
    """Random values of a kind (see KINDS). Those of "cancellation" come in pairs that nearly cancel, along the last
    dimension; "zeros" holds both zeros and small integers; in "infinite" and "nan" a few of ordinary values are."""
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randn(*shape, generator=random)
    chance = torch.rand(*shape, generator=random)
    if kind == "cancellation":
        pairs = drawn[..., 1::2]
        pairs.copy_(-drawn[..., 0::2][..., : pairs.shape[-1]] + pairs * 2**-12)
        drawn = drawn * 100
    elif kind == "outliers":
        drawn = torch.where(chance < 0.02, drawn * 1e4, drawn)
    elif kind == "zeros":
        drawn = torch.where(chance < 0.6, torch.copysign(torch.zeros(()), drawn), drawn.round())
    elif kind == "subnormals":
        drawn = drawn * 2.0**-128
    elif kind == "infinite":
        drawn = torch.where(chance < 0.02, torch.copysign(torch.full((), math.inf), drawn), drawn)
    elif kind == "nan":
        drawn = torch.where(chance < 0.02, math.nan, drawn)
    else:
        assert kind == "normal", kind
    return drawn.to(dtype)


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c of fp32 tensors, rounded once.

    In fp64 the product is exact; the sum is rounded to odd, by its own rounding error, so that the rounding to fp32
    afterwards sees on which side of a tie the exact sum is."""
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    towards = torch.where(error > 0, math.inf, -math.inf).to(total)
    even = (total.view(torch.int64) & 1) == 0
    return torch.where(total.isfinite() & (error != 0) & even, total.nextafter(towards), total).float()


def lanes_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The contract's linear, written here: 16 partial sums, lane l taking k = l, l + 16, ... by fused multiply-adds,
    then halves added until one is left, the bias, one rounding."""
    pad = -x.shape[-1] % 16
    wide, columns = (torch.nn.functional.pad(t.float(), (0, pad)) for t in (x, weight))
    lanes = torch.zeros(x.shape[0], weight.shape[0], 16)
    for k in range(0, wide.shape[-1], 16):
        lanes = fma(wide[:, None, k : k + 16], columns[None, :, k : k + 16], lanes)
    while lanes.shape[-1] > 1:
        low, high = lanes.chunk(2, -1)
        lanes = low + high
    out = lanes.squeeze(-1)
    return (out if bias is None else out + bias.float()).to(x.dtype)


@dataclass(frozen=True)
class RowOperator:
    """An operator on rows.

    draw: (rows, width, dtype, kind, seed) -> the tensors whose first dimension is the rows. share: (width, dtype,
    kind, seed) -> what all rows use. call and reference take both; `reference` is the library's scalar one, or is put
    together from it. exact: the value in fp64, from the same inputs. widths: of the last dimension, none of which is a
    block's multiple but the first.
    """

    name: str
    widths: tuple[int, ...]
    draw: Callable[[int, int, torch.dtype, str, int], Rows]
    share: Callable[[int, torch.dtype, str, int], Rows]
    call: Callable[[Rows, Rows], Any]
    reference: Callable[[Rows, Rows], Any]
    exact: Callable[[Rows, Rows], Rows]

    def cases(
        self, rows: int, width: int, dtype: torch.dtype, kind: str = "normal", seed: int = 0
    ) -> tuple[Rows, Rows]:
        return self.draw(rows, width, dtype, kind, seed), self.share(width, dtype, kind, seed + 1)


def take(rows: Rows, which: Any) -> Rows:
    """The chosen rows of every tensor."""
    return tuple(tensor[which] for tensor in rows)


def _one(rows: int, width: int, dtype: torch.dtype, kind: str, seed: int) -> Rows:
    return (values((rows, width), dtype, kind, seed),)


def _two(rows: int, width: int, dtype: torch.dtype, kind: str, seed: int) -> Rows:
    return values((rows, width), dtype, kind, seed), values((rows, width), dtype, kind, seed + 100)


def _nothing(width: int, dtype: torch.dtype, kind: str, seed: int) -> Rows:
    return ()


OUT = 37  # a linear's N: a multiple of no vector and of no tile


def _weight(width: int, dtype: torch.dtype, kind: str, seed: int) -> Rows:
    weight = values((OUT, width), dtype, seed=seed) * width**-0.5
    if kind == "cancellation":  # equal in pairs, so that the products cancel as the rows do
        pairs = weight[:, 1::2]
        pairs.copy_(weight[:, 0::2][:, : pairs.shape[1]])
    return (weight,)


def _weight_and_bias(width: int, dtype: torch.dtype, kind: str, seed: int) -> Rows:
    return (*_weight(width, dtype, kind, seed), values((OUT,), dtype, seed=seed + 1))


def _linear_exact(rows: Rows, shared: Rows) -> Rows:
    out = rows[0].double() @ shared[0].double().T
    return (out + shared[1].double() if len(shared) > 1 else out,)


def _gain(width: int, dtype: torch.dtype, kind: str, seed: int) -> Rows:
    return (1 + 0.1 * values((width,), dtype, seed=seed),)


def _norm_exact(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x.double() * (x.double().square().mean(-1, keepdim=True) + EPSILON).rsqrt() * gain.double()


def _added(rows: Rows, norm: Callable[[torch.Tensor], torch.Tensor]) -> Rows:
    total = rows[0] + rows[1]
    return norm(total), total


HEAD, QUERY_HEADS, KEY_HEADS, POSITIONS = 64, 4, 2, 300


def _rotary_rows(rows: int, width: int, dtype: torch.dtype, kind: str, seed: int) -> Rows:
    positions = torch.randint(0, POSITIONS, (rows,), generator=torch.Generator().manual_seed(seed))
    query, key = (values((rows, heads * width), dtype, kind, seed + heads) for heads in (QUERY_HEADS, KEY_HEADS))
    return positions, query, key


def _cos_sin(width: int, dtype: torch.dtype, kind: str, seed: int) -> Rows:
    angles = torch.outer(torch.arange(POSITIONS).double(), 10_000.0 ** -(torch.arange(0, width, 2).double() / width))
    return (torch.cat((angles.cos(), angles.sin()), -1).to(dtype),)


def _rotary(rows: Rows, shared: Rows) -> Any:
    return ops.rotary_embedding(*rows, shared[0].shape[-1], *shared)


def _turned(rows: Rows, table: torch.Tensor, turn: Callable[..., torch.Tensor]) -> Rows:
    """Query and key with both halves of each head turned: turn(a, c, b, s) is a * c + b * s."""
    cos, sin = table[rows[0]].unsqueeze(1).chunk(2, -1)
    out = []
    for tensor in rows[1:]:
        first, second = tensor.to(table.dtype).unflatten(-1, (-1, table.shape[-1])).chunk(2, -1)
        out.append(torch.cat((turn(first, cos, second, -sin), turn(second, cos, first, sin)), -1).flatten(-2))
    return tuple(out)


def _rotary_reference(rows: Rows, shared: Rows) -> Rows:
    turned = _turned(rows, shared[0].float(), lambda a, c, b, s: fma(a, c, b * s))
    return tuple(tensor.to(rows[1].dtype) for tensor in turned)


def _rotary_exact(rows: Rows, shared: Rows) -> Rows:
    return _turned(rows, shared[0].double(), lambda a, c, b, s: a * c + b * s)


def _silu_exact(rows: Rows, shared: Rows) -> Rows:
    gate, up = rows[0].double().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up,)


def _doubled(rows: int, width: int, dtype: torch.dtype, kind: str, seed: int) -> Rows:
    return (values((rows, 2 * width), dtype, kind, seed),)


def _chosen(rows: int, width: int, dtype: torch.dtype, kind: str, seed: int) -> Rows:
    index = torch.randint(0, width, (rows,), generator=torch.Generator().manual_seed(seed))
    return values((rows, width), dtype, kind, seed), index


def _selected_reference(rows: Rows, shared: Rows) -> Rows:
    logits, index = rows
    whole = ops.reference_log_softmax(logits)
    peak, place = logits.float().max(-1, keepdim=True)
    logarithm = 0 - whole.gather(-1, place)  # of the sum: at the maximum the entry is 0 minus it
    return whole.gather(-1, index[:, None]).squeeze(-1), (peak + logarithm).squeeze(-1)


def _selected_exact(rows: Rows, shared: Rows) -> Rows:
    whole = rows[0].double().log_softmax(-1)
    return whole.gather(-1, rows[1][:, None]).squeeze(-1), rows[0].double().logsumexp(-1)


ROW_OPERATORS = {
    operator.name: operator
    for operator in (
        RowOperator(
            "linear",
            (128, 1, 7, 200, 1043),
            _one,
            _weight,
            lambda rows, shared: ops.linear(*rows, *shared),
            lambda rows, shared: ops.reference_linear(*rows, *shared),
            _linear_exact,
        ),
        RowOperator(
            "linear with bias",
            (128, 1, 200),
            _one,
            _weight_and_bias,
            lambda rows, shared: ops.linear(*rows, *shared),
            lambda rows, shared: ops.reference_linear(*rows, *shared),
            _linear_exact,
        ),
        RowOperator(
            "rms_norm",
            (128, 1, 7, 80, 1043),
            _one,
            _gain,
            lambda rows, shared: ops.rms_norm(*rows, *shared, EPSILON),
            lambda rows, shared: ops.reference_rms_norm(*rows, *shared, EPSILON),
            lambda rows, shared: (_norm_exact(*rows, *shared),),
        ),
        RowOperator(
            "add_rms_norm",
            (128, 1, 7, 1043),
            _two,
            _gain,
            lambda rows, shared: ops.add_rms_norm(*rows, *shared, EPSILON),
            lambda rows, shared: _added(rows, lambda total: ops.reference_rms_norm(total, *shared, EPSILON)),
            lambda rows, shared: _added(rows, lambda total: _norm_exact(total, *shared)),
        ),
        RowOperator(
            "rotary_embedding", (64, 2, 80, 128), _rotary_rows, _cos_sin, _rotary, _rotary_reference, _rotary_exact
        ),
        RowOperator(
            "silu_and_mul",
            (128, 1, 7, 1043),
            _doubled,
            _nothing,
            lambda rows, shared: ops.silu_and_mul(*rows),
            lambda rows, shared: ops.reference_silu_and_mul(*rows),
            _silu_exact,
        ),
        RowOperator(
            "log_softmax",
            (128, 1, 64, 1043),
            _one,
            _nothing,
            lambda rows, shared: ops.log_softmax(*rows),
            lambda rows, shared: ops.reference_log_softmax(*rows),
            lambda rows, shared: (rows[0].double().log_softmax(-1),),
        ),
        RowOperator(
            "selected_log_softmax",
            (128, 1, 64, 1043),
            _chosen,
            _nothing,
            lambda rows, shared: ops.selected_log_softmax(*rows),
            _selected_reference,
            _selected_exact,
        ),
    )
}


@dataclass(frozen=True)
class Sequence:
    """One request: the queries of its last tokens [n, H, D] and the keys and values of all of them [length, KVH, D]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def random(
        cls,
        length: int,
        new: int,
        heads: tuple[int, int] = (4, 2),
        width: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        kind: str = "normal",
    ) -> Sequence:
        query = values((new, heads[0], width), dtype, kind, seed)
        key, value = (values((length, heads[1], width), dtype, kind, seed + n) for n in (1, 2))
        return cls(query, key, value)

    def part(self, start: int, end: int) -> Sequence:
        """The same request when it had `end` tokens of which `start` were computed; start counts from the first query's
        position."""
        first = self.key.shape[0] - self.query.shape[0]
        return Sequence(self.query[start - first : end - first], self.key[:end], self.value[:end])


@dataclass(frozen=True)
class Layout:
    """How the cache is laid out: tokens a block, the seed of the blocks' order, whether a block's tokens stand before
    its heads in memory, and what the places hold that belong to nobody."""

    block_size: int = 16
    seed: int = 0
    tokens_first: bool = False
    unused: float = 0.0


def laid_out(sequences: Sequences[Sequence], layout: Layout = Layout()) -> Rows:
    """query, key_cache, value_cache, block_table, query_start_loc, seq_lens of the sequences as one batch."""
    size = layout.block_size
    _, kv_heads, width = sequences[0].key.shape
    needs = [-(-one.key.shape[0] // size) for one in sequences]
    order = torch.randperm(sum(needs) + 2, generator=torch.Generator().manual_seed(layout.seed)).tolist()
    shape = (len(order), size, kv_heads, width) if layout.tokens_first else (len(order), kv_heads, size, width)
    caches = [torch.full(shape, layout.unused, dtype=sequences[0].key.dtype) for _ in range(2)]
    if layout.tokens_first:
        caches = [cache.transpose(1, 2) for cache in caches]
    table = torch.zeros((len(sequences), max([1, *needs])), dtype=torch.int32)
    for row, (one, need) in enumerate(zip(sequences, needs, strict=True)):
        blocks = [order.pop() for _ in range(need)]
        table[row, :need] = torch.tensor(blocks, dtype=torch.int32)
        for cache, tensor in zip(caches, (one.key, one.value), strict=True):
            for block, tokens in zip(blocks, tensor.split(size), strict=True):
                cache[block, :, : tokens.shape[0]] = tokens.transpose(0, 1)
    starts = torch.tensor([0, *(one.query.shape[0] for one in sequences)]).cumsum(0).int()
    lengths = torch.tensor([one.key.shape[0] for one in sequences], dtype=torch.int32)
    return torch.cat([one.query for one in sequences]), *caches, table, starts, lengths


def attend(
    sequences: Sequences[Sequence], layout: Layout = Layout(), operator: Callable[..., Any] | None = None
) -> list[Rows]:
    """(output, LSE) of each sequence, all attended in one call of the operator."""
    scale = sequences[0].query.shape[-1] ** -0.5
    out, lse = (operator or ops.attention)(*laid_out(sequences, layout), scale)
    counts = [one.query.shape[0] for one in sequences]
    return list(zip(out.split(counts), lse.split(counts), strict=True))


def attention_exact(one: Sequence) -> Rows:
    """(output, LSE) of a sequence in fp64."""
    query, key, value = (tensor.double().transpose(0, 1) for tensor in (one.query, one.key, one.value))
    group = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
    new, length = scores.shape[1:]
    hidden = torch.arange(length) > torch.arange(length - new, length)[:, None]
    scores = scores.masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ value).transpose(0, 1), scores.logsumexp(-1).T


@strategies.composite
def batches(draw: strategies.DrawFn) -> list[Sequence]:
    """A few requests of random lengths: decodes, prefills and chunks, of one geometry and dtype."""
    dtype = draw(strategies.sampled_from(DTYPES))
    kv_heads, group = draw(strategies.integers(1, 3)), draw(strategies.integers(1, 4))
    width = draw(strategies.sampled_from((16, 32, 64, 80, 128)))
    out = []
    for seed in range(draw(strategies.integers(1, 5))):
        length = draw(strategies.integers(1, 150))
        new = draw(strategies.one_of(strategies.just(1), strategies.integers(1, length)))
        out.append(Sequence.random(length, new, (kv_heads * group, kv_heads), width, dtype, 10 * seed))
    return out
