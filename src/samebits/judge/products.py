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
IMPLEMENTATIONS = ("cublaslt", "skinny", "vllm")
LIBRARIES = {"batch_invariant_linear.so", "batch_invariant_sm90.so"}
LARGE, FEW = 50e6, 16  # bytes of a weight whose bandwidth is asked for, at so many rows or fewer
LEAST_ELEMENTS = 10**7  # of an implementation at a weight

MEAN, WORST, SHARE, DIFFER = "geometric mean", "worst", "share of the copy's bandwidth", "elements that differ"
LEAST = {MEAN: 1.05, WORST: 0.90, SHARE: 0.85}


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
    compared = {(row["n"], row["k"], row["implementation"]): row for row in document["bits"]}
    for n, k in sorted(shapes):
        for name in IMPLEMENTATIONS:
            row = compared.get((n, k, name))
            if row is None or row["of"] < LEAST_ELEMENTS:
                found.append(f"{n} x {k}, {name}: {row['of'] if row else 0} elements are compared, too few")
            elif row["differ"]:
                found.append(f"{n} x {k}, {name}: {row['differ']} elements differ")
    found += [f"{name}: its hash is not there" for name in sorted(LIBRARIES - set(document["libraries"]))]
    if found:
        return found
    return [
        f"{name}: {value:.3f}, must be ≥ {LEAST[name]:.2f}"
        for name, value in summary(document).items()
        if name in LEAST and value < LEAST[name]
    ]
