"""A layout of the weights in which torch's backward of a linear layer is not slow on a CPU without bf16 instructions.

There torch multiplies bf16 matrices by loops of its own. With a row-major weight on the right, which is the gradient
of a layer's input, they take some fifteen times as long as with a column-major one.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks

Saved = tuple[torch.Tensor, bool]


def _pack(tensor: torch.Tensor) -> Saved:
    weight = isinstance(tensor, torch.nn.Parameter) and tensor.dim() == 2 and tensor.dtype == torch.bfloat16
    return tensor.detach(), weight


def _unpack(saved: Saved) -> torch.Tensor:
    tensor, weight = saved
    return tensor.t().contiguous().t() if weight else tensor


@contextmanager
def column_major_weights() -> Iterator[None]:
    """Weights that autograd saves meanwhile come back with the same values, column-major; the forward is untouched.

    With bf16 instructions nothing is done.
    """
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        yield
        return
    with saved_tensors_hooks(_pack, _unpack):
        yield
