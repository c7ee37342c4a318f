"""What a device needs to run the matrix: the environment of an engine's process and the arguments that are its own.

Everything else about the matrix is the same on every device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samebits.errors import SamebitsError
from samebits.recipe import arms

# What the contract has on a device.
DTYPES = {"cpu": ("bfloat16", "float32"), "cuda": ("bfloat16",)}
CACHE_BYTES = 4 << 30  # of an engine on a card: all that the largest batch of the matrix holds, with room to spare


class DeviceError(SamebitsError):
    """A device that the probes do not know."""


@dataclass(frozen=True)
class Device:
    """environment: of an engine's process, whole. arguments: of vLLM's LLM, besides those of the matrix.

    head: values of a head of the model that is asked.
    """

    name: str
    environment: dict[str, str]
    arguments: dict[str, Any]
    profile: str  # of the lock and the wheels
    head: int


def device(name: str, arm: int, base: Mapping[str, str] = os.environ) -> Device:
    """The device of an arm. DeviceError for an unknown name, ArmError for an arm that cannot run."""
    common = {
        # The engine runs in the process that asks it, so that its scheduler's steps and its operators can be seen.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if name == "cpu":
        environment = {**arms.environment(arm, base), **common}
        # The matrix says per engine whether it compiles. Inductor need not try whether the vector instructions work.
        environment.pop("TORCH_COMPILE_DISABLE", None)
        return Device(name, {**environment, "TORCHINDUCTOR_VEC_ISA_OK": "1"}, {}, "cpu", 64)
    if name == "cuda":
        said = base.get(arms.SWITCH, str(arm))
        if said != str(arm):
            raise DeviceError(f"{arms.SWITCH}={said} in the environment contradicts --arm {arm}: unset it")
        environment = {arms.RUNNER_SWITCH: "1", **base, **common, arms.SWITCH: str(arm)}
        environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # it is compiled at each start
        # The cache's size is said, so that nothing depends on what else is on the card.
        arguments = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": CACHE_BYTES}
        return Device(name, environment, arguments, "gpu", 128)
    raise DeviceError(f"--device {name}: give cpu or cuda")
