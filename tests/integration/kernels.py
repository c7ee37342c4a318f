"""Which ATen operators return floating-point tensors, and inside of which module they run."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode


class Kernels(TorchDispatchMode):
    """Notes (operator, class of the innermost module that runs; "" outside of any) of a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []
        self._modules: list[str] = []

    def __enter__(self) -> Any:
        self._hooks = [
            register_module_forward_pre_hook(lambda module, _: self._modules.append(type(module).__name__)),
            register_module_forward_hook(lambda *_: self._leave(), always_call=True),
        ]
        return super().__enter__()

    def _leave(self) -> None:
        self._modules.pop()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        tensors = out if isinstance(out, tuple | list) else [out]
        if any(isinstance(t, torch.Tensor) and t.is_floating_point() for t in tensors):
            self.seen.append((str(func.overloadpacket), self._modules[-1] if self._modules else ""))
        return out
