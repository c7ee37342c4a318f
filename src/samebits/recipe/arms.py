"""The two arms: one switch in the environment, nothing else.

``VLLM_BATCH_INVARIANT`` chooses vLLM's operators and the trainer's layer spec. ``--arm`` sets it; the rest of the
environment is the same for both.
"""

import importlib.util
import pathlib
from collections.abc import Mapping

from samebits.errors import SamebitsError

SWITCH = "VLLM_BATCH_INVARIANT"

# What each arm claims: that everything was seen, or that nothing differed.
CLAIM = {0: "observe", 1: "zero"}

# What every device needs, in either arm. Values that a user has set already stay.
DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    # Megatron Core adds to its version the commit of whatever repository it finds itself in, here the one around .venv.
    "NO_VCS_VERSION": "1",
    # How long Ray's own processes may take to start; on a machine that is busy its half minute is too short.
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
}

CPU_DEFAULTS = {
    **DEFAULTS,
    "VERL_PLATFORM": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "2",
    # One function of verl's entropy is compiled at its first call, half a minute of compiler for a sum.
    "TORCH_COMPILE_DISABLE": "1",
    # How long a weight sync may be silent before the run ends with an error.
    "VERL_WEIGHT_SYNC_TIMEOUT_S": "45",
}

CUDA_DEFAULTS = {
    **DEFAULTS,
    # One engine serves both arms: verl's own would need a bridge, and another one would be another recipe.
    "VERL_ENGINE_VENDOR": "aligned",
    "OMP_NUM_THREADS": "8",
    "VERL_WEIGHT_SYNC_TIMEOUT_S": "120",
    # It is compiled at each start.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}

# What the CPU is, whatever a user has set. The lock's torch is a CUDA build, and Megatron asks it for a device. The
# list is not empty because Ray refuses a logical GPU under an empty one; no device has the number -1.
CPU_FIXED = {"CUDA_VISIBLE_DEVICES": "-1"}

# vLLM's switch between its two model runners. Unset, the choice depends on whether Triton finds a driver.
RUNNER_SWITCH = "VLLM_USE_V2_MODEL_RUNNER"


# Which runner a device has where nobody says another.
RUNNERS = {"cpu": "0", "cuda": "1"}


# What arm 1 runs on, by the package that brings it. Both packages are too large to import for a question.
OPERATORS = ("vllm", "batch_invariant_cpu.so")
CUDA_OPERATORS = ("vllm", "batch_invariant_rows.so")
ALIGNED_SPEC = ("megatron.core", "models/gpt/gpt_aligned_layer_specs.py")


class ArmError(SamebitsError):
    """An arm that cannot run here, or an environment that says something else."""


def environment(arm: int, base: Mapping[str, str], device: str = "cpu") -> dict[str, str]:
    """The environment of a run of ``arm`` on ``device``, cpu or cuda, from the caller's.

    Raises:
        ArmError: a `VLLM_BATCH_INVARIANT` that contradicts the arm; vLLM's model runner V2 on the CPU, where it does
            not run; a `VERL_PLATFORM` of another device family.
    """
    if arm not in CLAIM:
        raise ArmError(f"--arm {arm}: there are two arms, 0 (vLLM and Megatron as they are) and 1 (batch invariant)")
    said = base.get(SWITCH, str(arm))
    if said != str(arm):
        raise ArmError(f"{SWITCH}={said} in the environment contradicts --arm {arm}: unset it, the arm sets it")
    family = "cpu" if device == "cpu" else "nvidia"
    if base.get("VERL_PLATFORM", family) != family:
        raise ArmError(
            f"VERL_PLATFORM={base['VERL_PLATFORM']} in the environment contradicts --device {device}: bits are those "
            "of a device family, so trainer and rollout are of one; unset it"
        )
    if device == "cuda":
        return {RUNNER_SWITCH: RUNNERS[device], **CUDA_DEFAULTS, **base, SWITCH: str(arm)}
    if base.get(RUNNER_SWITCH, "0") != "0":
        raise ArmError(
            f"{RUNNER_SWITCH}={base[RUNNER_SWITCH]} in the environment: vLLM's model runner V2 needs Triton, which has "
            "no driver on the CPU; unset it, or set it to 0"
        )
    return {**CPU_DEFAULTS, **base, **CPU_FIXED, RUNNER_SWITCH: "0", SWITCH: str(arm)}


def runner(environment: Mapping[str, str]) -> str:
    """vLLM's model runner in an environment that `environment` made."""
    return "v2" if int(environment[RUNNER_SWITCH]) else "v1"


def contract(arm: int, device: str = "cpu") -> str | None:
    """The name of the numerical contract that both sides of an arm compute by; None at arm 0, which has none.

    Raises:
        ArmError: arm 1 where the operators or the trainer's aligned layer spec are not installed.
    """
    if arm == 0:
        return None
    import torch

    library = _installed(*(CUDA_OPERATORS if device == "cuda" else OPERATORS))
    _installed(*ALIGNED_SPEC)
    if not hasattr(torch.ops.batch_invariant, "contract"):
        torch.ops.load_library(str(library))
    return str(torch.ops.batch_invariant.contract())


def loaded_contract() -> str | None:
    """The name of the numerical contract whose operators this process has loaded; None if it has loaded none."""
    import torch

    known = getattr(torch.ops.batch_invariant, "contract", None)
    return None if known is None else str(known())


def _installed(package: str, file: str) -> pathlib.Path:
    """A file of an installed package, found without importing it."""
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        found = None
    for folder in (found and found.submodule_search_locations) or []:
        if (path := pathlib.Path(folder) / file).is_file():
            return path
    raise ArmError(
        f"--arm 1: the {package} installed here has no {file}: it is not our patched wheel, or one from before the "
        "batch-invariant operators; run `make env`, or --arm 0"
    )
