# SPDX-License-Identifier: Apache-2.0
"""Attention on the CPU at VLLM_BATCH_INVARIANT=1: the paged cache of the CPU backend, read in fixed blocks of keys.

The stock backend splits the keys and tiles the queries by what else is in the batch. Here a query's sums run over the
keys in one order, whether it is decoded, prefilled, or prefilled in chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.model_executor.layers.batch_invariant_cpu import refuse
from vllm.v1.attention.backend import AttentionLayer, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)


def _split_cache(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the keys and the values, each [blocks, KV heads, block size, head size], of the cache of a layer.

    A block holds the keys of one KV head in a piece, then its values.
    """
    blocks, kv_heads, block_size, both = kv_cache.shape
    pieces = kv_cache.view(blocks, kv_heads, 2, block_size, both // 2)
    return pieces[:, :, 0], pieces[:, :, 1]


class CPUBatchInvariantAttentionBackend(CPUAttentionBackend):
    """Causal decoder attention. It goes by the stock backend's name, whose cache shape and layout it has."""

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @staticmethod
    def get_impl_cls() -> type[CPUBatchInvariantAttentionImpl]:
        return CPUBatchInvariantAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CPUBatchInvariantAttentionMetadataBuilder]:
        return CPUBatchInvariantAttentionMetadataBuilder


class CPUBatchInvariantAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds the stock metadata without a schedule: there is nothing to choose."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            refuse("attention that is not causal has no operator in the contract", "serve a causal decoder")
        return CPUAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
        )


class CPUBatchInvariantAttentionImpl(CPUAttentionBackendImpl):
    """`batch_invariant.attention` over the cache that `batch_invariant.reshape_and_cache` fills."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        unsupported = {
            f"{self.attn_type} attention": self.attn_type != AttentionType.DECODER,
            "a sliding window": self.sliding_window != -1,
            "ALiBi": self.alibi_slopes is not None,
            "a soft cap of the scores": bool(self.logits_soft_cap),
            "attention sinks": self.sinks is not None,
            "a shared KV cache": self.kv_sharing_target_layer_name is not None,
            f"a KV cache in {self.kv_cache_dtype}": self.is_fp8_kv_cache,
        }
        for what, wanted in unsupported.items():
            if wanted:
                refuse(f"{what} has no operator in the contract", "serve a dense model of the Qwen3 kind")

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of `query` [T, heads, head size] into `output`, alike in shape.

        `key` and `value` are in `kv_cache` already, by `do_kv_cache_update`.
        """
        if output_scale is not None or output_block_scale is not None:
            refuse("a quantized attention output has no operator in the contract", "serve an unquantized model")
        if attn_metadata is None:  # the warm-up has no cache yet
            return output.zero_()
        rows = attn_metadata.num_actual_tokens
        keys, values = _split_cache(kv_cache)
        attended, _ = torch.ops.batch_invariant.attention(
            query[:rows],
            keys,
            values,
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            self.scale,
        )
        output[:rows].copy_(attended)
        return output

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        torch.ops.batch_invariant.reshape_and_cache(key, value, *_split_cache(kv_cache), slot_mapping)
