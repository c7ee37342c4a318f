"""The two arms: one switch in the environment, nothing else.

``VLLM_BATCH_INVARIANT`` chooses vLLM's operators and the trainer's layer spec. ``--arm`` sets it; the rest of the
environment is the same for both.
"""

from collections.abc import Mapping

from samebits.errors import SamebitsError

SWITCH = "VLLM_BATCH_INVARIANT"

# What each arm claims: that everything was seen, or that nothing differed.
CLAIM = {0: "observe", 1: "zero"}

# What the CPU needs, in either arm. Values that a user has set already stay.
CPU_DEFAULTS = {
    "VERL_PLATFORM": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "2",
    "HF_HUB_OFFLINE": "1",
    # One function of verl's entropy is compiled at its first call, half a minute of compiler for a sum.
    "TORCH_COMPILE_DISABLE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
}


class ArmError(SamebitsError):
    """An arm that cannot run here, or an environment that says something else."""


def environment(arm: int, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a run of ``arm`` on the CPU, from the caller's.

    Raises:
        ArmError: arm 1, until its operators exist; or a `VLLM_BATCH_INVARIANT` that contradicts the arm.
    """
    if arm not in CLAIM:
        raise ArmError(f"--arm {arm}: there are two arms, 0 (vLLM and Megatron as they are) and 1 (batch invariant)")
    if arm == 1:
        raise ArmError(
            "--arm 1: the batch-invariant operators for the CPU are not built yet, neither in vLLM's wheel nor in "
            "Megatron Core's layer spec; run --arm 0"
        )
    said = base.get(SWITCH, str(arm))
    if said != str(arm):
        raise ArmError(f"{SWITCH}={said} in the environment contradicts --arm {arm}: unset it, the arm sets it")
    return {**CPU_DEFAULTS, **base, SWITCH: str(arm)}
