"""Megatron Core's modules of a dense decoder over the operators of `functions`.

Parameters, their attributes, names and checkpoints are the inherited ones, so that optimizer, DistributedDataParallel
and checkpoints see what they always do. What the operators cannot compute is refused by `gpt_aligned_layer_specs`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.aligned import functions
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig


class AlignedColumnParallelLinear(ColumnParallelLinear):
    """`ColumnParallelLinear` without bias on one rank."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
        return functions.linear(input, weight)


class AlignedRowParallelLinear(RowParallelLinear):
    """`RowParallelLinear` without bias on one rank."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
        return functions.linear(input, weight)


class AlignedRMSNorm(torch.nn.RMSNorm):
    """RMSNorm over the last dimension, for the layers and for the heads of query and key."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)

    def forward(self, x: Tensor) -> Tensor:
        return functions.rms_norm(x, self.weight, self.eps)


class AlignedMLP(MLP):
    """SwiGLU between two linear layers."""

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(functions.silu_and_mul(gate_up))


class AlignedCoreAttention(torch.nn.Module):
    """Causal attention from rotated query [S, B, H, D] and key to context [S, B, H * D]."""

    def __init__(self, config: TransformerConfig, **_: Any):
        super().__init__()
        # Spelt as the engine spells it: the square root's reciprocal may differ in the last bit.
        self.scale = config.kv_channels**-0.5

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        return functions.attention(query, key, value, self.scale)


class AlignedSelfAttention(SelfAttention):
    """Self-attention of right-padded sequences: QKV, q/k norm, RoPE, causal attention, output projection."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states [S, B, hidden] -> ([S, B, hidden], no bias).

        Args:
            rotary_pos_emb: the angles of Megatron's `RotaryEmbedding`, fp32 [S, 1, 1, D], each half the same.

        Raises:
            ValueError: a mask, packed sequences, an inference context or another argument that has no part in this.
        """
        given = [name for name, value in (("attention_mask", attention_mask), *others.items()) if value is not None]
        if given or rotary_pos_emb is None:
            what = f"no place for {', '.join(given)}" if given else "no RoPE angles"
            raise ValueError(
                f"the aligned attention has {what}: it is causal over right-padded batches [S, B] with RoPE; "
                "pass attention_mask=None, unpacked, or use another layer spec"
            )
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        length, batch, heads, size = query.shape
        table = functions.cos_sin_table(rotary_pos_emb[:, 0, 0, : size // 2], query.dtype)
        positions = torch.arange(length, device=query.device).repeat_interleave(batch)
        query, key = functions.rotary_embedding(
            query.reshape(-1, heads, size), key.reshape(-1, key.shape[2], size), positions, table
        )
        query, key = query.view(length, batch, heads, size), key.view(length, batch, -1, size)
        if self.checkpoint_core_attention and self.training:
            context = self._checkpointed_attention_forward(query, key, value, attention_mask)
        else:
            context = self.core_attention(query, key, value)
        return self.linear_proj(context)
