"""The host processor as a platform: one device, no device memory, gloo between processes.

Chosen by ``VERL_PLATFORM=cpu`` and never detected. Memory queries answer for the host; calls that only
make sense for an accelerator (streams, caches, IPC handles) do nothing.
"""

import contextlib
import os
import types
from collections.abc import Iterator
from typing import Any, Optional

import psutil
import torch

from .platform_base import PlatformBase
from .platform_manager import PlatformRegistry

_HOST = torch.device("cpu")


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _zero(*_args: Any, **_kwargs: Any) -> int:
    return 0


def _free_and_total(*_args: Any) -> tuple[int, int]:
    """Free and total host memory in bytes, in the order of ``torch.cuda.mem_get_info``."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _device_module() -> types.ModuleType:
    """What callers of ``get_torch_device()`` expect of ``torch.cuda``, answered for the host.

    ``is_available`` is False and ``device_count`` 0, because callers read both as "there is an accelerator"
    and then touch its memory, its streams or its random-number tracker.
    """
    module = types.ModuleType("verl.plugin.platform.host_device")
    answers: dict[str, Any] = {
        "is_available": lambda: False,
        "device_count": _zero,
        "current_device": lambda: _HOST,
        "get_device_name": lambda *_: "cpu",
        "mem_get_info": _free_and_total,
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    }
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        answers[name] = _zero
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_device", "synchronize"):
        answers[name] = _nothing
    for name, answer in answers.items():
        setattr(module, name, answer)
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """The CPU backend; see the module docstring."""

    _module = _device_module()

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> types.ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        # Detection asks every platform in turn. A job that did not name the CPU must not land on it.
        return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"

    def current_device(self) -> torch.device:
        # A device, not an index: callers pass it to Tensor.to(), where an index would mean an accelerator.
        return _HOST

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return None

    def synchronize(self, device_index: Optional[int] = None) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def get_device_capability(self, device_index: int = 0) -> tuple[Optional[int], Optional[int]]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        return None

    def profiler_stop(self) -> None:
        return None

    def ray_resource_name(self) -> str:
        # Resource pools count "GPU" (or "NPU") bundles; on the CPU it is a logical slot given to ray.init.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None
