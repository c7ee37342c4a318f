"""Transformer Engine's backward modes on one GPU, as released and patched.

Needs Transformer Engine on PYTHONPATH. The patched package is made in a folder of its own: the Python files of the
release with the series of patches/TransformerEngine, and links to its libraries. Each arm is a process. For Linear,
LayerNormLinear, GroupedLinear, ops.Linear and a chain of ops, under current and block scaling, in each mode:

- forward: elements whose bits are not those of the default mode;
- error: each gradient's relative L2 distance from what the mode says, a product of the named operands in FP32;
- distance: the same from the gradients of unquantized operands, which is what the mode is for;
- roundings: how often BF16 rounds a gradient between the cotangent and it, of which the judge makes its bound;
- kept and peak: bytes that the forward leaves for the backward, and the most that a step held;
- milliseconds: forward and backward, the median of STEPS.

Besides: whether quantized bytes and values are those of `samebits.judge.quantized`, and Transformer Engine's own tests.
"""

import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich import box
from rich.table import Table

from samebits.errors import SamebitsError
from samebits.evidence.measurement import BACKWARD
from samebits.judge.backward_modes import FORMATS, MODES, RECIPES
from samebits.judge.quantized import RECIPES as FORMATS_OF
from samebits.judge.quantized import Float8
from samebits.sources.pins import ROOT

from .engine import card

WARM, STEPS = 3, 11
OWN_TESTS = "test_backward_override.py"
VARIABLES = ("NVTE_BACKWARD_MODE", "NVTE_BACKWARD_OVERRIDE", "NVTE_KEEP_BACKWARD_UNQUANTIZED")


class BackwardError(SamebitsError):
    """A measurement that cannot be made: what is missing or ended, and what to do."""


@dataclass(frozen=True)
class Sizes:
    """rows x features into `out` features; rows of each group, one of them empty."""

    rows: int = 4096
    features: int = 4096
    out: int = 4096
    splits: tuple[int, ...] = (1024, 0, 528, 2544)


# What the modes say, in FP32


def rounded(x: Any, recipe: str, weight: bool = False) -> Any:
    """What quantization leaves of a matrix, in FP32."""
    import torch

    formats = FORMATS_OF[recipe]
    return (formats.weight if weight else formats.x).quantize(x.detach()).dequantize(torch.float32)


def operands(x: Any, weight: Any, recipe: str, mode: str) -> tuple[Any, Any]:
    """In BF16, which is what a product reads; the default mode's gradients are compared with the unquantized ones."""
    if mode != "dequant":
        return x.detach(), weight.detach()
    return rounded(x, recipe).to(x.dtype), rounded(weight, recipe, weight=True).to(x.dtype)


def linear_gradients(x: Any, weight: Any, dy: Any) -> tuple[Any, Any]:
    """dX and dW of x weight^T, in FP32."""
    return dy.float() @ weight.float(), dy.float().T @ x.float()


def norm(x: Any, gain: Any, epsilon: float) -> Any:
    import torch

    return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon) * gain.float()


def through(function: Callable[[Any], Any], x: Any, dy: Any) -> Any:
    """dX of a function of one tensor, in FP32."""
    import torch

    leaf = x.detach().float().requires_grad_()
    with torch.enable_grad():
        (dx,) = torch.autograd.grad(function(leaf), leaf, dy)
    return dx


# The modules: how each is made and called, and its gradients by name with the roundings on the way to them


@dataclass(frozen=True)
class Subject:
    """references: of input, cotangent, recipe and mode; each gradient's value and how often BF16 rounded it.

    found: a gradient by name, after a step.
    """

    module: Any
    arguments: tuple[Any, ...]
    references: Callable[[Any, Any, str, str], dict[str, tuple[Any, int]]]
    found: dict[str, Callable[[], Any]]


def subjects(sizes: Sizes, device: str) -> dict[str, Callable[[], Subject]]:
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch import ops

    bf16 = torch.bfloat16
    features, out = sizes.features, sizes.out

    def of_linear(module: Any) -> Subject:
        def references(x: Any, dy: Any, recipe: str, mode: str) -> dict[str, tuple[Any, int]]:
            dx, dw = linear_gradients(*operands(x, module.weight, recipe, mode), dy)
            return {"dx": (dx, 1), "dw": (dw, 1), "db": (dy.float().sum(0), 1)}

        return Subject(module, (), references, {"dw": lambda: module.weight.grad, "db": lambda: module.bias.grad})

    def of_layernorm_linear() -> Subject:
        module = te.LayerNormLinear(features, out, normalization="RMSNorm", params_dtype=bf16, device=device)
        gain = module.layer_norm_weight
        gain.data.add_(torch.randn(features, device=device).to(bf16) / 8)

        def references(x: Any, dy: Any, recipe: str, mode: str) -> dict[str, tuple[Any, int]]:
            normed = norm(x, gain, module.eps)
            into, dw = linear_gradients(*operands(normed.to(bf16), module.weight, recipe, mode), dy)
            dx = through(lambda leaf: norm(leaf, gain, module.eps), x, into)
            dgain = (into * norm(x, torch.ones_like(gain), module.eps)).sum(0)
            return {"dx": (dx, 2), "dw": (dw, 1), "db": (dy.float().sum(0), 1), "dgain": (dgain, 2)}

        found = {"dw": lambda: module.weight.grad, "db": lambda: module.bias.grad, "dgain": lambda: gain.grad}
        return Subject(module, (), references, found)

    def of_grouped_linear() -> Subject:
        count = len(sizes.splits)
        module = te.GroupedLinear(count, features, out, bias=True, params_dtype=bf16, device=device)

        def references(x: Any, dy: Any, recipe: str, mode: str) -> dict[str, tuple[Any, int]]:
            found: dict[str, tuple[Any, int]] = {}
            parts: list[Any] = []
            for n, (xs, dys) in enumerate(zip(x.split(sizes.splits), dy.split(sizes.splits), strict=True)):
                weight = getattr(module, f"weight{n}")
                dx, dw = (
                    linear_gradients(*operands(xs, weight, recipe, mode), dys)
                    if len(xs)
                    else (xs.float(), torch.zeros_like(weight).float())
                )
                parts.append(dx)
                found |= {f"dw{n}": (dw, 1), f"db{n}": (dys.float().sum(0), 1)}
            return {"dx": (torch.cat(parts), 1), **found}

        def gradient(name: str) -> Callable[[], Any]:
            return lambda: getattr(module, name).grad

        found = {f"dw{n}": gradient(f"weight{n}") for n in range(count)}
        found |= {f"db{n}": gradient(f"bias{n}") for n in range(count)}
        splits = torch.tensor(sizes.splits, dtype=torch.int64)
        return Subject(module, (splits,), references, found)

    def of_chain() -> Subject:
        """A linear op without a bias, an activation, a linear op."""
        first = ops.BasicLinear(features, out, dtype=bf16, device=device)
        second = ops.BasicLinear(out, features, dtype=bf16, device=device)

        def activation(hidden: Any) -> Any:
            return torch.nn.functional.gelu(hidden, approximate="tanh")

        def references(x: Any, dy: Any, recipe: str, mode: str) -> dict[str, tuple[Any, int]]:
            hidden = (rounded(x, recipe) @ rounded(first.weight, recipe, weight=True).T).to(bf16)
            active = activation(hidden.float()).to(bf16)
            into, dw2 = linear_gradients(*operands(active, second.weight, recipe, mode), dy)
            dhidden = through(activation, hidden, into)
            dx, dw1 = linear_gradients(*operands(x, first.weight, recipe, mode), dhidden)
            return {"dx": (dx, 3), "dw": (dw1, 3), "dw2": (dw2, 2)}  # dw2: the activation was rounded too

        found = {"dw": lambda: first.weight.grad, "dw2": lambda: second.weight.grad}
        return Subject(ops.Sequential(first, ops.GELU(), second), (), references, found)

    return {
        "Linear": lambda: of_linear(te.Linear(features, out, params_dtype=bf16, device=device)),
        "LayerNormLinear": of_layernorm_linear,
        "GroupedLinear": of_grouped_linear,
        "ops.Linear": lambda: of_linear(ops.Linear(features, out, dtype=bf16, device=device)),
        "ops chain": of_chain,
    }


# Measurement


def distance(found: Any, expected: Any) -> float | None:
    """Relative L2, None for a gradient that is missing; the norm itself where zero is expected."""
    if found is None:
        return None
    size = expected.double().norm()
    return float((found.double() - expected.double()).norm() / (size if size > 0 else 1))


def measure_mode(
    subject: Subject, x: Any, dy: Any, recipe: str, mode: str, clock: "Clock"
) -> tuple[Any, dict[str, Any]]:
    """A step's output and what is written down of it."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    module, said = subject.module, getattr(recipes, recipe)(backward_override=MODES[mode])

    def forward() -> Any:
        with te.autocast(enabled=True, recipe=said):
            return module(x, *subject.arguments)

    x = x.detach().clone().requires_grad_()
    before = clock.held()
    y = forward()
    kept = clock.held() - before - y.numel() * y.element_size()
    y.backward(dy)
    gradients = {"dx": x.grad, **{name: get() for name, get in subject.found.items()}}
    references = subject.references(x.detach(), dy, recipe, mode)
    unquantized = subject.references(x.detach(), dy, recipe, "unquant")
    row: dict[str, Any] = {
        "error": {name: distance(gradients[name], value) for name, (value, _) in references.items()},
        "distance": {name: distance(gradients[name], value) for name, (value, _) in unquantized.items()},
        "roundings": {name: roundings for name, (_, roundings) in references.items()},
        "kept_bytes": kept,
    }
    del gradients, references, unquantized

    def step() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        forward().backward(dy)

    row |= clock.of(step)
    module.zero_grad(set_to_none=True)
    return y.detach(), row


class Clock:
    """Time and memory of a GPU; on a CPU (the tests') time alone."""

    def __init__(self, device: str) -> None:
        self.device = device

    def held(self) -> int:
        import torch

        return torch.cuda.memory_allocated() if self.device == "cuda" else 0

    def of(self, step: Callable[[], None]) -> dict[str, Any]:
        """The median of STEPS in milliseconds, and the most bytes beyond those held before."""
        import torch

        on_card = self.device == "cuda"
        for _ in range(WARM if on_card else 0):
            step()
        before, taken = self.held(), []
        if on_card:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(STEPS if on_card else 1):
            start = time.perf_counter()
            step()
            if on_card:
                torch.cuda.synchronize()
            taken.append((time.perf_counter() - start) * 1e3)
        peak = torch.cuda.max_memory_allocated() - before if on_card else 0
        return {"milliseconds": statistics.median(taken), "peak_bytes": peak}


def frozen_bias(sizes: Sizes, device: str) -> dict[str, bool]:
    """Whether a trainable bias beside a frozen weight gets a gradient, by module and mode."""
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    found = {}
    for name in ("Linear", "LayerNormLinear", "GroupedLinear"):
        subject = subjects(sizes, device)[name]()
        for parameter, tensor in subject.module.named_parameters():
            tensor.requires_grad_(parameter.startswith("bias"))
        for mode, override in MODES.items():
            subject.module.zero_grad(set_to_none=True)
            x = torch.randn(sizes.rows, sizes.features, device=device).to(torch.bfloat16).requires_grad_()
            with te.autocast(enabled=True, recipe=recipes.Float8CurrentScaling(backward_override=override)):
                y = subject.module(x, *subject.arguments)
            y.sum().backward()
            biases = [t for parameter, t in subject.module.named_parameters() if parameter.startswith("bias")]
            found[f"{name} {mode}"] = all(bias.grad is not None for bias in biases)
    return found


def outcome(call: Callable[[], Any]) -> str:
    """What a call says: nothing, or its error's kind and first words."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:160]}"
    return ""


def behaviours(sizes: Sizes, device: str) -> dict[str, str]:
    """What runs and what is refused; "" is that it ran."""
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch import ops

    bf16, x = torch.bfloat16, torch.randn(sizes.rows, sizes.features, device=device).to(torch.bfloat16)
    unquant = recipes.Float8CurrentScaling(backward_override="high_precision")

    def step(module: Any, recipe: Any, enabled: bool = True, *arguments: Any) -> None:
        with te.autocast(enabled=enabled, recipe=recipe):
            y = module(x.detach().clone().requires_grad_(), *arguments)
        y.sum().backward()

    def linear() -> Any:
        return te.Linear(sizes.features, sizes.out, params_dtype=bf16, device=device)

    def quantized() -> Any:
        with te.quantized_model_init(recipe=recipes.Float8CurrentScaling()):
            return linear()

    splits = torch.tensor(sizes.splits, dtype=torch.int64, device=device)
    grouped = ops.GroupedLinear(len(sizes.splits), sizes.features, sizes.out, bias=False, dtype=bf16, device=device)
    said = {
        "unquant, quantized parameters": outcome(lambda: step(quantized(), unquant)),
        "unquant, ops.GroupedLinear": outcome(lambda: step(grouped, unquant, True, splits)),
    }
    os.environ["NVTE_BACKWARD_MODE"] = "unquant"
    try:
        plain = outcome(lambda: step(linear(), None, enabled=False))
        said["NVTE_BACKWARD_MODE, a region that does not quantize"] = plain
        said["NVTE_BACKWARD_MODE, delayed scaling"] = outcome(lambda: step(linear(), recipes.DelayedScaling()))
        said["NVTE_BACKWARD_MODE, in a new recipe"] = str(recipes.Float8CurrentScaling().backward_override)
    finally:
        del os.environ["NVTE_BACKWARD_MODE"]
    return said


def formats(device: str) -> list[dict[str, Any]]:
    """Elements whose byte, or whose value in FP32, is not the judge's; in each format that this card has."""
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.tensor import Float8BlockQuantizer, Float8CurrentScalingQuantizer

    e4m3, e5m2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2

    def in_blocks(dimensions: int) -> Any:
        return Float8BlockQuantizer(e4m3, rowwise=True, columnwise=False, block_scaling_dim=dimensions)

    ways = (
        (Float8(), Float8CurrentScalingQuantizer(e4m3, torch.device(device), columnwise=False)),
        (Float8(dtype=torch.float8_e5m2), Float8CurrentScalingQuantizer(e5m2, torch.device(device), columnwise=False)),
        (Float8((1, 128), power_of_two=True), in_blocks(1)),
        (Float8((128, 128), power_of_two=True), in_blocks(2)),
    )
    found = []
    for name, (ours, theirs) in zip(FORMATS, ways, strict=True):
        differ = of = 0
        for x in _values(device):
            left, right = theirs(x), ours.quantize(x)
            data = left._data if hasattr(left, "_data") else left._rowwise_data
            bytes_differ = data != right.data.view(torch.uint8)
            values_differ = left.dequantize(dtype=torch.float32) != right.dequantize(torch.float32)
            differ += int((bytes_differ | values_differ).sum())
            of += x.numel()
        found.append({"format": name, "differ": differ, "of": of})
    return found


def _values(device: str) -> Iterator[Any]:
    """Matrices in BF16 for the formats: as drawn, of many magnitudes, mostly zeros, near the least; with tails."""
    import torch

    for rows, columns in ((256, 512), (144, 272)):
        drawn = torch.randn(rows, columns, device=device)
        exponents = torch.randint(-20, 21, drawn.shape, device=device)
        for x in (drawn, torch.ldexp(drawn, exponents), drawn * (exponents > 18), drawn * 2.0**-120):
            yield x.to(torch.bfloat16)


def own_tests(folder: Path | None) -> dict[str, int]:
    """How many of Transformer Engine's tests of the override pass, fail and are skipped, in this process's package."""
    found = dict.fromkeys(("passed", "failed", "skipped"), 0)
    if folder is None:
        return found
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", OWN_TESTS]
        subprocess.run(command, cwd=folder, stdout=sys.stderr, check=False)
        if not report.is_file():
            raise BackwardError(f"{folder / OWN_TESTS}: pytest wrote no report; its output says why")
        for test in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in test}
            failed = bool(kinds & {"failure", "error"})
            found["failed" if failed else "skipped" if "skipped" in kinds else "passed"] += 1
    return found


def measure(
    sizes: Sizes, device: str, tests: Path | None = None, say: Callable[[str], None] = lambda phase: None
) -> dict[str, Any]:
    """Everything of one arm, in this process. tests: the folder of Transformer Engine's tests for PyTorch."""
    import torch

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    clock, rows = Clock(device), []
    for name, make in subjects(sizes, device).items():
        subject = make()
        x = torch.randn(sizes.rows, sizes.features, device=device).to(torch.bfloat16)
        for recipe in RECIPES:
            say(f"{name}, {recipe}")
            plain: Any = None
            width = sizes.features if name == "ops chain" else sizes.out
            dy = torch.randn(sizes.rows, width, device=device).to(torch.bfloat16)
            for mode in MODES:
                try:
                    y, row = measure_mode(subject, x, dy, recipe, mode, clock)
                    plain = y if plain is None else plain
                    differ = int((y != plain).sum())
                    row |= {"forward": {"differ": differ, "of": y.numel()}}
                except Exception as error:
                    row = {"refused": f"{type(error).__name__}: {str(error)[:200]}"}
                rows.append({"module": name, "recipe": recipe, "mode": mode, **row})
    say("frozen weights, refusals, formats")
    found = {
        "rows": rows,
        "frozen_weight_bias_gradient": frozen_bias(sizes, device),
        "behaviours": behaviours(sizes, device),
        "formats": formats(device),
    }
    say("Transformer Engine's own tests")
    return {**found, "tests": own_tests(tests)}


def patched_package(release: Path, target: Path) -> Path:
    """Write the patched package into `target`, its Python files anew and the rest as links; returns `target`."""
    from samebits.sources.patching import plan_series

    package = release / "transformer_engine"
    for source in sorted(package.rglob("*")):
        goal = target / source.relative_to(release)
        if source.is_file() and "__pycache__" not in source.parts:
            goal.parent.mkdir(parents=True, exist_ok=True)
            if source.suffix == ".py":
                goal.write_bytes(source.read_bytes())
            else:
                goal.symlink_to(source)

    def read(path: str) -> bytes | None:
        file = release / path
        return file.read_bytes() if file.is_file() else None

    steps = plan_series(read, "TransformerEngine", "2.20.2", ROOT / "patches", ["transformer_engine"])
    for path, data in {path: data for _, changed in steps for path, data in changed.items()}.items():
        goal = target / path
        goal.parent.mkdir(parents=True, exist_ok=True)
        goal.write_bytes(data)
    return target


def document(tests: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure both arms, as a document of schema backward-1.

    BackwardError if Transformer Engine is not there, or an arm ended."""
    import importlib.metadata
    import importlib.util

    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        raise BackwardError("no transformer_engine on PYTHONPATH: unpack its wheels and name the folder")
    release = Path(spec.origin).parents[1]
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    arms = {}
    with tempfile.TemporaryDirectory() as scratch:
        trees = {"release": release, "patched": patched_package(release, Path(scratch))}
        for name, tree in trees.items():
            say(f"{name}: five modules, two recipes, three modes")
            path = os.pathsep.join([str(tree), *filter(None, [str(ROOT / "src"), environment.get("PYTHONPATH", "")])])
            command = [sys.executable, "-m", "samebits.bench.backward", *([str(tests)] if tests else [])]
            done = subprocess.run(command, stdout=subprocess.PIPE, env=environment | {"PYTHONPATH": path}, check=False)
            if done.returncode:
                raise BackwardError(f"the arm {name} ended with code {done.returncode}; what it printed says why")
            arms[name] = json.loads(done.stdout.splitlines()[-1])
    return BACKWARD.build(
        command="samebits bench backward" + (" --tests TESTS" if tests else ""),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        card=card(),
        transformer_engine=importlib.metadata.version("transformer-engine"),
        sizes={**vars(Sizes()), "splits": list(Sizes().splits)},
        arms=arms,
    )


def table(finding: Mapping[str, Any]) -> Table:
    """A row a module, recipe and mode of the patched arm: its largest error, memory, and time against the default."""
    drawn = Table(title=f"backward modes on {finding['card']['name']}, patched", box=box.SIMPLE)
    for column in ("module", "recipe", "mode", "error", "from unquantized", "kept MB", "peak MB", "ms", "÷ default"):
        drawn.add_column(column, justify="right", no_wrap=True)
    plain: dict[tuple[str, str], float] = {}
    for row in finding["arms"]["patched"]["rows"]:
        place = (row["module"], row["recipe"])
        if "refused" in row:
            drawn.add_row(*place, row["mode"], row["refused"][:60], *[""] * 5)
            continue
        taken = row["milliseconds"]
        first = plain.setdefault(place, taken)
        errors = (max(filter(None, row[key].values()), default=0.0) for key in ("error", "distance"))
        sizes = (row[key] / 1e6 for key in ("kept_bytes", "peak_bytes"))
        cells = (
            *(f"{e:.2g}" for e in errors),
            *(f"{size:.0f}" for size in sizes),
            f"{taken:.2f}",
            f"{taken / first:.2f}",
        )
        drawn.add_row(*place, row["mode"], *cells)
    return drawn


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve() if sys.argv[1:] else None
    said = measure(Sizes(), "cuda", folder, lambda phase: print(phase, file=sys.stderr, flush=True))
    print(json.dumps(said))
