# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3 under VLLM_BATCH_INVARIANT=1: what keeps a request's bits the same beside any neighbours.

A row's bits depend on how many keys FlashAttention 3 takes at once. It chooses that by the head, by whether a step's
longest query is one token, by how many rows that query has with its group, by whether a window is shorter than the step's
longest request, and by whether a page of the cache can be copied as a tile (`tile_size_fwd_sm90`, `use_one_mma_wg`,
`get_pagedkv_tma`, `mha_fwd`). Where the neighbours could change a choice, it is told what leaves none, or is refused.
Values of another size than the head (`flash_attn_diffkv`) are not covered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

SMALL_HEAD = 64  # up to here a short longest query takes 192 keys at once, a longer one 128
LONG_QUERY = 65  # more rows than the kernel for short queries has
# Heads, and the pages that are copied as tiles of so many keys if queries are long; other keys are taken by 128 or 96.
TILED = ((range(65, 97), 144), (range(129, 193), 112))


def longest_query(head_size: int, longest: int) -> int:
    """The longest query of a step as FlashAttention 3 is told it, so that its choice does not depend on the step."""
    return max(longest, LONG_QUERY) if head_size <= SMALL_HEAD else longest


def most_keys(longest: int, block_table: torch.Tensor, key_cache: torch.Tensor) -> int:
    """The longest request of a step as FlashAttention 3 is told it: the most that fit, the same in every step.

    It drops a window that is no shorter than the longest request, and takes other keys at once then.
    """
    return max(longest, block_table.shape[1] * key_cache.shape[1])


def check_tiles(head_size: int, page: int) -> None:
    """Refuse a cache whose pages let a neighbour's longer prefill change a request's bits.

    Raises:
        ValueError: names the sizes and the remedy.
    """
    for heads, tile in TILED:
        if head_size in heads and page % tile == 0:
            raise ValueError(
                f"VLLM_BATCH_INVARIANT=1: with heads of {head_size} and blocks of {page} tokens FlashAttention 3 takes {tile} "
                "or another number of keys at once, depending on the longest query of a step. Remedy: --block-size 16, or "
                f"any that {tile} does not divide."
            )


def schedules(builder: FlashAttentionMetadataBuilder, longest: int, requests: int) -> bool:
    """Whether a step's schedule is made once for all layers. With one split it changes no bits, only launches.

    Not where a layer is not told what the schedule is (small heads, windows), nor for steps that another operator takes.
    """
    from vllm.model_executor.layers import batch_invariant_attention

    return (
        builder.headdim > SMALL_HEAD
        and builder.aot_sliding_window == (-1, -1)
        and not batch_invariant_attention.takes_step(longest, requests)
    )
