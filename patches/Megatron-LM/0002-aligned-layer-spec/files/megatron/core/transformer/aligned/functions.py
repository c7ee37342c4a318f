"""Differentiable calls of the batch-invariant operators.

A forward is one call of `torch.ops.batch_invariant`, the operators that the serving engine calls, so its bits are the
engine's, whatever else is in the batch. A backward is a closed form or one of torch's own; of its bits nothing is
promised. Nothing here knows a model. A device is asked for where one differs: `cuda` has what is called otherwise there.
"""

from __future__ import annotations

import importlib.util
import pathlib
from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.aligned import cuda

OPERATORS = (
    "attention",
    "contract",
    "linear",
    "rms_norm",
    "rotary_embedding",
    "selected_log_softmax",
    "silu_and_mul",
)


def load_operators() -> str:
    """Loads the operators from vLLM's package, which is not imported, unless they are there; returns their contract.

    Raises:
        RuntimeError: there is no vLLM, or one without the operators.
    """
    operators = torch.ops.batch_invariant
    if not hasattr(operators, "contract"):
        spec = importlib.util.find_spec("vllm")
        folders = list(spec.submodule_search_locations or ()) if spec else []
        found = [sorted(pathlib.Path(folder).glob("batch_invariant_*.so")) for folder in folders]
        found += [[pathlib.Path(folder) / cuda.FLASH_ATTENTION] for folder in folders]
        for library in (path for paths in found for path in paths if path.is_file()):
            torch.ops.load_library(str(library))
    on_cuda = hasattr(operators, "cublaslt_gemm")
    missing = [name for name in (cuda.OPERATORS if on_cuda else OPERATORS) if not hasattr(operators, name)]
    if on_cuda and not hasattr(torch.ops._vllm_fa3_C, "fwd"):
        missing.append("FlashAttention 3")
    if missing:
        raise RuntimeError(
            f"the aligned layer spec needs torch.ops.batch_invariant.{', '.join(missing)}, which no installed vLLM "
            "brings: install a vLLM that holds batch_invariant_*.so in its package, or use another layer spec"
        )
    return str(operators.contract())


def _product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which the backward multiplies tensors like this one.

    Their own, but for one case: on a CPU for which oneDNN has no bf16 product torch multiplies bf16 at a fiftieth of the
    speed of fp32 (see the patch's message), so it is fp32 there.
    """
    slow = tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu"
    return torch.float32 if slow and not torch.ops.mkldnn._is_mkldnn_bf16_supported() else tensor.dtype


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.is_cuda:
            return cuda.linear(x, weight)
        return torch.ops.batch_invariant.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dtype = _product_dtype(x)
        rows = grad.reshape(-1, grad.shape[-1]).to(dtype)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = rows.matmul(weight.to(dtype)).to(x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = rows.t().matmul(x.reshape(-1, x.shape[-1]).to(dtype)).to(weight.dtype)
        return grad_x, grad_weight


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] and weight [N, K] of one dtype (bf16 or fp32) -> [..., N]."""
    return _Linear.apply(x, weight)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return torch.ops.batch_invariant.rms_norm(x if x.dim() == 2 else x.contiguous(), weight, epsilon)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        wide, grad = x.float(), grad.float()
        scale = wide.square().mean(-1, keepdim=True).add_(ctx.epsilon).rsqrt_()
        normed = wide * scale
        grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        gained = grad * weight.float()
        along = (gained * normed).mean(-1, keepdim=True)
        grad_x = gained.sub_(normed * along).mul_(scale).to(x.dtype)
        return grad_x, grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Each row of x [..., D] over its root mean square, times weight [D]."""
    return _RMSNorm.apply(x, weight, epsilon)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(positions, cos_sin)
        return _rotate(positions, query, key, cos_sin)

    @staticmethod
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> tuple[Tensor, Tensor, None, None]:
        positions, cos_sin = ctx.saved_tensors
        # A rotation's transpose is the rotation by the opposite angle.
        cos, sin = cos_sin.chunk(2, dim=-1)
        back = torch.cat((cos, -sin), dim=-1)
        return *_rotate(positions, grad_query.contiguous(), grad_key.contiguous(), back), None, None


def _rotate(positions: Tensor, query: Tensor, key: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """query [T, H, D] and key [T, KVH, D] rotated. On CUDA the operator takes a token's heads as one row."""
    rows = [t.flatten(1) if t.is_cuda else t for t in (query, key)]
    rotated = torch.ops.batch_invariant.rotary_embedding(positions, *rows, query.shape[-1], cos_sin)
    return rotated[0].view(query.shape), rotated[1].view(key.shape)


def rotary_embedding(query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates query [T, H, D] and key [T, KVH, D] by the angles of positions [T].

    Args:
        cos_sin: [P, D], cosines beside sines of P positions; `cos_sin_table` makes it.
    """
    return _Rotary.apply(query, key, positions, cos_sin)


def cos_sin_table(angles: Tensor, dtype: torch.dtype) -> Tensor:
    """Cosines beside sines [P, D] of fp32 angles [P, D/2], computed in fp32 and rounded to the model's dtype.

    The engine rounds its table to the dtype of its model, so the rounding is part of the arithmetic.
    """
    angles = angles.contiguous()
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.ops.batch_invariant.silu_and_mul(x if x.dim() == 2 else x.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.float().chunk(2, dim=-1)
        grad = grad.float()
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        # The derivative of silu: sigmoid + silu * (1 - sigmoid).
        slope = torch.addcmul(sigmoid + silu, silu, sigmoid, value=-1)
        out = torch.empty_like(x)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        grad_gate.copy_(slope.mul_(up).mul_(grad))
        grad_up.copy_(silu.mul_(grad))
        return out


def silu_and_mul(x: Tensor) -> Tensor:
    """[..., 2 D], gate beside up, -> silu(gate) * up [..., D]."""
    return _SiluAndMul.apply(x)


def _attention_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of causal attention by torch's flash backward, chosen by the tensors' device.

    Args:
        grad, query, out: [B, S, H, D]. key, value: [B, S, KVH, D]. lse: fp32 [B, S, H], natural logarithm.

    Raises:
        NotImplementedError: a device for which torch's backward has not been tried.
    """
    length = query.shape[1]
    lse = lse.transpose(1, 2)
    if query.device.type == "cuda":
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
        return torch.ops.aten._flash_attention_backward(
            grad, query, key, value, out, lse.contiguous(), None, None, length, length, 0.0, True, no_dropout,
            no_dropout, scale=scale,
        )  # fmt: skip
    if query.device.type == "cpu":
        dtype, groups = _product_dtype(query), key.shape[2]
        repeated = [t.repeat_interleave(query.shape[2] // groups, dim=2) for t in (key, value)]
        heads = [t.to(dtype).transpose(1, 2) for t in (grad, query, *repeated, out)]
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*heads, lse, 0.0, True, scale=scale)
        grad_query, grad_key, grad_value = (t.transpose(1, 2) for t in grads)
        shared = [t.unflatten(2, (groups, -1)).sum(3) for t in (grad_key, grad_value)]
        return grad_query.to(query.dtype), shared[0].to(key.dtype), shared[1].to(value.dtype)
    raise NotImplementedError(f"attention has a backward on cpu and cuda, none on {query.device.type}: add it here")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        length, batch, heads, size = query.shape
        if query.is_cuda:
            starts = torch.arange(0, length * batch + 1, length, dtype=torch.int32, device=query.device)
            packed = [t.transpose(0, 1).reshape(-1, *t.shape[2:]) for t in (query, key, value)]
            out, lse = cuda.attention(*packed, starts, length, scale)
            return _Attention.saved(ctx, (query, key, value), out, lse, scale)
        # The keys of a sequence are a cache of blocks of one token; they stay where they are, and a table finds them.
        token = torch.arange(length * batch, dtype=torch.int32, device=query.device)
        table = token.view(length, batch).t().contiguous()
        starts = torch.arange(0, length * batch + 1, length, dtype=torch.int32, device=query.device)
        lengths = torch.full((batch,), length, dtype=torch.int32, device=query.device)
        rows = query.transpose(0, 1).reshape(-1, heads, size)
        caches = [t.reshape(-1, 1, *t.shape[2:]).transpose(1, 2) for t in (key, value)]
        out, lse = torch.ops.batch_invariant.attention(rows, *caches, table, starts, lengths, scale)
        return _Attention.saved(ctx, (query, key, value), out, lse, scale)

    @staticmethod
    def saved(ctx: Any, inputs: tuple[Tensor, ...], out: Tensor, lse: Tensor, scale: float) -> Tensor:
        """What the backward needs is kept; out [B * S, H, D] becomes [S, B, H * D]."""
        length, batch, heads, size = inputs[0].shape
        out = out.view(batch, length, heads, size)
        ctx.save_for_backward(*inputs, out, lse.view(batch, length, heads))
        ctx.scale = scale
        return out.transpose(0, 1).reshape(length, batch, heads * size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out, lse = ctx.saved_tensors
        grad = grad.reshape(query.shape)
        batch_first = [t.transpose(0, 1) for t in (grad, query, key, value)]
        grads = _attention_gradients(*batch_first, out, lse, ctx.scale)
        return grads[0].transpose(0, 1), grads[1].transpose(0, 1), grads[2].transpose(0, 1), None


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of each sequence of a batch over itself.

    Args:
        query: [S, B, H, D]. key, value: [S, B, KVH, D], KVH a divisor of H.

    Returns:
        [S, B, H * D]. What stands behind the end of a sequence that is padded on the right has no part in what is before.
    """
    return _Attention.apply(query, key, value, scale)


class _SelectedLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor) -> Tensor:
        selected, lse = torch.ops.batch_invariant.selected_log_softmax(logits, index)
        ctx.save_for_backward(logits, index, lse)
        return selected

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, index, lse = ctx.saved_tensors
        grad = grad.float().unsqueeze(-1)
        out = (logits.float() - lse.unsqueeze(-1)).exp_().mul_(-grad)
        out.scatter_add_(-1, index.unsqueeze(-1), grad)
        return out.to(logits.dtype), None


def selected_log_prob(logits: Tensor, index: Tensor) -> Tensor:
    """The fp32 log-softmax [...] of logits [..., V] at index [...], int64."""
    flat = _SelectedLogProb.apply(logits.reshape(-1, logits.shape[-1]), index.reshape(-1))
    return flat.view(index.shape)
