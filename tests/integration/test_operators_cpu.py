"""The batch-invariant operators on a CPU: a row's bits are its own, they are the reference's, and they are accurate.

Three kinds of tests, apart from each other. Invariance: bit for bit, whatever else is in the call, whatever threads,
strides or cache layout. The contract: bit for bit what the library's scalar reference says, and for linear and rotary
embedding what one written here says. Accuracy: against fp64, with a bound for each dtype.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import math
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings, strategies
from operator_cases import (
    DTYPES,
    EPSILON,
    KINDS,
    ROW_OPERATORS,
    SIZES,
    Layout,
    RowOperator,
    Rows,
    Sequence,
    assert_same_bits,
    attend,
    attention_exact,
    batches,
    bits,
    fma,
    laid_out,
    lanes_linear,
    ops,
    take,
    threads,
    tuple_of,
    values,
)

from samebits.judge import contract

each_operator = pytest.mark.parametrize("operator", ROW_OPERATORS.values(), ids=lambda operator: operator.name)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
examples = settings(deadline=None, derandomize=True, max_examples=60, print_blob=True)


ON_RECORD = {
    torch.bfloat16: "aa8aa041152d05a7e01f03eeb2050f38d318bbcf323ada169d747e9f5c75c28d",
    torch.float32: "974e74b3f325f66a86002b25d4d6307445ad0975f6b0f76419b30996aaf3e735",
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Where a test does not say otherwise: the operators are small here, and threads would wait for each other."""
    with threads(1):
        yield


# Invariance.


@each_operator
@each_dtype
def test_a_row_is_the_same_in_every_batch(operator: RowOperator, dtype: torch.dtype) -> None:
    """1024 rows at once, against batches of every size at the start and at the end of them."""
    for width in operator.widths:
        rows, shared = operator.cases(max(SIZES), width, dtype)
        whole = tuple_of(operator.call(rows, shared))
        for size in SIZES:
            for start in {0, max(SIZES) - size}:
                part = slice(start, start + size)
                found = operator.call(take(rows, part), shared)
                assert_same_bits(found, take(whole, part), f"width {width}, rows {start} to {part.stop}")


@each_operator
@each_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_each_row_alone_is_the_row_of_the_batch(operator: RowOperator, dtype: torch.dtype, kind: str) -> None:
    for width in operator.widths:
        rows, shared = operator.cases(33, width, dtype, kind)
        whole = tuple_of(operator.call(rows, shared))
        for row in range(33):
            one = slice(row, row + 1)
            assert_same_bits(operator.call(take(rows, one), shared), take(whole, one), f"width {width}, row {row}")


@each_operator
@each_dtype
def test_the_order_and_the_company_of_rows_change_nothing(operator: RowOperator, dtype: torch.dtype) -> None:
    """Rows shuffled among neighbours that hold NaN, infinities and outliers."""
    width = operator.widths[-1]
    rows, shared = operator.cases(40, width, dtype)
    alone = tuple_of(operator.call(rows, shared))
    neighbours = [operator.draw(20, width, dtype, kind, 7) for kind in ("nan", "infinite", "outliers")]
    mixed = tuple(torch.cat(parts) for parts in zip(rows, *neighbours, strict=True))
    order = torch.randperm(100, generator=torch.Generator().manual_seed(3))
    found = tuple_of(operator.call(take(mixed, order), shared))
    back = order.argsort()[:40]
    assert_same_bits(take(found, back), alone)


@each_operator
@each_dtype
def test_threads_change_nothing(operator: RowOperator, dtype: torch.dtype) -> None:
    for width in operator.widths:
        for size in (1, 2, 33, 257):
            rows, shared = operator.cases(size, width, dtype)
            with threads(1):
                one = operator.call(rows, shared)
            with threads(2):
                assert_same_bits(operator.call(rows, shared), one, f"width {width}, {size} rows")


@each_dtype
@pytest.mark.parametrize("rows", [1, 2, 5, 64])
@pytest.mark.parametrize("name", [name for name in ROW_OPERATORS if name != "selected_log_softmax"])
def test_strided_rows_are_as_contiguous_ones(name: str, dtype: torch.dtype, rows: int) -> None:
    """Rows cut out of wider ones, as the query and key of a fused projection are; and every second row."""
    operator = ROW_OPERATORS[name]
    contiguous, shared = operator.cases(rows, operator.widths[-1], dtype)
    wanted = operator.call(contiguous, shared)
    wide, sparse = [], []
    for tensor in contiguous:
        if tensor.dim() == 1:
            wide.append(tensor)
            sparse.append(tensor)
            continue
        holder = torch.full((rows, tensor.shape[1] + 13), math.nan, dtype=tensor.dtype)
        holder[:, 5:-8] = tensor
        wide.append(holder[:, 5:-8])
        holder = torch.full((2 * rows, tensor.shape[1]), math.nan, dtype=tensor.dtype)
        holder[::2] = tensor
        sparse.append(holder[::2])
    assert_same_bits(operator.call(tuple(wide), shared), wanted)
    assert_same_bits(operator.call(tuple(sparse), shared), wanted)


@each_dtype
def test_leading_dimensions_are_rows(dtype: torch.dtype) -> None:
    x, weight, gain = values((3, 5, 80), dtype), values((11, 80), dtype, seed=1), values((80,), dtype, seed=2)
    flat = x.reshape(15, 80)
    assert_same_bits(ops.linear(x, weight), ops.linear(flat, weight).reshape(3, 5, 11))
    assert_same_bits(ops.linear(x[1, 2], weight), ops.linear(flat, weight)[7])
    assert_same_bits(ops.rms_norm(x, gain, EPSILON), ops.rms_norm(flat, gain, EPSILON).reshape(3, 5, 80))
    assert_same_bits(ops.silu_and_mul(x), ops.silu_and_mul(flat).reshape(3, 5, 40))
    both = ops.add_rms_norm(x, 2 * x, gain, EPSILON)
    assert_same_bits(both, [out.reshape(3, 5, 80) for out in ops.add_rms_norm(flat, 2 * flat, gain, EPSILON)])


@each_dtype
def test_a_column_of_a_linear_is_its_own(dtype: torch.dtype) -> None:
    """A weight row's result does not depend on the others: the fused projection is the parts, whatever N."""
    x, weight = values((9, 200), dtype), values((129, 200), dtype, seed=1)
    whole = ops.linear(x, weight)
    for count in (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100):
        for start in (0, 129 - count):
            part = slice(start, start + count)
            assert_same_bits(ops.linear(x, weight[part]), whole[:, part], f"columns {part}")


@each_dtype
def test_add_rms_norm_is_the_sum_then_the_norm(dtype: torch.dtype) -> None:
    for kind in KINDS:
        x, residual = (values((17, 80), dtype, kind, n) for n in range(2))
        gain = values((80,), dtype, seed=2)
        norm, total = ops.add_rms_norm(x, residual, gain, EPSILON)
        assert_same_bits((norm, total), (ops.rms_norm(x + residual, gain, EPSILON), x + residual), kind)


@each_dtype
def test_rotary_takes_heads_flat_or_apart_and_any_cache_dtype(dtype: torch.dtype) -> None:
    rows, (cache,) = ROW_OPERATORS["rotary_embedding"].cases(19, 64, dtype)
    flat = ops.rotary_embedding(*rows, 64, cache)
    apart = ops.rotary_embedding(rows[0], *(tensor.unflatten(-1, (-1, 64)) for tensor in rows[1:]), 64, cache)
    assert_same_bits([tensor.flatten(-2) for tensor in apart], flat)
    assert_same_bits(ops.rotary_embedding(*rows, 64, cache.float()), flat)


@each_dtype
def test_selected_log_softmax_is_an_entry_of_log_softmax(dtype: torch.dtype) -> None:
    for kind in KINDS:
        for width in (1, 2, 15, 16, 17, 64, 1043):
            logits, index = ROW_OPERATORS["selected_log_softmax"].draw(33, width, dtype, kind, 5)
            whole = ops.log_softmax(logits).gather(-1, index[:, None]).squeeze(-1)
            assert_same_bits(ops.selected_log_softmax(logits, index)[0], whole, f"{kind} {width}")


@examples
@given(
    strategies.sampled_from(sorted(ROW_OPERATORS)),
    strategies.sampled_from(DTYPES),
    strategies.sampled_from(KINDS),
    strategies.integers(1, 40),
    strategies.integers(1, 700),
    strategies.integers(0, 39),
)
def test_random_shapes(name: str, dtype: torch.dtype, kind: str, size: int, width: int, row: int) -> None:
    """A random row of a random shape: alone it is what it is in the batch, and both are the reference's."""
    operator = ROW_OPERATORS[name]
    width = max(16, width // 16 * 16 % 272) if name == "rotary_embedding" else width
    rows, shared = operator.cases(size, width, dtype, kind, seed=size * width)
    whole = tuple_of(operator.call(rows, shared))
    one = slice(row % size, row % size + 1)
    assert_same_bits(operator.call(take(rows, one), shared), take(whole, one))
    assert_same_bits(whole, operator.reference(rows, shared))


# Attention's invariance. Lengths are around the vector's width, the contract's KV block (64) and the cache's block.

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200)
HEADS = ((4, 4), (4, 2), (8, 1), (14, 2))


@each_dtype
@pytest.mark.parametrize("length", LENGTHS)
def test_decode_is_prefill_is_chunked_prefill(length: int, dtype: torch.dtype) -> None:
    one = Sequence.random(length, length, dtype=dtype)
    ((out, lse),) = attend([one])
    for position in {*range(min(length, 18)), *range(max(0, length - 18), length), length // 2}:
        ((alone, its_lse),) = attend([one.part(position, position + 1)])
        assert_same_bits((alone, its_lse), (out[position : position + 1], lse[position : position + 1]), f"{position}")
    together = attend([one.part(position, position + 1) for position in range(length)])
    assert_same_bits([torch.cat(parts) for parts in zip(*together, strict=True)], (out, lse), "all decodes at once")
    for chunk in (1, 7, 16, 33, 64, 100):
        parts = [one.part(start, min(start + chunk, length)) for start in range(0, length, chunk)]
        chunks = [attend([part])[0] for part in parts]
        assert_same_bits([torch.cat(parts) for parts in zip(*chunks, strict=True)], (out, lse), f"chunks of {chunk}")


@each_dtype
@pytest.mark.parametrize("new", [1, 9, 33])
def test_neighbours_change_nothing(new: int, dtype: torch.dtype) -> None:
    """One request alone and at every place among decodes and prefills of many lengths, on one thread and two."""
    one = Sequence.random(70, new, dtype=dtype)
    (alone,) = attend([one])
    others = [
        Sequence.random(length, count, dtype=dtype, seed=10 * length, kind=kind)
        for length, count, kind in (
            (1, 1, "normal"),
            (33, 33, "outliers"),
            (200, 1, "normal"),
            (65, 10, "nan"),
            (129, 64, "infinite"),
            (9, 9, "normal"),
            (300, 5, "normal"),
        )
    ]
    for count in range(1, len(others) + 1):
        for place in {0, count // 2, count}:
            batch = [*others[:place], one, *others[place:count]]
            for used in (1, 2):
                with threads(used):
                    found = attend(batch, Layout(seed=count))[place]
                assert_same_bits(found, alone, f"place {place} among {count}, {used} threads")


@each_dtype
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_the_caches_layout_changes_nothing(heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Block sizes, the blocks' order, the strides of the cache, and what stands in places that belong to nobody."""
    batch = [
        Sequence.random(length, new, heads, dtype=dtype, seed=length) for length, new in ((70, 1), (33, 33), (5, 2))
    ]
    wanted = attend(batch)
    for block_size in (1, 16, 32, 128):
        for seed in range(3):
            for tokens_first in (False, True):
                found = attend(batch, Layout(block_size, seed, tokens_first, math.nan))
                for n, (one, other) in enumerate(zip(found, wanted, strict=True)):
                    assert_same_bits(one, other, f"request {n}, blocks of {block_size}, order {seed}, {tokens_first}")


@each_dtype
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_query_head_reads_its_key_head_alone(heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Grouped heads are as keys and values repeated a head, and as each head in a call of its own."""
    one = Sequence.random(66, 5, heads, dtype=dtype)
    ((out, lse),) = attend([one])
    group = heads[0] // heads[1]
    repeated = Sequence(one.query, one.key.repeat_interleave(group, 1), one.value.repeat_interleave(group, 1))
    assert_same_bits(attend([repeated])[0], (out, lse))
    for head in range(heads[0]):
        mine, its = slice(head, head + 1), slice(head // group, head // group + 1)
        alone = Sequence(one.query[:, mine], one.key[:, its], one.value[:, its])
        assert_same_bits(attend([alone])[0], (out[:, mine], lse[:, mine]), f"head {head}")


@each_dtype
def test_a_token_of_the_future_is_not_seen(dtype: torch.dtype) -> None:
    """Chunk by chunk, with all later keys and values NaN: what was computed does not depend on what will be written."""
    one = Sequence.random(70, 70, dtype=dtype)
    ((out, lse),) = attend([one])
    for end in (1, 16, 33, 64, 69):
        key, value = one.key.clone(), one.value.clone()
        key[end:], value[end:] = math.nan, math.nan
        ((found, its_lse),) = attend([Sequence(one.query, key, value)])
        assert_same_bits((found[:end], its_lse[:end]), (out[:end], lse[:end]), f"{end}")


@each_dtype
def test_strided_queries_and_spare_rows(dtype: torch.dtype) -> None:
    """The query as a part of a fused projection; rows past the last request are zero and disturb nobody."""
    batch = [Sequence.random(40, 3, dtype=dtype), Sequence.random(20, 1, dtype=dtype, seed=5)]
    query, *rest = laid_out(batch)
    wanted = ops.attention(query, *rest, 0.125)
    fused = torch.full((9, 3 * 4 * 64), math.nan, dtype=dtype)
    fused[:4, 256:512] = query.flatten(1)
    out, lse = ops.attention(fused[:, 256:512].unflatten(-1, (4, 64)), *rest, 0.125)
    assert_same_bits((out[:4], lse[:4]), wanted)
    assert out.shape == (9, 4, 64) and not bits(out[4:]).any() and not bits(lse[4:]).any()


@each_dtype
def test_a_request_without_new_tokens_and_an_empty_batch(dtype: torch.dtype) -> None:
    one = Sequence.random(40, 3, dtype=dtype)
    idle = Sequence(one.query[:0], one.key, one.value)
    found = attend([idle, one, idle])
    assert_same_bits(found[1], attend([one])[0])
    assert [tuple(out.shape) for out, _ in found] == [(0, 4, 64), (3, 4, 64), (0, 4, 64)]
    ((out, lse),) = attend([idle])
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


@examples
@given(batches(), strategies.sampled_from((1, 8, 16, 32)), strategies.integers(0, 99))
def test_random_batches_of_attention(batch: list[Sequence], block_size: int, seed: int) -> None:
    """Every request of a random batch: alone it is what it is in the batch, and both are the reference's."""
    found = attend(batch, Layout(block_size, seed))
    reference = attend(batch, Layout(block_size, seed), ops.reference_attention)
    for n, (one, mine, its) in enumerate(zip(batch, found, reference, strict=True)):
        assert_same_bits(attend([one])[0], mine, f"request {n} alone")
        assert_same_bits(mine, its, f"request {n} and the reference")


@each_dtype
@pytest.mark.parametrize("tokens_first", [False, True])
def test_reshape_and_cache_writes_each_token_into_its_slot(dtype: torch.dtype, tokens_first: bool) -> None:
    """And nothing else; negative slots are skipped, NaN's bits are kept, rows may be strided."""
    shape = (6, 16, 2, 64) if tokens_first else (6, 2, 16, 64)
    caches = [values(shape, dtype, seed=n) for n in range(2)]
    caches = [cache.transpose(1, 2) for cache in caches] if tokens_first else caches
    wanted = [cache.clone() for cache in caches]
    fused = values((20, 4, 64), dtype, "nan", 9)
    key, value = fused[:, :2], fused[:, 2:]
    slots = torch.randperm(96, generator=torch.Generator().manual_seed(4))[:20]
    slots[[3, 11, 19]] = -1
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted[0][slot // 16, :, slot % 16] = key[token]
            wanted[1][slot // 16, :, slot % 16] = value[token]
    ops.reshape_and_cache(key, value, *caches, slots)
    assert_same_bits(caches, wanted)


# The contract: the bits of the reference.


@each_operator
@each_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_the_references(operator: RowOperator, dtype: torch.dtype, kind: str) -> None:
    for width in operator.widths:
        for size in (1, 2, 17, 33, 129):
            rows, shared = operator.cases(size, width, dtype, kind)
            assert_same_bits(
                operator.call(rows, shared), operator.reference(rows, shared), f"width {width}, {size} rows"
            )


@each_dtype
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attentions_bits_are_the_references(heads: tuple[int, int], kind: str, dtype: torch.dtype) -> None:
    for width in (16, 64, 80, 128):
        batch = [
            Sequence.random(length, new, heads, width, dtype, seed=length, kind=kind)
            for length, new in ((1, 1), (64, 64), (65, 1), (130, 17), (200, 1))
        ]
        found, wanted = attend(batch), attend(batch, operator=ops.reference_attention)
        for n, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same_bits(one, other, f"width {width}, request {n}")


def test_the_fused_multiply_add_of_these_tests_is_the_c_librarys() -> None:
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    for kind in KINDS:
        a, b = values((2000,), torch.float32, kind), values((2000,), torch.float32, seed=1)
        product = a * b
        for c in (
            values((2000,), torch.float32, kind, 2),
            -product,
            product * 2**-24,
            product * 2**-12,
            -0.0 * product,
        ):
            wanted = torch.tensor(
                [fmaf(*numbers) for numbers in zip(*map(torch.Tensor.tolist, (a, b, c)), strict=True)]
            )
            assert_same_bits(fma(a, b, c), wanted, kind)


@each_dtype
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linears_bits_are_those_of_16_lanes(with_bias: bool, kind: str, dtype: torch.dtype) -> None:
    """Against the reference of these tests, which shares no line with the library."""
    for width in (1, 15, 16, 17, 31, 32, 33, 64, 200, 1043):
        for size, columns in ((1, 1), (1, 37), (2, 3), (5, 8), (6, 9), (33, 37)):
            operator = ROW_OPERATORS["linear with bias" if with_bias else "linear"]
            rows, (weight, *bias) = operator.cases(size, width, dtype, kind)
            shared = (weight[:columns], *(one[:columns] for one in bias))
            assert_same_bits(ops.linear(*rows, *shared), lanes_linear(*rows, *shared), f"{size} x {width} x {columns}")


def test_a_sum_of_no_terms_is_zero() -> None:
    for dtype in DTYPES:
        x, weight, bias = torch.empty(3, 0, dtype=dtype), torch.empty(5, 0, dtype=dtype), values((5,), dtype)
        assert_same_bits(ops.linear(x, weight), torch.zeros(3, 5, dtype=dtype))
        assert_same_bits(ops.linear(x, weight, bias), bias.expand(3, 5))


# One contract for all vector widths.


def _pattern(shape: tuple[int, ...], dtype: torch.dtype, salt: int) -> torch.Tensor:
    """Values in (-4, 4) from whole numbers alone, so that no machine's random numbers or mathematics enter."""
    n = torch.arange(math.prod(shape), dtype=torch.int64)
    return (((n * 2654435761 + salt * 40503) % 65521).double() / 8192 - 4).to(dtype).view(shape)


@each_dtype
def test_the_bits_are_those_on_record(dtype: torch.dtype) -> None:
    """The record was made by the AVX2 kernels on one processor and by the AVX-512 kernels on another: one hash."""
    digest = hashlib.sha256()

    def note(*outputs: torch.Tensor) -> None:
        for output in outputs:
            digest.update(bits(output).numpy().tobytes())

    for m, n, k in ((1, 300, 1024), (7, 300, 1000), (130, 301, 777)):
        note(ops.linear(_pattern((m, k), dtype, 1), _pattern((n, k), dtype, 2)))
    gain = _pattern((333,), dtype, 3)
    note(*ops.add_rms_norm(_pattern((9, 333), dtype, 4), _pattern((9, 333), dtype, 5), gain, EPSILON))
    note(ops.silu_and_mul(_pattern((33, 770), dtype, 6)), ops.log_softmax(_pattern((9, 5000), dtype, 7)))
    table, starts = torch.arange(300, dtype=torch.int32)[None], torch.tensor([0, 300], dtype=torch.int32)
    keys, lengths = _pattern((300, 4, 1, 64), dtype, 8), torch.tensor([300], dtype=torch.int32)
    note(*ops.attention(_pattern((300, 8, 64), dtype, 9), keys, keys, table, starts, lengths, 0.125))
    assert digest.hexdigest() == ON_RECORD[dtype], ops.instruction_set()


# Accuracy. u is the unit roundoff of fp32; each bound counts the roundings on the way to a value and adds one of the
# output dtype. Sums run in 16 lanes: a term passes K / 16 additions and four of the tree.

U = 2.0**-24
ROUND_OUT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
ACCURATE_KINDS = ("normal", "cancellation", "outliers", "zeros")


def _linear_bound(rows: Rows, shared: Rows) -> Rows:
    """Forward error of a sum: roundings of a term times the sum of the terms' magnitudes."""
    x, weight = rows[0].double().abs(), shared[0].double().abs()
    magnitude = x @ weight.T + (shared[1].double().abs() if len(shared) > 1 else 0)
    return ((x.shape[-1] / 16 + 6) * U * magnitude,)


def _norm_bound(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Relative: half of the sum's, as its root is taken, and seven single operations."""
    x = x.double()
    size = x.abs() * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * gain.double().abs()
    return ((x.shape[-1] / 16 + 5) / 2 + 7) * U * size


def _rotary_bound(rows: Rows, shared: Rows) -> Rows:
    """Two roundings, of terms no larger than a and b."""
    out = []
    for tensor in rows[1:]:
        first, second = tensor.double().abs().unflatten(-1, (-1, shared[0].shape[-1])).chunk(2, -1)
        out.append(torch.cat((first + second,) * 2, -1).flatten(-2) * 2 * U)
    return tuple(out)


def _silu_bound(rows: Rows, shared: Rows) -> Rows:
    """Relative: exp within 2 ulp (4 u) and four operations. Where exp overflows the sigmoid is 0, below 1e-36."""
    gate, up = rows[0].double().chunk(2, -1)
    return (8 * U * (torch.nn.functional.silu(gate) * up).abs() + 1e-36 * up.abs(),)


def _log_softmax_bound(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Of an entry and of the LSE, absolute. The sum is off by its additions and by each exp, which is off by 2 ulp and
    by the rounding of its argument (the mean of -log p under p is at most log V); differences round by their size."""
    logits = rows[0].double()
    width, peak = logits.shape[-1], logits.amax(-1, keepdim=True)
    of_sum = (width / 16 + 16 + 2 * math.log(width + 1)) * U
    lse = logits.logsumexp(-1, keepdim=True)
    entry = of_sum + 3 * U * ((logits - peak).abs() + (lse - peak))
    return entry, (of_sum + 2 * U * lse.abs() + 2 * U * (lse - peak)).squeeze(-1)


def _selected_bound(rows: Rows, shared: Rows) -> Rows:
    entry, lse = _log_softmax_bound(rows)
    return entry.gather(-1, rows[1][:, None]).squeeze(-1), lse


BOUNDS: dict[str, Callable[[Rows, Rows], Rows]] = {
    "linear": _linear_bound,
    "linear with bias": _linear_bound,
    "rms_norm": lambda rows, shared: (_norm_bound(rows[0], shared[0]),),
    "add_rms_norm": lambda rows, shared: (_norm_bound(rows[0] + rows[1], shared[0]), torch.zeros(())),
    "rotary_embedding": _rotary_bound,
    "silu_and_mul": _silu_bound,
    "log_softmax": lambda rows, shared: (_log_softmax_bound(rows)[0],),
    "selected_log_softmax": _selected_bound,
}


def _assert_close(found: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor, what: str) -> None:
    """Within the bound, one rounding to the output dtype on top, and the smallest subnormal."""
    rounding = ROUND_OUT[found.dtype]
    allowed = 1.01 * bound + rounding * (exact.abs() + bound) + 2.0**-133
    error = (found.double() - exact).abs()
    assert (error <= allowed).all(), f"{what}: {float((error / allowed).max()):.2f} times the bound"


@each_operator
@each_dtype
@pytest.mark.parametrize("kind", ACCURATE_KINDS)
def test_accuracy_against_fp64(operator: RowOperator, dtype: torch.dtype, kind: str) -> None:
    for width in operator.widths:
        rows, shared = operator.cases(33, width, dtype, kind)
        found = tuple_of(operator.call(rows, shared))
        bounds = BOUNDS[operator.name](rows, shared)
        for one, exact, bound in zip(found, operator.exact(rows, shared), bounds, strict=True):
            _assert_close(one, exact.double(), bound, f"width {width}")


@each_dtype
@pytest.mark.parametrize("kind", ACCURATE_KINDS)
@pytest.mark.parametrize("width", [64, 80, 128])
def test_attentions_accuracy_against_fp64(width: int, kind: str, dtype: torch.dtype) -> None:
    """A score is off by D fused multiply-adds and its scaling, a probability by twice that and by its exp, an output
    by an addition a key and a rescaling a block of 64."""
    for length, new in ((1, 1), (64, 64), (65, 1), (200, 40)):
        one = Sequence.random(length, new, width=width, dtype=dtype, kind=kind)
        if kind == "outliers":  # scores of 1e8 would be one-hot, and any order right
            one = Sequence(one.query * 2**-10, one.key, one.value)
        ((out, lse),) = attend([one])
        exact, exact_lse = attention_exact(one)
        group = one.query.shape[1] // one.key.shape[1]
        query, key, value = (tensor.double().abs() for tensor in (one.query, one.key, one.value))
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        score = torch.einsum("qhd,khd->qhk", query, key) * width**-0.5
        of_score = ((width + 3) * U * score).amax(-1)
        of_sum = of_score + (length / 16 + length / 64 + 24 + 2 * score.amax(-1)) * U
        magnitude = attention_exact(Sequence(one.query, one.key, one.value.abs()))[0]
        _assert_close(out, exact, (2 * of_sum + (length + 8) * U)[..., None] * magnitude, f"output, length {length}")
        _assert_close(lse, exact_lse, of_sum + 2 * U * exact_lse.abs(), f"LSE, length {length}")


# Errors: each names the operator and the argument, and says what to do.


def _errors() -> Iterator[tuple[str, str, Callable[[], object]]]:
    """(operator, the argument or the value that the message names, a call that must fail)."""
    x, weight, gain = torch.ones(3, 8), torch.ones(5, 8), torch.ones(8)
    half = torch.bfloat16
    yield "linear", "weight", lambda: ops.linear(x, weight.to(half))
    yield "linear", "bias", lambda: ops.linear(x, weight, torch.ones(5, dtype=half))
    yield "linear", "x", lambda: ops.linear(x.double(), weight.double())
    yield "linear", "x", lambda: ops.linear(x.half(), weight.half())
    yield "linear", "weight [5, 7]", lambda: ops.linear(x, torch.ones(5, 7))
    yield "linear", "weight", lambda: ops.linear(x, gain)
    yield "linear", "weight", lambda: ops.linear(x, torch.ones(8, 5).T)
    yield "linear", "bias", lambda: ops.linear(x, weight, torch.ones(4))
    yield "linear", "x", lambda: ops.linear(torch.ones(()), torch.ones(5, 1))
    yield "rms_norm", "weight", lambda: ops.rms_norm(x, torch.ones(7), EPSILON)
    yield "rms_norm", "weight", lambda: ops.rms_norm(x, gain.to(half), EPSILON)
    yield "rms_norm", "x", lambda: ops.rms_norm(x.double(), gain.double(), EPSILON)
    yield "add_rms_norm", "residual", lambda: ops.add_rms_norm(x, x[:, :1], gain, EPSILON)
    yield "add_rms_norm", "residual", lambda: ops.add_rms_norm(x, x.to(half), gain, EPSILON)
    yield "silu_and_mul", "x", lambda: ops.silu_and_mul(torch.ones(3, 7))
    yield "silu_and_mul", "x", lambda: ops.silu_and_mul(x.int())
    yield "log_softmax", "logits", lambda: ops.log_softmax(gain)
    yield "log_softmax", "logits", lambda: ops.log_softmax(torch.ones(3, 0))
    yield "log_softmax", "logits", lambda: ops.log_softmax(x.long())
    yield "selected_log_softmax", "index 8", lambda: ops.selected_log_softmax(x, torch.tensor([0, 8, 1]))
    yield "selected_log_softmax", "index -1", lambda: ops.selected_log_softmax(x, torch.tensor([0, 1, -1]))
    yield "selected_log_softmax", "index", lambda: ops.selected_log_softmax(x, torch.tensor([0, 1]))

    positions, cache = torch.arange(3), torch.ones(9, 4)
    yield "rotary_embedding", "position 9", lambda: ops.rotary_embedding(positions + 7, x, x, 4, cache)
    yield "rotary_embedding", "position -1", lambda: ops.rotary_embedding(positions - 1, x, x, 4, cache)
    yield "rotary_embedding", "positions", lambda: ops.rotary_embedding(positions.int(), x, x, 4, cache)
    yield "rotary_embedding", "query", lambda: ops.rotary_embedding(positions, x[:2], x, 4, cache)
    yield "rotary_embedding", "key", lambda: ops.rotary_embedding(positions, x, x.to(half), 4, cache)
    yield "rotary_embedding", "cos_sin_cache", lambda: ops.rotary_embedding(positions, x, x, 8, cache)

    arguments = dict(
        zip(
            ("query", "key_cache", "value_cache", "block_table", "query_start_loc", "seq_lens"),
            laid_out([Sequence.random(20, 3, dtype=torch.float32)]),
            strict=True,
        )
    )

    def attention(**changed: torch.Tensor) -> Callable[[], object]:
        return lambda: ops.attention(*(arguments | changed).values(), 0.125)

    query, key_cache = arguments["query"], arguments["key_cache"]
    yield "attention", "query", attention(query=query.flatten(1))
    yield "attention", "3 heads", attention(query=query[:, :3])
    yield "attention", "cache", attention(key_cache=key_cache.to(half))
    yield "attention", "cache", attention(value_cache=arguments["value_cache"][:1])
    yield "attention", "cache", attention(key_cache=key_cache.transpose(2, 3))
    yield "attention", "block_table", attention(block_table=arguments["block_table"].long())
    yield "attention", "block_table", attention(block_table=arguments["block_table"] + 99)
    yield "attention", "request 0 has 3 queries of 2 keys", attention(seq_lens=arguments["seq_lens"] - 18)
    yield "attention", "request 0", attention(seq_lens=arguments["seq_lens"] + 99)
    yield "attention", "query_start_loc", attention(query_start_loc=arguments["query_start_loc"][:1])
    yield "attention", "query_start_loc", attention(query_start_loc=arguments["query_start_loc"] + 1)
    yield "attention", "query_start_loc", attention(query_start_loc=arguments["query_start_loc"][None])
    yield "attention", "seq_lens", attention(seq_lens=arguments["seq_lens"][None])

    tokens, slots = torch.ones(3, 2, 64), torch.arange(3)
    caches = arguments["key_cache"], arguments["value_cache"]
    yield "reshape_and_cache", "slot 9997", lambda: ops.reshape_and_cache(tokens, tokens, *caches, slots + 9997)
    yield "reshape_and_cache", "slot_mapping", lambda: ops.reshape_and_cache(tokens, tokens, *caches, slots.int())
    yield "reshape_and_cache", "key", lambda: ops.reshape_and_cache(tokens[:, :1], tokens, *caches, slots)
    yield (
        "reshape_and_cache",
        "value",
        lambda: ops.reshape_and_cache(tokens, tokens.to(half), *caches, slots),
    )


@pytest.mark.parametrize(
    ("operator", "said", "call"), [*_errors()], ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_wrong_argument_is_named_with_its_remedy(operator: str, said: str, call: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError) as caught:
        call()
    message = str(caught.value)
    assert f"{operator}: " in message, message
    what, _, remedy = message.partition(f"{operator}: ")[2].partition("; ")
    assert re.search(rf"(?<!\w){re.escape(said)}(?!\w)", what), message
    assert remedy, f"no remedy: {message}"


def test_the_contract_has_a_name_and_its_library_no_other_operator() -> None:
    """Every operator that the library registers has a row in the catalogue, and none is there for nothing."""
    registered = {
        name.partition("::")[2].partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(f"{contract.NAMESPACE}::")
    }
    operators = {name for name in registered if not name.startswith("reference_")} - contract.NOT_ARITHMETIC
    assert operators == {row.operator for row in contract.ROWS}
    assert ops.contract() == contract.NAME
