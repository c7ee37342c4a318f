"""The product that batch-invariant code is usually given: one fixed tile of 128 x 128 x 64 for every shape, in Triton.

The published idea (Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference", 2025), written anew: a program a
processor, which takes tiles in turn; K in order. A bench times it beside ours; nothing serves by it.
"""

from typing import Any

import triton
import triton.language as tl

ROWS, COLUMNS, DEPTH = 128, 128, 64


@triton.jit
def _tiles(
    x,
    weight,
    out,
    m,
    n,
    k,
    programs: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
):
    across = tl.cdiv(n, columns)
    for tile in range(tl.program_id(0), tl.cdiv(m, rows) * across, programs):
        at_row = tile // across * rows + tl.arange(0, rows)
        at_column = tile % across * columns + tl.arange(0, columns)
        total = tl.zeros((rows, columns), tl.float32)
        for start in range(0, k, depth):
            at = start + tl.arange(0, depth)
            a = tl.load(x + at_row[:, None] * k + at, (at_row[:, None] < m) & (at < k), 0.0)
            b = tl.load(weight + at_column * k + at[:, None], (at_column < n) & (at[:, None] < k), 0.0)
            total = tl.dot(a, b, total)
        where = out + at_row[:, None].to(tl.int64) * n + at_column
        tl.store(where, total.to(out.dtype.element_ty), (at_row[:, None] < m) & (at_column < n))


def product(x: Any, weight: Any, programs: int) -> Any:
    """x [M, K] times weight [N, K] transposed, contiguous, in their dtype. programs: processors of the card."""
    (m, k), n = x.shape, weight.shape[0]
    out = x.new_empty((m, n))
    _tiles[(programs,)](x, weight, out, m, n, k, programs, ROWS, COLUMNS, DEPTH)
    return out
