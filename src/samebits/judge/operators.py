"""What `samebits bench operators` must have measured on a card, and whether a document shows it.

Every case, as many elements of each as its sizes give, and no element that differs. The sizes are those of Qwen3-8B.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD, VOCABULARY = 4096, 12_288, 32, 8, 128, 151_936
LIBRARIES = {"batch_invariant_rows.so", "batch_invariant_attention.so"}

REPEATS = 20
ROWS = (1, 2, 17, 64, 255, 256, 257, 1024)
TIMED_ROWS = (1, 16, 64, 1024)
# 297 additions a lane and 9 of the tree, each rounded to fp32; twice that, for exp, the logarithm and the result.
LOGPROB = 2 * 306 * 2.0**-24


def _rounded(times: int) -> float:
    """The most that so many roundings to bf16 make, relative to the largest of a row, and fp32 a tenth of one."""
    return (times + 0.1) * 2.0**-8


@dataclass(frozen=True)
class RowOperator:
    """elements: of its outputs, a row. most: its error against fp64, relative to the row's largest, or `absolute`."""

    elements: int
    most: float
    absolute: bool = False


# Roundings to bf16: of the sum and the norm; of the norm and, for two values that are turned into one, of the result.
ROW_OPERATORS = {
    "rms_norm": RowOperator(HIDDEN, _rounded(1)),
    "add_rms_norm": RowOperator(2 * HIDDEN, _rounded(2)),
    "norm_rotary_embedding": RowOperator((HEADS + KV_HEADS) * HEAD, _rounded(3)),
    "silu_and_mul": RowOperator(INTERMEDIATE, _rounded(1)),
    "log_softmax": RowOperator(VOCABULARY, LOGPROB, absolute=True),
    "selected_log_softmax": RowOperator(2, LOGPROB, absolute=True),
}

# On both sides of a block of 128 keys, and of all the blocks that are under way at once.
LENGTHS = (1, 2, 16, 17, 127, 128, 129, 255, 257, 640, 1000, 1024, 1025, 1153, 2049, 4099, 8192)
GROUPS = ((32, 8), (16, 8), (64, 8), (40, 8), (8, 8), (4, 1))  # query heads, key heads
PAGES = (16, 32, 128)
SCALES = (1, 8, 0)  # of queries: as drawn; a few keys take all; all keys are equal
ATTENTION_CASES = tuple((heads, kv, page, scale) for (heads, kv), page, scale in product(GROUPS, PAGES, SCALES))
# Requests and the context of each.
STEPS = (
    *((requests, 1088) for requests in (1, 2, 4, 8, 16)),
    (1, 4096),
    *((requests, 8704) for requests in (1, 2, 4, 8)),
)

NEIGHBOUR_HEADS, NEIGHBOUR_PAGES = (64, 96, 128, 256), (16, 128, 144)
NEIGHBOUR_GROUP, NEIGHBOUR_KV_HEADS = 4, 2
NEIGHBOURS = (0, 1, 8, 9, 10, 16, 17, 33, 49, 65, 129, 300)  # tokens of the neighbour's query; 0: there is none
NEIGHBOUR_CASES = tuple(product(NEIGHBOUR_HEADS, NEIGHBOUR_PAGES, NEIGHBOURS))
REFUSED = {(96, 144)}  # (head, page) that vLLM refuses at BI=1
SEEN = 64  # a head whose bits FlashAttention 3 lets depend on the neighbours


def sampled(rows: int) -> list[int]:
    """The rows of a batch that are computed alone: the first, the middle and the last."""
    return sorted({0, rows // 2, rows - 1})


def cache_bytes(requests: int, context: int) -> int:
    """Bytes of the cache that attention of one new token a request reads: keys and values in bf16."""
    return requests * context * KV_HEADS * HEAD * 2 * 2


def counts(document: Mapping[str, Any]) -> list[Mapping[str, int]]:
    """Every comparison that must find nothing: {"differ", "of"}, in elements."""
    rows = (*document["rows"]["bits"], *document["attention"]["bits"])
    found = [count for row in rows for count in row.values() if isinstance(count, Mapping)]
    return [*found, *(row["told"] for row in document["neighbours"] if not row["refused"])]


def missed(document: Mapping[str, Any]) -> list[str]:
    """What a document of schema operators-1 lacks of what it must show, one text each; empty if nothing."""
    found = [f"{name}: its hash is not there" for name in sorted(LIBRARIES - set(document["libraries"]))]
    rows, attention = document["rows"], document["attention"]
    found += _unplanned(rows["bits"], ("operator", "m"), product(ROW_OPERATORS, ROWS))
    found += _unplanned(rows["errors"], ("operator",), product(ROW_OPERATORS))
    found += _unplanned(rows["times"], ("operator", "m"), product(ROW_OPERATORS, TIMED_ROWS))
    found += _unplanned(attention["bits"], ("heads", "kv_heads", "page", "scale"), ATTENTION_CASES)
    found += _unplanned(attention["times"], ("requests", "context"), STEPS)
    found += _unplanned(document["neighbours"], ("head", "page", "neighbour"), NEIGHBOUR_CASES)
    if found:
        return found  # counts are looked at where every case is one that was asked for
    for row in rows["bits"]:
        found += _row_bits(row)
    for row in rows["errors"]:
        if row["ours"] > (most := ROW_OPERATORS[row["operator"]].most):
            found.append(f"{row['operator']}: an error of {row['ours']:.3g}, {most:.3g} is the most")
    for row in attention["bits"]:
        found += _attention_bits(row)
    for row in attention["times"]:
        if row["bytes"] != (must := cache_bytes(row["requests"], row["context"])):
            found.append(f"{row['requests']} requests of {row['context']}: {row['bytes']} bytes, they are {must}")
    for row in document["neighbours"]:
        found += _neighbour(row)
    if not any(row["true"]["differ"] for row in document["neighbours"] if row["head"] == SEEN):
        found.append(
            f"heads of {SEEN}: no neighbour changes a bit, whatever FlashAttention 3 is told; nothing is shown"
        )
    return found


def _row_bits(row: Mapping[str, Any]) -> list[str]:
    m, elements = row["m"], ROW_OPERATORS[row["operator"]].elements
    must = {"alone": len(sampled(m)), "repeated": REPEATS * m, "graph": m}
    place = f"{row['operator']}, {m} rows"
    return [text for how, times in must.items() for text in _wrong(f"{place}, {how}", row[how], times * elements)]


def _attention_bits(row: Mapping[str, Any]) -> list[str]:
    outputs = len(LENGTHS) * row["heads"] * HEAD
    tokens = len(LENGTHS) * -(-max(LENGTHS) // row["page"]) * row["page"]
    must = {
        "told_1": outputs,
        "told_5": outputs,
        "scheduled": outputs,
        "served": outputs,
        "cache": tokens * row["kv_heads"] * 2 * HEAD,
        "repeated": REPEATS * outputs,
    }
    place = f"attention of {row['heads']} heads on {row['kv_heads']}, pages of {row['page']}, queries by {row['scale']}"
    return [text for how, of in must.items() for text in _wrong(f"{place}, {how}", row[how], of)]


def _neighbour(row: Mapping[str, Any]) -> list[str]:
    head, page = row["head"], row["page"]
    place = f"heads of {head}, pages of {page}, a neighbour of {row['neighbour']}"
    of = NEIGHBOUR_GROUP * NEIGHBOUR_KV_HEADS * head
    found = []
    if row["refused"] != ((head, page) in REFUSED):
        found.append(f"{place}: vLLM {'refuses' if row['refused'] else 'does not refuse'} it")
    found += _wrong(f"{place}, true", row["true"], of, may_differ=True)
    return found + _wrong(f"{place}, told", row["told"], of, may_differ=(head, page) in REFUSED)


def _wrong(place: str, count: Mapping[str, int], of: int, may_differ: bool = False) -> list[str]:
    if count["of"] != of:
        return [f"{place}: {count['of']} elements were compared, {of} must be"]
    if count["differ"] > of:
        return [f"{place}: {count['differ']} of {of} elements differ, more than there are"]
    return [f"{place}: {count['differ']} of {of} elements differ"] if count["differ"] and not may_differ else []


def _unplanned(rows: Sequence[Mapping[str, Any]], keys: Sequence[str], must: Iterable[tuple[Any, ...]]) -> list[str]:
    """Cases that are missing, that nobody asked for, or that are listed twice; a case is what a row has at `keys`."""
    times, planned = Counter(tuple(row[key] for key in keys) for row in rows), list(must)

    def name(case: tuple[Any, ...]) -> str:
        return ", ".join(f"{key} {value}" for key, value in zip(keys, case, strict=True))

    found = [f"{name(case)}: is not measured" for case in planned if case not in times]
    found += [f"{name(case)}: is none of the cases" for case in times if case not in planned]
    return found + [f"{name(case)}: is listed twice" for case, n in times.items() if n > 1]
