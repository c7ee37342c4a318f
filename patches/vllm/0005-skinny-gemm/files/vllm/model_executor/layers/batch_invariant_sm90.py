# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant kernels for Hopper (sm_90a), and what they are offered for. `batch_invariant_linear` admits them."""

from __future__ import annotations

import torch

from vllm.model_executor.layers import batch_invariant_linear

MOST_ROWS = 64
WIDTHS = (16, 24, 32, 40, 48, 64, 80, 96, 128)  # columns of a tile that there are kernels for

# Columns of a tile by (N, K): (to M, columns), …, measured on one NVIDIA H200 by `samebits bench gemm`. They change speed
# and never bits.
TILES: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {
    (1024, 2048): ((64, 16),),
    (1024, 3072): ((64, 16),),
    (2048, 2048): ((64, 32),),
    (2048, 6144): ((64, 32),),
    (4096, 1024): ((32, 64), (64, 48),),
    (4096, 2048): ((8, 64), (64, 48),),
    (4096, 4096): ((64, 32),),
    (4096, 12288): ((64, 32),),
    (5120, 8192): ((64, 40),),
    (5120, 25600): ((64, 40),),
    (6144, 1024): ((17, 80), (64, 64),),
    (6144, 4096): ((64, 48),),
    (10240, 5120): ((64, 80),),
    (12288, 2048): ((64, 96),),
    (24576, 4096): ((64, 96),),
    (51200, 5120): ((64, 80),),
    (151936, 1024): ((64, 96),),
    (151936, 2048): ((64, 128),),
    (151936, 4096): ((33, 64), (64, 96),),
    (151936, 5120): ((33, 64), (64, 128),),
}


def columns(n: int, k: int, m: int, processors: int) -> int:
    """The width of a tile: from the table; else the one with the least work left in the last round over the card."""
    for last, width in TILES.get((n, k), ()):
        if m <= last:
            return width
    return min(WIDTHS, key=lambda width: -(-(-(-n // width)) // processors) * (width + 2))


def _skinny(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    width = columns(weight.shape[0], weight.shape[1], x.shape[0], processors)
    return torch.ops.batch_invariant.skinny_gemm(x, weight, bias, False, width)


def enable() -> None:
    """Offer the kernels of this card, if it has any. Harmless if done again."""
    if hasattr(torch.ops.batch_invariant, "skinny_gemm") or batch_invariant_linear.load_for_hopper("sm90"):
        batch_invariant_linear.offer(batch_invariant_linear.Implementation("skinny", _skinny, MOST_ROWS, offers))


def offers(n: int, k: int) -> bool:
    """All shapes that TMA can read: rows whose length is a multiple of 16 bytes."""
    return k > 0 and k % 8 == 0
