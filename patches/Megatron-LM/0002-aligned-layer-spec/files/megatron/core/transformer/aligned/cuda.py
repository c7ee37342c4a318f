"""The contract on CUDA as a trainer calls it: products by their proven bits, attention by the engine's FlashAttention 3.

Few things are chosen here, and none by a model. bf16 alone; heads of 128.
"""

from __future__ import annotations

import pathlib

import torch
from torch import Tensor

OPERATORS = ("contract", "cublaslt_gemm", "reference_gemm", "rms_norm", "rotary_embedding", "selected_log_softmax", "silu_and_mul")
FLASH_ATTENTION = pathlib.PurePath("vllm_flash_attn", "_vllm_fa3_C.abi3.so")  # in vLLM's package

FEW_ROWS = 64  # a plain kernel is fast enough up to here
COMPARED = 96  # rows of a product: the first, the last, and some in between

_proven: dict[tuple[int, int, int], bool] = {}


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] and weight [N, K], bf16 -> [..., N]: one chain of k16 steps a value.

    cuBLASLt without split-K where its bits were seen to be the reference's for such a shape, the reference elsewhere.
    """
    rows = x.reshape(-1, x.shape[-1])
    operators = torch.ops.batch_invariant
    if rows.shape[0] > FEW_ROWS and proven(weight.shape[0], weight.shape[1], rows.shape[0], weight.device):
        out = operators.cublaslt_gemm(rows, weight)
    else:
        out = operators.reference_gemm(rows, weight)
    return out.view(*x.shape[:-1], -1)


def proven(n: int, k: int, m: int, device: torch.device) -> bool:
    """Whether cuBLASLt gives the reference's bits for weights [n, k] and all rows up to the power of two from m on.

    Tried once a range, at both its ends, in the middle and at m, with inputs in which the order of a sum shows.
    """
    last = 1 << (m - 1).bit_length()
    key = (n, k, last)
    if key not in _proven:
        _proven[key] = all(_equal(n, k, sorted({last // 2 + 1, 3 * last // 4, m, last}), kind, device) for kind in (0, 1))
    return _proven[key]


@torch.no_grad()
def _equal(n: int, k: int, sizes: list[int], cancelling: int, device: torch.device) -> bool:
    generator = torch.Generator(device=device).manual_seed(n * 1_000_003 + k)
    weight = torch.randn(n, k, generator=generator, device=device, dtype=torch.bfloat16)
    x = torch.randn(sizes[-1], k, generator=generator, device=device, dtype=torch.bfloat16)
    if cancelling:  # large terms that cancel, so that the order shows in the leading bits
        weight[:, k // 2 : k // 2 * 2] = weight[:, : k // 2]
        x[:, k // 2 : k // 2 * 2] = -x[:, : k // 2] * (1 + 2.0**-7)
    picked = {row for size in sizes for row in (0, size // 2, size - 2, size - 1)}
    rows = torch.tensor(sorted(picked | set(range(0, sizes[-1], max(sizes[-1] // COMPARED, 1)))), device=device)
    reference = torch.ops.batch_invariant.reference_gemm(x[rows], weight)
    for size in sizes:
        inside = int(torch.searchsorted(rows, size))
        try:
            out = torch.ops.batch_invariant.cublaslt_gemm(x[:size], weight)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # it has no kernel that splits no K
            return False
        if not torch.equal(out[rows[:inside]].view(torch.int16), reference[:inside].view(torch.int16)):
            return False
    return True


def attention(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention of packed sequences, as the engine calls FlashAttention 3 for a prefill.

    Args:
        query: [T, H, 128]. key, value: [T, KVH, 128]. starts: int32 [sequences + 1], where each begins, and T.

    Returns:
        out [T, H, 128], and fp32 LSE [T, H], natural logarithm.
    """
    unset = None
    out, lse, *_ = torch.ops._vllm_fa3_C.fwd(
        query, key, value,
        unset, unset, unset, unset,  # new keys and values, a second query, the output
        starts, starts, unset, unset, unset,
        max(longest, 2), max(longest, 2),  # for a longest query of one it takes other blocks of keys
        unset, unset, unset,  # no pages
        unset, unset, unset,  # no rotation
        unset, unset, unset,  # no scales of quantised tensors
        scale, True, -1, -1, 0.0, True,
        unset, 1, unset, 0, unset,  # no schedule made ahead, keys never split
        1, 0, unset,  # one rank
    )  # fmt: skip
    return out, lse.t()
