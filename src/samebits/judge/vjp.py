"""Layer 1: a module's gradients against a reference that does not call the backward under test.

The reference is autograd of a surrogate: the module's formula in plain PyTorch, in FP64. Where a formula goes through
values that the module's own forward rounded or quantized, `Bridge` puts those in and lets the gradient pass to the
surrogate (seed 000, "How to build the reference implementation").

How large an error may be is known before the module runs. The noise floor of a gradient is what the reference itself
moves, in L2, when each element of its inputs, of its cotangents and of the values that it was shown moves by at most
the unit roundoff u of the dtype, at random, and what rounding the result to the dtype adds (a third of u² times its
square). A right backward rounds at those places, so its error is about the floor, however ill-conditioned the gradient
is. The tolerance is

    floor · (2 + √n · 2⁻²⁴ / u)

The 2 is the margin of an estimate from `SAMPLES` draws; the second term are the FP32 roundings of the longest way to an
element, n terms of a sum or operations one after another, which add up like √n. The reference's own error, n · 2⁻⁵³, is
nothing beside it. An element may be off by twice as much as the largest element of a draw was moved. No argument
changes any of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

UNIT = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
SAMPLES = 3
DIFFERENCES = 2.0**-14
RESOLVED = 1 / 8  # a floor above this part of the gradient's norm hides a fault: such a comparison covers nothing

Cotangent = Literal["random", "ones", "zero", "sparse", "recorded"]
Tensors = dict[str, Tensor]
Outputs = Tensor | tuple[Tensor, ...]
# What is judged: the differentiable inputs by name, and what is not differentiated (indices, tables, numbers).
Candidate = Callable[[Tensors, Mapping[str, Any]], Outputs]


class _Visible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, visible: Tensor, surrogate: Tensor) -> Tensor:
        return visible.view_as(visible)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


def visible_with_surrogate(visible: Tensor, surrogate: Tensor) -> Tensor:
    """The bits of `visible`, and the gradient of `surrogate`. ValueError if shape, dtype or device differ."""
    if (visible.shape, visible.dtype, visible.device) != (surrogate.shape, surrogate.dtype, surrogate.device):
        raise ValueError(
            f"a visible value {tuple(visible.shape)} of {visible.dtype} for a surrogate {tuple(surrogate.shape)} of "
            f"{surrogate.dtype}: the formula is not the module's"
        )
    return _Visible.apply(visible.detach(), surrogate)


class Bridge:
    """What a surrogate is shown of the forward under test.

    visible: the forwards by the names that a surrogate uses, each from tensors of `dtype` to tensors of it. noise:
    draws what a shown value is moved by; None: nothing.
    """

    def __init__(
        self, dtype: torch.dtype, visible: Mapping[str, Callable[..., Outputs]], noise: torch.Generator | None = None
    ):
        self.dtype, self.visible, self.noise = dtype, visible, noise

    def show(self, name: str, surrogate: Tensor, *inputs: Any) -> Tensor:
        """The forward's output for these inputs [any, FP64 where floating], with the surrogate's gradient."""
        with torch.no_grad():
            seen = self.visible[name](*(self._narrow(one) for one in inputs))
        assert isinstance(seen, Tensor)
        return visible_with_surrogate(self.moved(seen.to(surrogate.dtype)), surrogate)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """A linear layer of a composite: x [..., K] and weight [N, K] -> [..., N]."""
        return self.show("linear", x @ weight.T, x, weight)

    def moved(self, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The value, or each element times 1 + u · r, r uniform in [-1, 1].

        dtype: of the value where it is kept, whose unit roundoff u is; default: the one under test."""
        if self.noise is None or not value.is_floating_point():
            return value
        drawn = torch.rand(value.shape, generator=self.noise, dtype=torch.float64) * 2 - 1
        return value * (1 + UNIT[dtype or self.dtype] * drawn)

    def known(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """An intermediate value that a module keeps in `dtype`: moved, with its own gradient."""
        return visible_with_surrogate(self.moved(value, dtype), value)

    def _narrow(self, one: Any) -> Any:
        return one.detach().to(self.dtype) if isinstance(one, Tensor) and one.is_floating_point() else one


Surrogate = Callable[[Tensors, Mapping[str, Any], Bridge], Outputs]


@dataclass(frozen=True)
class Problem:
    """One VJP. inputs: the differentiable ones, in the dtype. constants: what is not differentiated. cotangents: one an
    output, both sides get these very ones. reduction: FP32 roundings on the longest way to an element of a gradient.
    visible: the forwards that the surrogate is shown."""

    module: str
    case: str
    dtype: torch.dtype
    inputs: Tensors
    constants: Mapping[str, Any]
    cotangent: Cotangent
    cotangents: tuple[Tensor, ...]
    surrogate: Surrogate
    reduction: int
    visible: Mapping[str, Callable[..., Outputs]] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class Expected:
    """A gradient in FP64, its noise floor in L2, and the largest movement of one of its elements."""

    gradient: Tensor
    floor: float
    largest: float


@dataclass(frozen=True)
class Measured:
    """One gradient beside its reference.

    max_abs: largest error; None where there is nothing to subtract. relative: L2 error over the reference's norm.
    norm_ratio: the norms'. cosine: None where a norm is zero, as the two before are then. floor, tolerance: relative
    too, or absolute where the reference is zero. wrong: what is wrong, or None. resolved: whether the floor is low
    enough to tell.
    """

    tensor: str
    max_abs: float | None
    relative: float | None
    norm_ratio: float | None
    cosine: float | None
    floor: float
    tolerance: float
    resolved: bool
    wrong: str | None

    @property
    def multiple(self) -> float | None:
        """The error in noise floors."""
        return self.relative / self.floor if self.relative is not None else None


def cotangents_like(kind: Cotangent, outputs: Sequence[Tensor], generator: torch.Generator) -> tuple[Tensor, ...]:
    """One cotangent an output, in its dtype. sparse: zero but for one element in 16, at least one, of random values."""
    made = []
    for out in outputs:
        values = torch.randn(out.shape, generator=generator).to(out.dtype)
        if kind == "ones":
            values = torch.ones_like(out)
        elif kind == "zero":
            values = torch.zeros_like(out)
        elif kind == "sparse":
            kept = torch.randperm(out.numel(), generator=generator)[: max(out.numel() // 16, 1)]
            mask = torch.zeros(out.numel(), dtype=torch.bool)
            mask[kept] = True
            values = torch.where(mask.view(out.shape), values, torch.zeros_like(values))
        made.append(values)
    return tuple(made)


def gradients(candidate: Candidate, problem: Problem) -> dict[str, Tensor | None]:
    """The candidate's gradients of the problem's inputs, through its own backward; None for one that it does not give.

    ValueError if its outputs are not of the cotangents' shapes and dtypes: both sides take the same cotangents."""
    leaves = {name: one.detach().clone().requires_grad_() for name, one in problem.inputs.items()}
    outputs = _tuple(candidate(dict(leaves), problem.constants))
    for out, cotangent in zip(outputs, problem.cotangents, strict=True):
        if (out.shape, out.dtype) != (cotangent.shape, cotangent.dtype):
            raise ValueError(
                f"{problem.module}, {problem.case}: an output {tuple(out.shape)} of {out.dtype} for a cotangent "
                f"{tuple(cotangent.shape)} of {cotangent.dtype}: give both sides the cotangent that the output has"
            )
    reached = [(out, c) for out, c in zip(outputs, problem.cotangents, strict=True) if out.requires_grad]
    if not reached:
        return dict.fromkeys(leaves)
    outs, given = zip(*reached, strict=True)
    found = torch.autograd.grad(outs, list(leaves.values()), given, allow_unused=True)
    return dict(zip(leaves, found, strict=True))


def expected(problem: Problem) -> dict[str, Expected]:
    """The reference's gradients, with what noise of one unit roundoff moves in them."""
    exact, moved = draws(problem)
    unit = UNIT[problem.dtype]
    return {name: settled(one, [m[name] for m in moved], unit * one) for name, one in exact.items()}


def draws(problem: Problem) -> tuple[Tensors, list[Tensors]]:
    """The reference's gradients, and those of `SAMPLES` draws of noise."""
    noise = [torch.Generator().manual_seed(1_000_003 * problem.seed + i) for i in range(SAMPLES)]
    return _reference(problem, None), [_reference(problem, one) for one in noise]


def settled(exact: Tensor, moved: Sequence[Tensor], rounding: Tensor) -> Expected:
    """A value, its draws, and the most by which each element is off after its last rounding -> what is expected."""
    steps = [one - exact for one in moved]
    square = sum(float(step.square().sum()) for step in steps) / len(steps)
    floor = math.sqrt(square + float(rounding.square().sum()) / 3)
    largest = max(float(t.abs().max()) if t.numel() else 0.0 for t in (*steps, rounding / 2))
    return Expected(exact, floor, largest)


def _reference(problem: Problem, noise: torch.Generator | None) -> Tensors:
    bridge = Bridge(problem.dtype, problem.visible, noise)
    leaves = {n: bridge.moved(t.detach().double()).requires_grad_() for n, t in problem.inputs.items()}
    outputs = _tuple(problem.surrogate(dict(leaves), problem.constants, bridge))
    given = [bridge.moved(c.double()) for c in problem.cotangents]
    found = torch.autograd.grad(
        [out.double() for out in outputs], list(leaves.values()), given, allow_unused=True, materialize_grads=True
    )
    return dict(zip(leaves, found, strict=True))


def factor(dtype: torch.dtype, reduction: int) -> float:
    """The tolerance in noise floors."""
    return 2 + math.sqrt(reduction) * 2.0**-24 / UNIT[dtype]


def measure(name: str, found: Tensor | None, against: Expected, dtype: torch.dtype, times: float) -> Measured:
    """Compare one gradient, which must be of `dtype`, with its reference. times: `factor`."""
    exact = against.gradient
    norm = float(exact.norm())
    scale = norm or 1.0
    floor, tolerance = against.floor / scale, times * against.floor / scale
    resolved = norm == 0 or floor <= RESOLVED
    wrong = None
    if found is None:
        wrong = "missing" if norm else None
        found = torch.zeros_like(exact)
    elif found.shape != exact.shape:
        wrong = f"of shape {tuple(found.shape)}, not {tuple(exact.shape)}"
    elif found.dtype != dtype:
        wrong = f"of {NAMES.get(found.dtype, found.dtype)}, not {NAMES[dtype]}"
    elif not torch.isfinite(found).all():
        wrong = "not finite"
    if wrong is not None and wrong != "missing":
        return Measured(name, None, None, None, None, floor, tolerance, resolved, wrong)
    ours = found.double()
    error, ours_norm = ours - exact, float(ours.norm())
    max_abs = float(error.abs().max()) if error.numel() else 0.0
    relative = float(error.norm()) / norm if norm else None
    cosine = float((ours * exact).sum()) / (norm * ours_norm) if norm and ours_norm else None
    if wrong is None and float(error.norm()) > times * against.floor:
        wrong = "off" if norm else "not zero"
    if wrong is None and max_abs > 2 * times * against.largest:
        wrong = "off at an element"
    ratio = ours_norm / norm if norm else None
    return Measured(name, max_abs, relative, ratio, cosine, floor, tolerance, resolved, wrong)


def compare(candidate: Candidate, problem: Problem, against: Mapping[str, Expected] | None = None) -> list[Measured]:
    """Layer 1 of one problem: each input's gradient beside its reference. against: `expected` of it, if it is known."""
    return beside(gradients(candidate, problem), problem, against)


def beside(
    found: Mapping[str, Tensor | None], problem: Problem, against: Mapping[str, Expected] | None = None
) -> list[Measured]:
    """Layer 1 of one problem whose gradients are there already: each beside its reference."""
    against, times = against or expected(problem), factor(problem.dtype, problem.reduction)
    return [measure(name, found[name], against[name], one.dtype, times) for name, one in problem.inputs.items()]


def forward_error(candidate: Candidate, problem: Problem) -> tuple[float, float]:
    """The largest relative L2 error of an output beside the surrogate's, and how large it may be.

    A surrogate whose value is not the forward's is the surrogate of something else."""
    with torch.no_grad():
        outputs = _tuple(candidate({n: t.detach() for n, t in problem.inputs.items()}, problem.constants))
        values = []
        for noise in (None, *(torch.Generator().manual_seed(i) for i in range(SAMPLES))):
            bridge = Bridge(problem.dtype, problem.visible, noise)
            leaves = {n: bridge.moved(t.detach().double()) for n, t in problem.inputs.items()}
            values.append(_tuple(problem.surrogate(leaves, problem.constants, bridge)))
    worst, most, unit = 0.0, math.inf, UNIT[problem.dtype]
    for i, out in enumerate(outputs):
        exact = values[0][i].double()
        if not (norm := float(exact.norm())):
            continue
        moved = max(float((one[i].double() - exact).norm()) for one in values[1:]) / norm
        allowed = factor(problem.dtype, problem.reduction) * math.hypot(moved, unit / math.sqrt(3))
        error = float((out.double() - exact).norm()) / norm
        if error / allowed >= worst / most:
            worst, most = error, allowed
    return worst, most


def finite_difference_error(problem: Problem) -> float:
    """The largest error of the reference itself, for a smooth module: its directional derivatives beside differences.

    In FP64, central differences of step 2^-17 times an input's scale along one random direction an input, relative to
    the derivative's own size. `DIFFERENCES` bounds it: a step is at most 2^-7 of what a formula's curvature is measured
    in (a row of zeros under an epsilon of 1e-6), and the error its square, 2^-14.
    """
    generator = torch.Generator().manual_seed(problem.seed + 77)
    exact, worst = _reference(problem, None), 0.0

    def value(inputs: Tensors) -> float:
        bridge = Bridge(problem.dtype, problem.visible)
        with torch.no_grad():
            outputs = _tuple(problem.surrogate(inputs, problem.constants, bridge))
        return sum(float((o.double() * c.double()).sum()) for o, c in zip(outputs, problem.cotangents, strict=True))

    wide = {n: t.detach().double() for n, t in problem.inputs.items()}
    for name, one in wide.items():
        scale = float(one.abs().max()) if one.numel() else 0.0
        if not scale:
            continue
        direction = torch.randn(one.shape, generator=generator, dtype=torch.float64) * (2.0**-17 * scale)
        difference = (value({**wide, name: one + direction}) - value({**wide, name: one - direction})) / 2
        along = float((exact[name] * direction).sum())
        size = float(exact[name].norm() * direction.norm())
        if size:
            worst = max(worst, abs(difference - along) / size)
    return worst


def _tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
