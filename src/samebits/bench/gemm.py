"""Products of few rows on one GPU: ours, cuBLASLt without split-K and vLLM's own, against cuBLAS; and the bits of each.

A time is the median of replays of one CUDA graph of launches, back to back, each with a weight of its own, many times
what the L2 cache holds; the graphs of all ways take turns in an order that changes, clocks are left alone. Ours is
timed with every width of a tile too: the table of widths in `batch_invariant_sm90` is made from that. Bits are compared
with the reference kernel.
"""

import datetime
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rich import box
from rich.table import Table

from samebits.evidence.measurement import GEMM
from samebits.judge import products as plan

from .engine import card
from .graph import Counted, captured, in_turn, microseconds, middle

BYTES = 2e9  # of different weights in a graph, each read once: what the cache keeps of them hardly counts
LEAST_LAUNCHES, MOST_LAUNCHES = 4, 240


def measure(say: Callable[[str], None]) -> dict[str, Any]:
    """Time and compare; needs the CUDA libraries of the installed vllm loaded."""
    import torch
    from vllm.model_executor.layers import batch_invariant, batch_invariant_sm90

    from . import persistent

    operators = torch.ops.batch_invariant
    processors = torch.cuda.get_device_properties(0).multi_processor_count

    def split(allowed: bool) -> None:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (allowed, allowed)

    def skinny(x: Any, weight: Any) -> Any:
        n, k = weight.shape
        width = batch_invariant_sm90.columns(n, k, x.shape[0], processors)
        return operators.skinny_gemm(x, weight, None, False, width)

    def tiles_of(width: int) -> Callable[[Any, Any], Any]:
        return lambda x, weight: operators.skinny_gemm(x, weight, None, False, width)

    ways: dict[str, Callable[[Any, Any], Any]] = {
        "cublas": lambda x, w: torch.mm(x, w.t()),
        "skinny": skinny,
        "cublaslt": operators.cublaslt_gemm,
        "vllm": lambda x, w: batch_invariant.matmul_persistent(x, w.t()),
        "persistent": lambda x, w: persistent.product(x, w, processors),
    }

    def serving(n: int, k: int) -> str:
        return "skinny" if batch_invariant_sm90.offers(n, k) else "cublaslt"

    split(True)
    rows = []
    for model, shapes in plan.SHAPES.items():
        for n, k in shapes:
            say(f"{model}: ({n}, {k})")
            launches = max(LEAST_LAUNCHES, min(MOST_LAUNCHES, int(BYTES / (n * k * 2))))
            weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(launches)]
            for m in plan.ROWS:
                x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
                of_widths = {str(width): tiles_of(width) for width in batch_invariant_sm90.WIDTHS}
                calls = {name: partial(_call, way, x, weights) for name, way in (ways | of_widths).items()}
                taken = in_turn(calls, launches)
                times, widths = ({name: middle(taken[name]) for name in names} for names in (ways, of_widths))
                spread = {name: float(f"{max(taken[name]) - min(taken[name]):.3g}") for name in ways}
                row = {"model": model, "n": n, "k": k, "m": m, "served": serving(n, k), "microseconds": times}
                rows.append({**row, "spread": spread, "widths": widths})
    say("bandwidth of a copy")
    big = torch.empty(1 << 28, device="cuda")
    other = torch.empty_like(big)
    # The faster of the library's copy and of a kernel that reads and writes as much.
    copies = (
        partial(lambda to, of, _: to.copy_(of), other, big),
        partial(lambda to, of, _: torch.neg(of, out=to), other, big),
    )
    copy = max(2 * big.nbytes / microseconds(one, 4) / 1e6 for one in copies)
    return {"rows": rows, "copy_tb_s": copy, "bits": _bits(say)}


def _call(way: Callable[[Any, Any], Any], x: Any, weights: Sequence[Any], i: int) -> Any:
    return way(x, weights[i])


def _inputs(kind: str, m: int, n: int, k: int) -> tuple[Any, Any]:
    """Rows x [m, k] and a weight [n, k] that show the order of a sum, in bf16."""
    import torch

    x = torch.randn(m, k, device="cuda")
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    if kind == "cancelling":
        weight[:, k // 2 :] = weight[:, : k // 2].clone()
        x[:, k // 2 :] = -x[:, : k // 2] * (1 + 2.0**-8)
    if kind == "outliers":
        x[:, ::97] *= 1e4
        weight[::5, ::89] *= 1e3
    if kind == "special":
        x[:, ::7], x[:, 1::11], x[:, 2::13] = 0.0, -0.0, 1e-39
        x[::9, 5], x[1::9, 6], x[2::9, 7], x[3::9, 8] = float("inf"), float("nan"), 3e38, -float("inf")
    return x.to(torch.bfloat16), weight


def _bits(say: Callable[[str], None]) -> list[dict[str, Any]]:
    """By shape and implementation: kinds of inputs, every number of rows to EVERY for most, every width, 20 replays."""
    found = []
    for n, k in sorted({shape for shapes in plan.SHAPES.values() for shape in shapes}):
        say(f"bits of ({n}, {k})")
        counted = {"cublaslt": Counted(), "skinny": Counted(), "vllm": Counted()}
        for kind in plan.KINDS:
            _compare(n, k, kind, **counted)
        for name, one in counted.items():
            found.append({"n": n, "k": k, "implementation": name, "differ": int(one.differ), "of": one.of})
    return found


def _compare(n: int, k: int, kind: str, cublaslt: Counted, skinny: Counted, vllm: Counted) -> None:
    import torch
    from vllm.model_executor.layers import batch_invariant

    operators = torch.ops.batch_invariant
    x, weight = _inputs(kind, plan.EVERY, n, k)
    reference = operators.reference_gemm(x, weight)
    rows = plan.compared(kind, n)
    for m in rows["cublaslt"]:
        cublaslt.compare(operators.cublaslt_gemm(x[:m], weight), reference[:m])
    for m in rows["vllm"]:
        vllm.compare(batch_invariant.matmul_persistent(x[:m], weight.t()), reference[:m])
    for m in rows["skinny"]:
        for width in plan.WIDTHS:
            skinny.compare(operators.skinny_gemm(x[:m], weight, None, False, width), reference[:m])
    for m in plan.powers(kind, n):
        long, _ = _inputs(kind, m, 1, k)
        some = torch.arange(0, m, plan.ROW, device="cuda")
        cublaslt.compare(operators.cublaslt_gemm(long, weight)[some], operators.reference_gemm(long[some], weight))
    few = x[: plan.REPLAYED].clone()
    graph, (by_skinny, by_cublaslt) = captured(
        lambda: (operators.skinny_gemm(few, weight, None, False, 48), operators.cublaslt_gemm(few, weight))
    )
    for _ in range(plan.REPLAYS):
        graph.replay()
        skinny.compare(by_skinny, reference[: plan.REPLAYED])
        cublaslt.compare(by_cublaslt, reference[: plan.REPLAYED])


def table(finding: Mapping[str, Any], rows: Sequence[int] = (1, 16, 64)) -> Table:
    """Microseconds of each way at some numbers of rows, what serves in bold: what it gains, varies and reads."""
    drawn = Table(title=f"µs a product on {finding['card']['name']}, weights rotated, in one graph", box=box.SIMPLE)
    columns = {
        "cublas": "cuBLAS",
        "vllm": "vLLM's",
        "persistent": "one tile",
        "cublaslt": "cuBLASLt, no split",
        "skinny": "ours",
    }
    for column in ("model", "N", "K", "M", *columns.values(), "cuBLAS ÷ serving", "range", "TB/s"):
        drawn.add_column(column, justify="right", no_wrap=True)
    for row in finding["rows"]:
        if row["m"] not in rows:
            continue
        times, served = row["microseconds"], row["microseconds"][row["served"]]
        drawn.add_row(
            *(str(row[key]) for key in ("model", "n", "k", "m")),
            *(f"[bold]{times[name]:.1f}[/]" if name == row["served"] else f"{times[name]:.1f}" for name in columns),
            f"{times['cublas'] / served:.2f}",
            f"{row['spread'][row['served']] / served:.0%}" if "spread" in row else "",
            f"{row['n'] * row['k'] * 2 / served / 1e6:.2f}",
        )
    return drawn


def document(say: Callable[[str], None]) -> dict[str, Any]:
    """Measure, as a document of schema gemm-1: with the card, and the hash of each library that was measured."""
    from vllm.model_executor.layers import batch_invariant_linear, batch_invariant_sm90

    batch_invariant_linear.enable()
    batch_invariant_sm90.enable()
    libraries = [batch_invariant_linear.library_file(name) for name in ("linear", "sm90")]
    return GEMM.build(
        command="samebits bench gemm",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        card=card(),
        libraries={file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in libraries},
        **measure(say),
    )
