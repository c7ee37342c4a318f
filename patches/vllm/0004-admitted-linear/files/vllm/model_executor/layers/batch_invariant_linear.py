# SPDX-License-Identifier: Apache-2.0
"""Linear layers under VLLM_BATCH_INVARIANT=1 on CUDA: fast implementations that were seen to give the contract's bits.

The contract is sequential K: an output is one chain of k16 steps of the tensor core, in order, defined by the kernel
`torch.ops.batch_invariant.reference_gemm`. Whatever computes the same bits may serve a shape. When a model has been
loaded, each implementation is compared with the reference, bit for bit, for each shape (N, K) and each number of rows
M up to 64 and ranges of M above; of those that never differ the one that was offered last serves, and vLLM's Triton
kernel where none is left. What was found is kept on disk, by card and library version.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from vllm import envs
from vllm.logger import init_logger

logger = init_logger(__name__)

LIBRARY = Path(__file__).parents[2] / "batch_invariant_linear.so"
SINGLE = 64  # up to so many rows each M is tried by itself
# Above, a plan holds for a range of M: it is tried at both ends and in between, so that a choice that a library makes
# within the range is seen.
RANGES = ((65, 128), (129, 256), (257, 512), (513, 1024), (1025, 2048), (2049, 4096), (4097, 8192), (8193, 16384))
INPUTS = ("normal", "cancelling", "special")
ROWS_COMPARED = 192  # of an output with more rows: the first, the last, and some in between
FALLBACK = "triton"
DEVICE = "cuda"

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class Implementation:
    """One way to compute x [M, K] weight [N, K]^T (+ bias [N]) in bf16, for M up to `most_rows` (None: any)."""

    name: str
    run: Run
    most_rows: int | None = None
    fits: Callable[[int, int], bool] = lambda n, k: True  # which (N, K)

    def serves(self, n: int, k: int, m: int) -> bool:
        return self.fits(n, k) and (self.most_rows is None or m <= self.most_rows)


@dataclass
class Plan:
    """Which implementation serves how many rows of one shape: `single[M - 1]`, and one a range of RANGES."""

    single: list[str]
    ranges: list[str]
    refused: list[str] = field(default_factory=list)

    def serving(self, rows: int) -> str:
        if rows <= SINGLE:
            return self.single[max(rows, 1) - 1]
        place = max((rows - 1).bit_length() - SINGLE.bit_length(), 0)
        return self.ranges[place] if place < len(self.ranges) else FALLBACK


def _cublaslt(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = torch.ops.batch_invariant.cublaslt_gemm(x, weight)  # never splits K
    return product if bias is None else product + bias


def _triton(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = _batch_invariant().matmul_persistent(x, weight.t())
    return product if bias is None else product + bias


def _reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.batch_invariant.reference_gemm(x, weight)


def _batch_invariant():
    try:
        from vllm.model_executor.layers import batch_invariant
    except ImportError:
        from vllm.model_executor.determinism import batch_invariant
    return batch_invariant


_implementations = {i.name: i for i in (Implementation(FALLBACK, _triton), Implementation("cublaslt", _cublaslt))}
_plans: dict[tuple[int, int], Plan] = {}
_library: torch.library.Library | None = None


def offer(implementation: Implementation) -> None:
    """Let `implementation` be tried first, for every shape that is admitted from now on."""
    _implementations[implementation.name] = implementation


def enable() -> None:
    """Load the reference and register `torch.ops.batch_invariant.linear` on CUDA. Harmless if done again.

    Raises:
        RuntimeError: the library that the wheel carries is not there, or does not load.
    """
    global _library
    if _library is not None:
        return
    _load(LIBRARY)
    _library = torch.library.Library("batch_invariant", "FRAGMENT")
    _library.define("planned_linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")
    _library.impl("planned_linear", _planned, "CUDA")

    @torch.library.register_fake("batch_invariant::linear", lib=_library)
    def _(x, weight, bias=None):
        return x.new_empty((*x.shape[:-1], weight.shape[0]))


def library_file(name: str) -> Path:
    """One of the libraries of operators that this package carries."""
    return LIBRARY.with_name(f"batch_invariant_{name}.so")


def load_for_hopper(name: str) -> bool:
    """Load batch_invariant_NAME.so, kernels for sm_90; False on another card.

    Raises:
        RuntimeError: the library that the wheel carries is not there, or does not load.
    """
    if torch.cuda.get_device_capability() != (9, 0):
        return False
    _load(library_file(name))
    return True


def _load(library: Path) -> None:
    if not library.exists():
        raise RuntimeError(
            f"VLLM_BATCH_INVARIANT=1 on CUDA: there is no {library}. Remedy: install the vLLM wheel that holds it."
        )
    torch.ops.load_library(str(library))


def serves(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `batch_invariant.linear` is for these: bf16 on CUDA. Other dtypes stay with vLLM's kernel."""
    return _library is not None and x.is_cuda and x.dtype == weight.dtype == torch.bfloat16 and weight.dim() == 2


def _planned(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What `linear` calls for all that cuBLASLt does not serve."""
    depth = x.shape[-1]
    flat = x if x.dim() == 2 else x.reshape(-1, depth)
    plan = _plans.get((weight.shape[0], depth))
    if plan is None:
        logger.warning_once(
            "batch_invariant: no implementation was admitted for a weight of %s; vLLM's Triton kernel serves it.",
            tuple(weight.shape),
        )
    name = FALLBACK if plan is None or not weight.is_contiguous() else plan.serving(flat.shape[0])
    out = _implementations[name].run(flat, weight, bias)
    return out if x.dim() == 2 else out.reshape(*x.shape[:-1], -1)


def admit_model(model: torch.nn.Module) -> None:
    """Admit implementations for every unquantized bf16 linear layer and output layer of a loaded model."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    weights = [
        module.weight
        for module in model.modules()
        if isinstance(getattr(module, "quant_method", None), UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
    ]
    admit({tuple(w.shape) for w in weights if w.is_cuda and w.dim() == 2 and w.dtype == torch.bfloat16})


@torch.inference_mode()
def admit(shapes: Iterable[Sequence[int]]) -> None:
    """Find, or read from disk, the plan of each (N, K) that has none yet.

    torch's generators stay as they were. Peak memory: the weight and its largest output, given back.
    """
    began, tried = time.perf_counter(), 0
    for n, k in sorted(set(map(tuple, shapes)) - set(_plans)):
        plan, anew = remembered(f"{n}x{k}-bf16", lambda n=n, k=k: vars(_find(n, k)))
        _plans[n, k] = Plan(**plan)
        tried += anew
        _let_cublaslt(n, k, _plans[n, k])
        said = ", ".join(f"{name} to M={last}" for name, last in _runs(_plans[n, k]))
        logger.info("batch_invariant: linear (%d, %d): %s", n, k, said)
        for reason in _plans[n, k].refused:
            logger.info("batch_invariant: linear (%d, %d): %s", n, k, reason)
        if FALLBACK in _plans[n, k].single + _plans[n, k].ranges:
            logger.warning("batch_invariant: linear (%d, %d) has rows that only Triton may serve: slow.", n, k)
    if tried:
        torch.cuda.empty_cache()
        logger.info("batch_invariant: %d shapes admitted in %.1f s", tried, time.perf_counter() - began)


def _let_cublaslt(n: int, k: int, plan: Plan) -> None:
    """Tell the operator for which rows it need not ask here."""
    single = sum(1 << i for i, name in enumerate(plan.single) if name == "cublaslt")
    ranges = sum(1 << i for i, name in enumerate(plan.ranges) if name == "cublaslt")
    signed = single - (1 << 64) if single >> 63 else single
    torch.ops.batch_invariant.let_cublaslt(n, k, signed, ranges)


def record() -> dict[str, dict[str, object]]:
    """What serves what, for a receipt: "N,K" to the plan's runs and what was refused."""
    return {f"{n},{k}": {"runs": _runs(plan), "refused": plan.refused} for (n, k), plan in sorted(_plans.items())}


def _runs(plan: Plan) -> list[tuple[str, int]]:
    """The plan as (implementation, last M), each for the rows after the one before."""
    runs: list[tuple[str, int]] = []
    served = list(zip(plan.single, range(1, SINGLE + 1), strict=True))
    served += [(name, last) for name, (_, last) in zip(plan.ranges, RANGES, strict=False)]
    for name, last in served:
        if runs and runs[-1][0] == name:
            runs.pop()
        runs.append((name, last))
    return runs


def _made_of() -> list[str]:
    """What a finding holds for: card, libraries, and how it was found."""
    major, minor = torch.cuda.get_device_capability()
    files = [Path(__file__), *sorted(LIBRARY.parent.glob("batch_invariant_*.so"))]
    hashes = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    names = [f"{torch.cuda.get_device_name()} {major}.{minor}", torch.__version__, str(torch.version.cuda)]
    settings = [f"{key}={os.environ.get(key)}" for key in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")]
    return [*names, *settings, ",".join(_implementations), *hashes]


def remembered(name: str, find: Callable[[], dict], also_of: Sequence[str] = ()) -> tuple[dict, bool]:
    """What `find` returns, or did on such a card with such libraries, from disk; and whether it was asked now.

    also_of: what else a finding holds for."""
    made_of = [*_made_of(), *also_of]
    key = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]
    kept = Path(envs.VLLM_CACHE_ROOT) / "batch_invariant" / key / f"{name}.json"
    if kept.is_file():
        return json.loads(kept.read_text())["plan"], False
    found = find()
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = kept.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps({"made_of": made_of, "plan": found}, indent=1))
    partial.replace(kept)
    return found, True


def _find(n: int, k: int) -> Plan:
    """Compare the implementations of one shape. A range that the card's free memory has no room for stays with Triton."""
    generator = torch.Generator(device=DEVICE).manual_seed(n * 1_000_003 + k)
    kinds = [(_weight(kind, n, k, generator), kind) for kind in INPUTS]
    found: dict[int, dict[str, int]] = {}  # M -> implementation -> elements that differ
    wanted = [*range(1, SINGLE + 1), *(m for first, last in RANGES for m in _samples(first, last))]
    room = _free_bytes() // 4
    wanted = [m for m in wanted if m * (n + k) * 2 <= room]
    for weight, kind in kinds:
        x = _rows(kind, max(wanted), k, generator)
        picked = _picked(max(wanted), x.device)
        reference = _reference(x[picked], weight)
        counts = {
            (m, name): _unequal(implementation.run, x[:m], weight, reference, picked)
            for m in wanted
            for name, implementation in _implementations.items()
            if name != FALLBACK and implementation.serves(n, k, m)
        }
        for (m, name), count in counts.items():
            by_name = found.setdefault(m, {})
            by_name[name] = by_name.get(name, 0) + int(count)

    def preferred(rows: Sequence[int]) -> str:
        for name, implementation in reversed(_implementations.items()):
            if name == FALLBACK or rows and all(found.get(m, {}).get(name, 1) == 0 for m in rows):
                return name
        return FALLBACK

    single = [preferred([m]) for m in range(1, SINGLE + 1)]
    ranges = [preferred(_samples(first, last)) for first, last in RANGES]
    refused: list[str] = []
    for name in _implementations:
        wrong = [m for m, counts in sorted(found.items()) if counts.get(name, 0)]
        if wrong:
            refused.append(f"{name} refused at M = {', '.join(map(str, wrong))}: other bits than the reference, or none")
    return Plan(single, ranges, refused)


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


def _samples(first: int, last: int) -> list[int]:
    middle = (first + last) // 2
    return sorted({first, first + 1, (first + middle) // 2 + 1, middle, (middle + last) // 2 + 3, last - 1, last})


def _weight(kind: str, n: int, k: int, generator: torch.Generator) -> torch.Tensor:
    weight = torch.randn(n, k, generator=generator, device=DEVICE, dtype=torch.bfloat16)
    if kind == "cancelling":  # large terms that cancel, so that the order of a sum shows in its leading bits
        weight[:, k // 2 : k // 2 * 2] = weight[:, : k // 2]
    return weight


def _rows(kind: str, m: int, k: int, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(m, k, generator=generator, device=DEVICE, dtype=torch.bfloat16)
    if kind == "cancelling":
        x[:, k // 2 : k // 2 * 2] = -x[:, : k // 2]
        x[:, :: max(k // 7, 1)] *= 1.0 + 2.0**-7
    if kind == "special":
        flat = x.view(-1)
        for step, value in ((7, 0.0), (11, -0.0), (13, 1e-40), (17, -3e38), (1009, float("inf")), (2003, float("nan"))):
            flat[:: step * 5 if value != value or abs(value) > 1e38 else step] = value
        x[::3] = torch.where(x[::3].abs() < 1e38, x[::3], 1.0)  # and rows that stay finite
    return x


def _picked(most: int, device: torch.device) -> torch.Tensor:
    """Row numbers that are compared, of `most`: spread so that every M sees its first and last rows."""
    rows = set(range(min(SINGLE, most)))
    for first, last in RANGES:
        for m in _samples(first, last):
            rows |= {m - 1, m - 2, m - 9}
    rows |= set(range(SINGLE, most, max(most // ROWS_COMPARED, 1)))
    return torch.tensor(sorted(r for r in rows if r < most), device=device)


def _unequal(
    run: Run, x: torch.Tensor, weight: torch.Tensor, reference: torch.Tensor, picked: torch.Tensor
) -> torch.Tensor | int:
    """How many elements of the picked rows differ in their bits; NaN and NaN do not. A refusal counts as one.

    Raises torch.OutOfMemoryError: want of memory says nothing about bits.
    """
    try:
        out = run(x, weight, None)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return 1
    inside = int(torch.searchsorted(picked, x.shape[0]))
    mine, other = out[picked[:inside]], reference[:inside]
    differ = mine.view(torch.int16) != other.view(torch.int16)
    return (differ & ~(mine.isnan() & other.isnan())).sum()
