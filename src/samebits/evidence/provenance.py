"""The execution identity: which sources, wheels, versions, processor and switches a run used.

`collect` is called once, before the trainer starts; its result is RUN/execution.json, and every capsule of the
run carries the same. It holds no path, no host name and no secret, so that it can be published.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samebits.errors import SamebitsError

from . import schema, strictjson

SCHEMA = "samebits.execution/1"

PACKAGES = [
    "torch",
    "vllm",
    "verl",
    "megatron-core",
    "transformer-engine",
    "ray",
    "tensordict",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "triton",
]

# Environment variables that may choose the arithmetic, or the order in which it is done.
SWITCHES = [
    "VLLM_BATCH_INVARIANT",
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_ATTENTION_BACKEND",
    "VLLM_CPU_SGL_KERNEL",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_WORKER_MULTIPROC_METHOD",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "MKL_CBWR",
    "KMP_BLOCKTIME",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    "ATEN_CPU_CAPABILITY",
    "TORCH_COMPILE_DISABLE",
    "TORCHINDUCTOR_FREEZING",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "NVTE_BACKWARD_OVERRIDE",
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "NVTE_UNFUSED_ATTN",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_VISIBLE_DEVICES",
    "VERL_PLATFORM",
    "VERL_ENGINE_VENDOR",
    "VLLM_USE_FLASHINFER_SAMPLER",
    "VERL_WEIGHT_SYNC_TIMEOUT_S",
]

# The x86 and Arm instruction sets that a kernel library dispatches on for floating-point work.
INSTRUCTION_SETS = frozenset(
    [
        "avx",
        "avx2",
        "fma",
        "f16c",
        "avx512f",
        "avx512bw",
        "avx512vl",
        "avx512dq",
        "avx512_bf16",
        "avx512_fp16",
        "avx512_vnni",
        "avx_vnni",
        "amx_tile",
        "amx_bf16",
        "amx_int8",
        "amx_fp16",
        "asimd",
        "asimdhp",
        "asimddp",
        "bf16",
        "i8mm",
        "sve",
        "sve2",
        "svebf16",
        "sme",
    ]
)


# What an image's builder left in it: of which commit and wheels it is.
INVENTORY = "inventory.json"


class ProvenanceError(SamebitsError):
    """An identity that cannot be established: what is missing or contradicts, and what to do."""


def collect(
    *,
    root: Path,
    lock: Path,
    requirements: Path,
    tree: Path | None = None,
    arm: int,
    runner: str,
    config_sha256: str,
    model: Mapping[str, Any],
    command: Sequence[str],
    device: str = "cpu",
    device_name: str | None = None,
    threads: int | None = None,
    contract: str | None = None,
    kernels: Mapping[str, str] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """The identity of a run that is about to start.

    root: the repository, or its place in an image, where INVENTORY stands for commit and wheels, and SAMEBITS_IMAGE in
    the environment is the image's digest, which no image can hold itself. lock: the lock file. requirements: the
    requirements.txt that `samebits build wheels` left; the wheels lie beside it, and each must be the one installed
    here. tree: instead, the note of `samebits build tree`, whose files must lie beside it; where there is no repository
    its commit is the run's. arm: 0 or 1.
    runner: vLLM's model runner, v1 or v2. model: name, seed, tokenizer_sha256 and the geometry. threads: of one
    operator; default: the processors this process may use. contract: the name of the numerical contract that both
    sides compute by; None at arm 0. kernels: what torch dispatches on. ProvenanceError with the remedy otherwise."""
    switches = {name: environment[name] for name in SWITCHES if name in environment}
    if switches.setdefault("VLLM_BATCH_INVARIANT", "0") != str(arm):
        raise ProvenanceError(
            f"arm {arm} and VLLM_BATCH_INVARIANT={switches['VLLM_BATCH_INVARIANT']} contradict; unset the variable"
        )
    commit = _git(root, "rev-parse", "--verify", "-q", "HEAD") or None
    changes = _git(root, "status", "--porcelain")
    dirty = None if changes is None else bool(changes)
    image, inventory = None, root / INVENTORY
    if inventory.is_file():
        said = image_inventory(inventory)
        wheels, commit, dirty = said["wheels"], said["git_commit"], False
        image = {"digest": environment.get("SAMEBITS_IMAGE"), "inventory": _sha256(inventory, "use another image")}
    elif tree is not None:
        noted = _noted(tree)
        wheels = _wheels_of(noted)
        if commit is None:
            commit, _, suffix = noted["git_commit"].partition("-")
            dirty = bool(suffix)
    else:
        wheels = installed_wheels(requirements)
    identity = {
        "schema": SCHEMA,
        "git_commit": commit,
        "git_dirty": dirty,
        "lock": {"name": lock.name, "sha256": _sha256(lock, "run `make env`")},
        "wheels": wheels,
        "versions": versions(),
        "python": platform.python_version(),
        "device": device,
        "device_name": device_name or _processor_name(),
        "instruction_set": instruction_set(),
        "contract": contract,
        "kernels": dict(kernels or {}),
        "threads": threads or len(os.sched_getaffinity(0)),
        "runner": runner,
        "switches": switches,
        "config_sha256": config_sha256,
        "arm": arm,
        "model": dict(model),
        "command": list(command),
        **({"image": image} if image else {}),
    }
    found = schema.problems(identity, "execution-1")
    if found:
        raise ProvenanceError(f"execution identity breaks {SCHEMA}: {'; '.join(found[:3])}; correct the caller")
    return identity


def read(path: Path) -> dict[str, Any]:
    """execution.json, validated; ProvenanceError if it is missing, damaged or incomplete."""
    try:
        identity = strictjson.loads(path.read_bytes())
    except OSError as error:
        raise ProvenanceError(f"cannot be read: {error.strerror}; record the run again") from error
    except ValueError as error:
        raise ProvenanceError(f"not JSON: {error}; record the run again") from error
    found = schema.problems(identity, "execution-1")
    if found:
        raise ProvenanceError(f"breaks {SCHEMA}: {'; '.join(found[:3])}; record the run again")
    return dict(identity)


def write(path: Path, identity: Mapping[str, Any]) -> None:
    """Write execution.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(strictjson.dumps(dict(identity)))


def versions() -> dict[str, str]:
    """Installed versions of the packages whose arithmetic or weights take part."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def installed_wheels(requirements: Path) -> dict[str, str]:
    """Wheel file name -> sha256 for each wheel of a `samebits build wheels` folder, named by its requirements.txt.

    Each must lie beside the list with the hash that it states, and be what is installed here, file by file, by the
    hashes of both RECORDs. ProvenanceError otherwise."""
    remedy = "run `make env`, which builds and installs the wheels"
    text = requirements.read_text(errors="replace") if requirements.is_file() else ""
    stated = re.findall(r"^(\S+==\S+) --hash=sha256:([0-9a-f]{64})$", text, re.M)
    if not stated:
        raise ProvenanceError(f"{requirements.name} is missing or lists no wheel; {remedy}")
    at_hand = {_sha256(wheel, remedy): wheel for wheel in sorted(requirements.parent.glob("*.whl"))}
    for name, digest in stated:
        if digest not in at_hand:
            raise ProvenanceError(f"no wheel beside {requirements.name} is the one that it states for {name}; {remedy}")
        if not _is_installed(at_hand[digest]):
            raise ProvenanceError(f"{at_hand[digest].name} is not what is installed in this environment; {remedy}")
    return dict(sorted((at_hand[digest].name, digest) for _, digest in stated))


def wheels_here(root: Path, requirements: Path) -> dict[str, str]:
    """The patched wheels of the image that this runs in, or else of the environment (`installed_wheels`)."""
    inventory = root / INVENTORY
    return dict(image_inventory(inventory)["wheels"]) if inventory.is_file() else installed_wheels(requirements)


def image_inventory(inventory: Path, root: Path = Path("/")) -> dict[str, Any]:
    """What an image says of itself: git_commit, wheels (file name -> sha256), and more that its builder wrote.

    Each of its patched distributions must lie below `root` with the RECORD that was installed. ProvenanceError else."""
    said = strictjson.loads(inventory.read_bytes())
    for name, digest in said["records"].items():
        if _sha256(root / name, "use the image as it was built") != digest:
            raise ProvenanceError(f"{name} is not what the image was built with; use the image as it was built")
    return dict(said)


def wheel_of_tree(note: Path) -> dict[str, str]:
    """wheel, sha256 and git_commit of the wheel that a tree is part of, by the note beside the tree's files.

    ProvenanceError if a file is not as noted."""
    known = _noted(note)
    return {key: known[key] for key in ("wheel", "sha256", "git_commit")}


def wheels_of_tree(note: Path) -> dict[str, str]:
    """Every wheel that a tree is part of, file name -> sha256. ProvenanceError as `wheel_of_tree`."""
    return _wheels_of(_noted(note))


def _wheels_of(known: Mapping[str, Any]) -> dict[str, str]:
    return dict(sorted({known["wheel"]: known["sha256"], **known.get("wheels", {})}.items()))


def _noted(note: Path) -> dict[str, Any]:
    """A tree's note, each of whose files lies beside it as it says; ProvenanceError otherwise."""
    known = strictjson.loads(note.read_bytes())
    for name, digest in known["files"].items():
        if _sha256(note.parent / name, "unpack the tree again") != digest:
            raise ProvenanceError(f"{name} beside {note.name} is not that of {known['wheel']}; unpack the tree again")
    return dict(known)


def instruction_set(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The instruction sets of INSTRUCTION_SETS that every processor of this machine has, sorted."""
    try:
        lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(errors="replace"), re.M)
    except OSError:
        return []
    common = set.intersection(*(set(line.split()) for line in lines)) if lines else set()
    return sorted(common & INSTRUCTION_SETS)


def _is_installed(wheel: Path) -> bool:
    try:
        with zipfile.ZipFile(wheel) as archive:
            record = next(n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/RECORD", n))
            wanted = archive.read(record).decode().splitlines()
        files = importlib.metadata.distribution(wheel.name.split("-")[0]).read_text("RECORD") or ""
    except (importlib.metadata.PackageNotFoundError, zipfile.BadZipFile, StopIteration, UnicodeDecodeError):
        return False
    present = set(files.splitlines())
    return all(line in present for line in wanted if ",sha256=" in line and ".data/" not in line)


def _processor_name() -> str:
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.M)
    except OSError:
        names = []
    return (names[0] if names else platform.machine()) or "unknown"


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _sha256(path: Path, remedy: str) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ProvenanceError(f"{path.name} cannot be read: {error.strerror}; {remedy}") from error
