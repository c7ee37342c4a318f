"""Bit comparison of two recorded logprob tensors under a mask, piece by piece.

Bits are compared as bits, in the recorded dtype and never through exp(): 0.0 and -0.0 differ, -200 and -300 differ
although both are probability zero, and a NaN equals nothing, itself included.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from samebits.evidence.capsule import DTYPES, LOGPROB, Tensor

PIECE = 1 << 19  # elements held at a time

# dtype -> (integer type of its width, the bits of its exponent; all of them set: infinity or NaN)
_BITS: dict[str, tuple[type[np.unsignedinteger], int]] = {
    "float64": (np.uint64, 0x7FF0_0000_0000_0000),
    "float32": (np.uint32, 0x7F80_0000),
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
}


@dataclass(frozen=True)
class Comparison:
    """Counts over the valid positions.

    mismatched: positions whose bits differ or that hold an infinity or NaN on a side; nonfinite: the latter alone.
    max_abs: largest |left - right| over finite pairs, in float64. first: flat index of the first mismatch.
    constant: a side has one and the same bits at every valid position (of two or more).
    magnitudes: e -> number of finite pairs with 2^(e-1) <= |left - right| < 2^e; pairs of equal value are not in it.
    """

    valid_tokens: int
    mismatched: int
    nonfinite: int
    max_abs: float
    first: int | None
    constant: bool
    magnitudes: dict[int, int]


def compare(left: Tensor, right: Tensor, valid: Tensor, piece: int = PIECE) -> Comparison:
    """Compare two logprob tensors [n, T] of one dtype where the bool tensor `valid` [n, T] is true.

    ValueError if dtypes or shapes differ, or the dtype is not a float."""
    if left.dtype != right.dtype or left.dtype not in LOGPROB or valid.dtype != "bool":
        raise ValueError(f"cannot compare {left.dtype} with {right.dtype} under a {valid.dtype} mask")
    if not left.shape == right.shape == valid.shape:
        raise ValueError(f"shapes differ: {left.shape}, {right.shape}, mask {valid.shape}")
    integer, exponent = _BITS[left.dtype]
    tokens = mismatched = nonfinite = 0
    max_abs, first = 0.0, None
    magnitudes: dict[int, int] = {}
    ranges: list[tuple[int, int]] = []  # (least, greatest) bits of each side and piece
    for start in range(0, left.size, piece):
        stop = min(start + piece, left.size)
        chosen = np.flatnonzero(valid.flat(start, stop))
        if not chosen.size:
            continue
        a = left.flat(start, stop).view(integer)[chosen]
        b = right.flat(start, stop).view(integer)[chosen]
        mask = integer(exponent)
        infinite = ((a & mask) == mask) | ((b & mask) == mask)
        differ = np.flatnonzero((a != b) | infinite)
        tokens += chosen.size
        ranges += [(int(a.min()), int(a.max())), (int(b.min()), int(b.max()))]
        if not differ.size:
            continue
        mismatched += differ.size
        nonfinite += int(np.count_nonzero(infinite))
        first = start + int(chosen[differ[0]]) if first is None else first
        finite = differ[~infinite[differ]]
        with np.errstate(over="ignore"):
            delta = np.abs(values(a[finite], left.dtype) - values(b[finite], left.dtype))
        delta = np.minimum(delta[delta > 0], np.finfo(np.float64).max)
        if delta.size:
            max_abs = max(max_abs, float(delta.max()))
            for e, count in zip(*np.unique(np.frexp(delta)[1], return_counts=True), strict=True):
                magnitudes[int(e)] = magnitudes.get(int(e), 0) + int(count)
    constant = tokens > 1 and any(
        min(low for low, _ in side) == max(high for _, high in side) for side in (ranges[::2], ranges[1::2])
    )
    return Comparison(tokens, mismatched, nonfinite, max_abs, first, constant, dict(sorted(magnitudes.items())))


def values(bits: NDArray[np.unsignedinteger], dtype: str) -> NDArray[np.float64]:
    """The float64 values of integers that hold the bits of `dtype`."""
    if dtype == "bfloat16":  # the upper half of a float32
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return bits.view(DTYPES[dtype][1]).astype(np.float64)
