"""What `samebits bench gemm` must have measured on a card, and whether a document shows it.

Every weight at every number of rows, the bits of each implementation, and what serves against cuBLAS with split-K.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# (N, K) of the linears of Qwen3 models: qkv, output, gate and up, down, vocabulary.
SHAPES = {
    "0.6B": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151_936, 1024)),
    "1.7B": ((4096, 2048), (2048, 2048), (12_288, 2048), (2048, 6144), (151_936, 2048)),
    "8B": ((6144, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288), (151_936, 4096)),
    "32B": ((10_240, 5120), (5120, 8192), (51_200, 5120), (5120, 25_600), (151_936, 5120)),
}
ROWS = (1, 2, 4, 8, 16, 17, 32, 33, 64)
# Which numbers of rows are compared: every one of few, then every STEP-th; of powers of two every ROW-th row.
EVERY, POWERS, STEP, ROW = 1100, (2048, 4096, 8192, 16_384), 37, 61
MOST_SKINNY, WIDTHS = 64, (16, 24, 32, 40, 48, 64, 80, 96, 128)
KINDS = ("normal", "cancelling", "outliers", "special")
REPLAYS, REPLAYED = 20, 16  # of a graph, of so many rows
WIDE = 100_000  # values of N from which on not every number of rows is compared
IMPLEMENTATIONS = ("cublaslt", "skinny", "vllm")
LIBRARIES = {"batch_invariant_linear.so", "batch_invariant_sm90.so"}
LARGE, FEW = 50e6, 16  # bytes of a weight whose bandwidth is asked for, at so many rows or fewer

MEAN, WORST, SHARE, DIFFER = "geometric mean", "worst", "share of the copy's bandwidth", "elements that differ"
LEAST = {MEAN: 1.05, WORST: 0.90, SHARE: 0.85}


def compared(kind: str, n: int) -> dict[str, tuple[int, ...]]:
    """The numbers of rows, from 1 on, at which each implementation is compared on a kind of inputs."""
    each = 1 if kind == "normal" and n < WIDE else STEP
    return {
        "cublaslt": (*range(1, EVERY + 1, each), EVERY),
        "skinny": tuple(range(1, MOST_SKINNY + 1, 1 if kind == "normal" else 7)),
        "vllm": tuple(range(1, EVERY + 1, STEP)),
    }


def powers(kind: str, n: int) -> tuple[int, ...]:
    """The larger numbers of rows at which cuBLASLt is compared, in every ROW-th row."""
    return POWERS if kind == "normal" and n < WIDE else ()


def elements(n: int) -> dict[str, int]:
    """How many elements of each implementation are compared for a weight of n rows."""
    found = dict.fromkeys(IMPLEMENTATIONS, 0)
    for kind in KINDS:
        rows = {name: sum(several) for name, several in compared(kind, n).items()}
        rows["skinny"] *= len(WIDTHS)
        rows["cublaslt"] += sum(len(range(0, m, ROW)) for m in powers(kind, n)) + REPLAYS * REPLAYED
        rows["skinny"] += REPLAYS * REPLAYED
        for name in IMPLEMENTATIONS:
            found[name] += rows[name] * n
    return found


def summary(document: Mapping[str, Any]) -> dict[str, float]:
    """The figures that are asked for: what serves against cuBLAS, and bytes a second of large weights at few rows."""
    faster = [row["microseconds"]["cublas"] / row["microseconds"][row["served"]] for row in document["rows"]]
    large = [
        row["n"] * row["k"] * 2 / row["microseconds"][row["served"]] / 1e6 / document["copy_tb_s"]
        for row in document["rows"]
        if row["n"] * row["k"] * 2 >= LARGE and row["m"] <= FEW
    ]
    return {
        MEAN: math.exp(sum(map(math.log, faster)) / len(faster)),
        WORST: min(faster),
        SHARE: min(large),
        DIFFER: float(sum(row["differ"] for row in document["bits"])),
    }


def missed(document: Mapping[str, Any]) -> list[str]:
    """What a measurement lacks of what it must show, one text each: a case, bits, a figure."""
    shapes = {shape for several in SHAPES.values() for shape in several}
    timed = {(row["n"], row["k"], row["m"]) for row in document["rows"]}
    found = [f"{n} x {k}, {m} rows: is not timed" for n, k in sorted(shapes) for m in ROWS if (n, k, m) not in timed]
    said = {(row["n"], row["k"], row["implementation"]): row for row in document["bits"]}
    for n, k in sorted(shapes):
        for name, must in elements(n).items():
            row = said.get((n, k, name))
            if row is None or row["of"] != must:
                found.append(f"{n} x {k}, {name}: {row['of'] if row else 0} elements are compared, must be {must}")
            elif row["differ"]:
                found.append(f"{n} x {k}, {name}: {row['differ']} elements differ")
    if len(document["rows"]) != len(timed) or len(document["bits"]) != len(said):
        found.append("a row is there twice")
    found += [f"{name}: its hash is not there" for name in sorted(LIBRARIES - set(document["libraries"]))]
    if found:
        return found
    return [
        f"{name}: {value:.3f}, must be ≥ {LEAST[name]:.2f}"
        for name, value in summary(document).items()
        if name in LEAST and value < LEAST[name]
    ]
