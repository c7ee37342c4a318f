# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3 under VLLM_BATCH_INVARIANT=1: what keeps a request's bits the same beside any neighbours.

A row's bits depend on how many keys FlashAttention 3 takes at once, and it chooses that by the head, by whether a step's
longest query is one token, by how many rows that query has with its group, and by whether a page of the cache can be
copied as a tile (`tile_size_fwd_sm90`, `use_one_mma_wg`, `get_pagedkv_tma`). For heads of 65 values and more nothing
changes with the neighbours, except where noted here; for smaller heads one choice is taken for good.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

SMALL_HEAD = 64  # up to here a short longest query takes 192 keys at once, a longer one 128
LONG_QUERY = 65  # more rows than the kernel for short queries has
TILED_HEADS, TILED_PAGE = range(65, 97), 144  # such pages are copied as tiles of 144 keys if queries are long, else 128


def longest_query(head_size: int, longest: int) -> int:
    """The longest query of a step as FlashAttention 3 is told it, so that its choice does not depend on the step."""
    return max(longest, LONG_QUERY) if head_size <= SMALL_HEAD else longest


def check_tiles(head_size: int, page: int) -> None:
    """Refuse a cache whose pages let a neighbour's longer prefill change a request's bits.

    Raises:
        ValueError: names the sizes and the remedy.
    """
    if head_size in TILED_HEADS and page % TILED_PAGE == 0:
        raise ValueError(
            f"VLLM_BATCH_INVARIANT=1: with heads of {head_size} and blocks of {page} tokens FlashAttention 3 takes 128 or "
            f"{TILED_PAGE} keys at once, depending on the longest query of a step. Remedy: --block-size 16, or any that "
            f"{TILED_PAGE} does not divide."
        )


def schedules(builder: FlashAttentionMetadataBuilder, longest: int, requests: int) -> bool:
    """Whether a step's schedule is made once for all layers. With one split it changes no bits, only launches.

    Not for small heads, whose longest query is not the step's, nor for steps that another operator takes.
    """
    from vllm.model_executor.layers import batch_invariant_attention

    return (
        builder.aot_schedule
        and builder.headdim > SMALL_HEAD
        and not batch_invariant_attention.takes_step(longest, requests)
    )
