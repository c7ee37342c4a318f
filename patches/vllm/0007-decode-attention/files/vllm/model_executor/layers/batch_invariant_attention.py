# SPDX-License-Identifier: Apache-2.0
"""Attention of decode steps under VLLM_BATCH_INVARIANT=1 on Hopper: FlashAttention 3's bits, without its idle card.

FlashAttention 3 may not split the keys of a request at BI=1, so a few requests use a few of the card's processors.
`torch.ops.batch_invariant.decode_attention` makes the same bits with more of them, and writes the new keys and values into
the cache on its way. It is admitted like a linear: compared with FlashAttention 3, bit for bit, when a model has been
loaded. Everything else stays with FlashAttention 3: other heads, windows, batches with a prefill.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vllm.logger import init_logger
from vllm.model_executor.layers import batch_invariant_linear
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadata

logger = init_logger(__name__)

HEAD, MOST_GROUP = 128, 8
MOST_REQUESTS = 8  # above, FlashAttention 3 fills the card by itself
MOST_SCRATCH = 1 << 28  # bytes of scores
MOST_KEYS = 1 << 17  # of a request

# Lengths that are compared: on both sides of a block of 128 keys, and of all the blocks that are under way at once.
LENGTHS = (1, 2, 16, 17, 127, 128, 129, 255, 257, 640, 1000, 1024, 1025, 1153, 2049, 4099, 8192)

_admitted: set[tuple[int, int, float]] = set()  # query heads, key heads, softmax scale
_enabled = False


def enable() -> None:
    """Load the operator, if this card has it. Harmless if done again."""
    global _enabled
    _enabled = _enabled or batch_invariant_linear.load_for_hopper("attention")


def admit_model(model: torch.nn.Module, config: VllmConfig) -> None:
    """Compare the operator with FlashAttention 3 for every kind of attention layer of a loaded model that it is for."""
    if not _graphs_are_of_decode_steps(config):
        logger.info("batch_invariant: attention of decode steps stays with FlashAttention 3 in such CUDA graphs")
        return
    layers = [m.impl for m in model.modules() if hasattr(getattr(m, "impl", None), "vllm_flash_attn_version")]
    for kind in sorted({(i.num_heads, i.num_kv_heads, i.scale) for i in layers if _is_for(i)} - _admitted):
        heads, kv_heads, scale = kind
        found, anew = batch_invariant_linear.remembered(
            f"attention-{heads}x{kv_heads}-{scale:.6g}", lambda kind=kind: {"differ": _differ(*kind)}, _compared_with()
        )
        if found["differ"] == 0:
            _admitted.add(kind)
            if anew:
                logger.info("batch_invariant: attention of %d heads on %d: decode steps are admitted", heads, kv_heads)
        else:
            logger.warning(
                "batch_invariant: attention of %d heads on %d: %d elements differ from FlashAttention 3, which serves.",
                heads,
                kv_heads,
                found["differ"],
            )


def _graphs_are_of_decode_steps(config: VllmConfig) -> bool:
    """Whether no graph that holds attention, or writes the cache, is replayed for steps of another kind.

    Graphs of mixed steps are captured with a token a request. With attention in them (FULL for mixed steps), or with the
    cache's writing and not the attention (breakable graphs), what is right for a decode step would be replayed for a
    prefill of as many tokens.
    """
    from vllm import envs
    from vllm.config import CUDAGraphMode

    mode = config.compilation_config.cudagraph_mode or CUDAGraphMode.NONE
    return mode.mixed_mode() != CUDAGraphMode.FULL and not envs.VLLM_USE_BREAKABLE_CUDAGRAPH


def _compared_with() -> list[str]:
    """What a finding holds for besides the card and our libraries: FlashAttention 3 as it is installed, and this file."""
    import vllm

    files = [Path(__file__), *sorted((Path(vllm.__file__).parent / "vllm_flash_attn").glob("_vllm_fa3_C*.so"))]
    hashes = []
    for file in files:
        with file.open("rb") as opened:
            hashes.append(hashlib.file_digest(opened, "sha256").hexdigest())
    return [vllm.__version__, *hashes]


def _is_for(impl: FlashAttentionImpl) -> bool:
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    return (
        _enabled
        and type(impl).forward is FlashAttentionImpl.forward
        and impl.attn_type == AttentionType.DECODER
        and impl.vllm_flash_attn_version == 3
        and impl.head_size == HEAD
        and impl.num_heads <= MOST_GROUP * impl.num_kv_heads
        and tuple(impl.sliding_window) == (-1, -1)
        and impl.alibi_slopes is None
        and impl.sinks is None
        and not impl.logits_soft_cap
        and impl.kv_sharing_target_layer_name is None
        and impl.kv_cache_dtype in ("auto", "bfloat16")
        and impl.dcp_world_size == 1
    )


def _serves(impl: FlashAttentionImpl, kv_cache: torch.Tensor, metadata: FlashAttentionMetadata) -> bool:
    """Whether this step is the operator's: one new token a request, all of one admitted kind.

    Asked twice a step with the same arguments: when the cache would be written, and when attention is computed.
    """
    requests, page = metadata.num_actual_tokens, kv_cache.shape[2]
    keys = metadata.block_table.shape[1] * page
    return (
        takes_step(metadata.max_query_len, requests)
        and (impl.num_heads, impl.num_kv_heads, impl.scale) in _admitted
        and _is_for(impl)
        and metadata.seq_lens.shape[0] == requests <= metadata.slot_mapping.shape[0]
        and metadata.causal is True
        and not getattr(metadata, "use_cascade", False)  # 0.33.0 has none
        and getattr(metadata, "sliding_window", None) in (None, (-1, -1))
        and kv_cache.dtype == torch.bfloat16
        and page & (page - 1) == 0
        and keys <= MOST_KEYS
        and requests * impl.num_heads * keys * 4 <= MOST_SCRATCH
    )


def takes_step(longest_query: int, requests: int) -> bool:
    """Whether the admitted layers of such a step are the operator's, whatever their sizes."""
    return bool(_admitted) and longest_query == 1 and requests <= MOST_REQUESTS


def writes_cache(impl: FlashAttentionImpl, layer: torch.nn.Module, kv_cache: torch.Tensor) -> bool:
    """Whether `decode` will write this step's keys and values, so that nobody else need."""
    from vllm.model_executor.layers.attention.attention import get_attention_context

    metadata = get_attention_context(layer.layer_name)[0]
    return metadata is not None and _serves(impl, kv_cache, metadata)


def decode(
    impl: FlashAttentionImpl,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: FlashAttentionMetadata,
    output: torch.Tensor,
) -> bool:
    """Attention of a decode step into `output` [tokens, heads, 128], with the cache written; False if it is not for us."""
    if not _serves(impl, kv_cache, metadata):
        return False
    n = metadata.num_actual_tokens
    keys, values = kv_cache.transpose(1, 2).split(HEAD, dim=-1)
    if impl.num_kv_heads == 1:  # a dimension of one may have any stride
        keys, values = (canonicalize_singleton_dim_strides(cache) for cache in (keys, values))
    torch.ops.batch_invariant.decode_attention(
        query[:n],
        key[:n],
        value[:n],
        keys,
        values,
        metadata.block_table,
        metadata.seq_lens,
        metadata.slot_mapping,
        impl.scale,
        output[:n],
    )
    return True


@torch.inference_mode()
def _differ(heads: int, kv_heads: int, scale: float) -> int:
    """Elements of outputs and caches that differ from FlashAttention 3's: as many requests as are served together, and
    one, over LENGTHS, with one request that is not there, pages of two sizes and three kinds of inputs.

    NaN where it has NaN does not count as different; want of memory is an error, not a finding.
    """
    few = MOST_REQUESTS - 1
    steps = [LENGTHS[at : at + few] + (0,) for at in range(0, len(LENGTHS), few)] + [(length,) for length in LENGTHS[::4]]
    generator = torch.Generator(device="cuda").manual_seed(heads * 1009 + kv_heads)
    kinds = [(16, "normal"), (16, "peaked"), (16, "equal"), (64, "normal")]
    return sum(
        _differ_in_step(heads, kv_heads, scale, lengths, page, kind, generator) for lengths in steps for page, kind in kinds
    )


def _differ_in_step(
    heads: int,
    kv_heads: int,
    scale: float,
    of_requests: tuple[int, ...],
    page: int,
    kind: str,
    generator: torch.Generator,
) -> int:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    requests, per_request = len(of_requests), -(-max(of_requests) // page)
    there = sum(length > 0 for length in of_requests)  # the others come last, as where a graph is larger than its step
    lengths = torch.tensor(of_requests, device="cuda", dtype=torch.int32)
    table = torch.randperm(requests * per_request, generator=generator, device="cuda").int().view(requests, per_request)
    last = lengths.long()[:there] - 1
    rows = table[torch.arange(there, device="cuda"), last // page].long(), last % page
    slots = torch.full((requests,), -1, device="cuda", dtype=torch.int64)
    slots[:there] = rows[0] * page + rows[1]
    query, cache = random(requests, heads, HEAD), random(requests * per_request, kv_heads, page, 2 * HEAD)
    if kind == "peaked":  # a few keys take all: maxima move from block to block, and sums shrink to nothing
        query *= 8.0
    if kind == "equal":
        query.zero_()
    keys, values = (canonicalize_singleton_dim_strides(c) for c in cache.transpose(1, 2).split(HEAD, dim=-1))
    key, value = random(requests, kv_heads, HEAD), random(requests, kv_heads, HEAD)
    mine, whole = torch.empty_like(query), cache.clone()
    torch.ops.batch_invariant.decode_attention(query, key, value, keys, values, table, lengths, slots, scale, mine)
    whole_keys, whole_values = (canonicalize_singleton_dim_strides(c) for c in whole.transpose(1, 2).split(HEAD, dim=-1))
    whole_keys[rows], whole_values[rows] = key[:there], value[:there]
    wrong = int((whole.view(torch.int16) != cache.view(torch.int16)).sum())
    other = torch.empty_like(query)
    flash_attn_varlen_func(
        q=query,
        k=whole_keys,
        v=whole_values,
        out=other,
        cu_seqlens_q=torch.arange(requests + 1, device="cuda", dtype=torch.int32),
        max_seqlen_q=1,
        seqused_k=lengths,
        max_seqlen_k=max(of_requests),
        softmax_scale=scale,
        causal=True,
        block_table=table,
        fa_version=3,
        num_splits=1,
    )
    differ = mine.view(torch.int16)[:there] != other.view(torch.int16)[:there]
    return wrong + int((differ & ~(mine.isnan() & other.isnan())[:there]).sum())
