# SPDX-License-Identifier: Apache-2.0
"""Row-local operators under VLLM_BATCH_INVARIANT=1 on Hopper: norms, rotary embedding, SiLU-and-mul, log-softmax.

Each is opaque to torch.compile, so that an eager engine, a compiled one and a trainer that calls the same operators have
the same bits. What they do not take (another dtype, a head that is not of 128) stays with vLLM's own layers.
"""

from __future__ import annotations

import torch

from vllm.model_executor.layers import batch_invariant_linear

HEAD = 128

_enabled = False


def enable() -> None:
    """Load the operators, if this card has any, and show their shapes to torch.compile. Harmless if done again."""
    global _enabled
    if _enabled or not batch_invariant_linear.load_for_hopper("rows"):
        return
    _enabled = True

    def like(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(x.shape)

    @torch.library.register_fake("batch_invariant::rms_norm")
    def _(x, weight, epsilon):
        return like(x)

    @torch.library.register_fake("batch_invariant::add_rms_norm")
    def _(x, residual, weight, epsilon):
        return like(x), like(x)

    @torch.library.register_fake("batch_invariant::rotary_embedding")
    def _(positions, query, key, head_size, cos_sin_cache):
        return like(query), like(key)

    @torch.library.register_fake("batch_invariant::norm_rotary_embedding")
    def _(positions, query, key, query_weight, key_weight, cos_sin_cache, epsilon):
        return like(query), like(key)

    @torch.library.register_fake("batch_invariant::silu_and_mul")
    def _(x):
        return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))

    @torch.library.register_fake("batch_invariant::log_softmax")
    def _(logits):
        return logits.new_empty(logits.shape, dtype=torch.float32)


def serves(x: torch.Tensor) -> bool:
    """Whether the operators take `x`."""
    return _enabled and x.is_cuda and x.dtype == torch.bfloat16


def serves_logits(logits: torch.Tensor) -> bool:
    """Whether log_softmax takes them: two dimensions, rows that begin at multiples of 16 bytes."""
    return (
        _enabled
        and logits.is_cuda
        and logits.dtype in (torch.bfloat16, torch.float32)
        and logits.dim() == 2
        and logits.stride(1) == 1
        and logits.stride(0) * logits.element_size() % 16 == 0
    )


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The logprobs [rows, wanted] in fp32 of `token_ids` [rows, wanted]: one pass over the logits for a single one."""
    token_ids = token_ids.to(torch.int64)
    if token_ids.shape[1] == 1:
        chosen, _ = torch.ops.batch_invariant.selected_log_softmax(logits, token_ids[:, 0].contiguous())
        return chosen[:, None]
    return torch.ops.batch_invariant.log_softmax(logits).gather(1, token_ids)


def serves_norm(layer: torch.nn.Module, x: torch.Tensor) -> bool:
    """Whether `layer`, an RMSNorm, is the whole-row weighted norm of the contract."""
    return serves(x) and layer.has_weight and layer.variance_size_override is None and x.shape[-1] % 8 == 0


def rms_norm(layer: torch.nn.Module, x: torch.Tensor, residual: torch.Tensor | None):
    """What RMSNorm returns: the norm, or the norm of x + residual and that sum."""
    if residual is None:
        return torch.ops.batch_invariant.rms_norm(x, layer.weight, layer.variance_epsilon)
    return torch.ops.batch_invariant.add_rms_norm(x, residual, layer.weight, layer.variance_epsilon)


def serves_rotary(layer: torch.nn.Module, query: torch.Tensor) -> bool:
    """Whether `layer` turns whole heads of 128 in halves, of two-dimensional queries, by a table in a dtype we read."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    return (
        serves(query)
        and query.dim() == 2
        and type(layer).forward_native is RotaryEmbedding.forward_native
        and layer.is_neox_style
        and layer.head_size == layer.rotary_dim == HEAD
        and layer.cos_sin_cache.dtype in (torch.bfloat16, torch.float32)
    )


def serves_attention(layer: torch.nn.Module, hidden_states: torch.Tensor) -> bool:
    """Whether the norms of queries and keys and the rotary embedding of `layer` are one operator."""
    norms = (layer.q_norm, layer.k_norm)
    return (
        layer.head_dim == HEAD
        and all(serves_norm(norm, hidden_states) for norm in norms)
        and layer.q_norm.variance_epsilon == layer.k_norm.variance_epsilon
        and serves_rotary(layer.rotary_emb, hidden_states)
    )


def attention(layer: torch.nn.Module, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """Attention of a Qwen3 layer: the projection, one operator for norms and rotary embedding, attention, projection."""
    both, _ = layer.qkv_proj(hidden_states)
    end = layer.q_size + layer.kv_size
    query, key = torch.ops.batch_invariant.norm_rotary_embedding(
        positions,
        both[:, : layer.q_size],
        both[:, layer.q_size : end],
        layer.q_norm.weight,
        layer.k_norm.weight,
        layer.rotary_emb.cos_sin_cache,
        layer.q_norm.variance_epsilon,
    )
    return layer.o_proj(layer.attn(query, key, both[:, end:]))[0]
