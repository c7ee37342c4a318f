"""One optimizer step beside a reference: the gradients that the optimizer takes, and the change of each FP32 main.

Both are looked at where they count. A gradient is read when Adam takes it, after whatever the step scales it by; a main
is the very tensor that Adam holds; and a change is that of the main, so that a gradient of zero under weight decay is a
change, and a frozen parameter one that does not move (seed 000, "Common false differences").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.errors import SamebitsError

from .vjp import UNIT, Measured, Problem, Tensors, draws, factor, measure, settled


class UpdateError(SamebitsError):
    """A parameter that an optimizer does not hold, or a step that it did not take."""


@dataclass(frozen=True)
class Moments:
    """A parameter's FP32 main and Adam's state before a step, the `step`-th, counted from 1."""

    main: Tensor
    first: Tensor
    second: Tensor
    weight_decay: float
    step: int


@dataclass(frozen=True)
class AdamW:
    """One step of decoupled Adam. clip: the most that the global norm of all gradients may be; 0: any."""

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    clip: float

    def clipped(self, gradients: Tensors) -> Tensors:
        """The gradients as the step takes them."""
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        by = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0
        return {name: g * by for name, g in gradients.items()}

    def changes(self, state: Mapping[str, Moments], taken: Tensors) -> Tensors:
        """The FP64 change of each main by gradients that were clipped."""
        changes = {}
        for name, of in state.items():
            first = self.beta1 * of.first.double() + (1 - self.beta1) * taken[name]
            second = self.beta2 * of.second.double() + (1 - self.beta2) * taken[name].square()
            first, second = first / (1 - self.beta1**of.step), second / (1 - self.beta2**of.step)
            decay = of.weight_decay * of.main.double()
            changes[name] = -self.learning_rate * (first / (second.sqrt() + self.epsilon) + decay)
        return changes


def moments(adam: torch.optim.Optimizer, mains: Mapping[str, Tensor]) -> dict[str, Moments]:
    """Adam's state of each main before the next step, by the parameter's name.

    Raises:
        UpdateError: a tensor that Adam does not hold, such as a copy for the computation.
    """
    found = {}
    for name, main in mains.items():
        group = next((g for g in adam.param_groups if any(one is main for one in g["params"])), None)
        if group is None:
            raise UpdateError(
                f"{name}: the optimizer does not hold this tensor; it is a copy: take the one in its param_groups"
            )
        state = adam.state[main]
        zero = torch.zeros_like(main)
        first, second = (state.get(key, zero).detach().clone() for key in ("exp_avg", "exp_avg_sq"))
        step = int(state.get("step", 0)) + 1
        found[name] = Moments(main.detach().clone(), first, second, group["weight_decay"], step)
    return found


@torch.no_grad()
def level(adam: torch.optim.Optimizer) -> None:
    """Give all elements of a parameter the mean of their second moments, before a step that is to be compared.

    An element whose gradients were next to nothing is divided by next to nothing: its update is the sign of rounding,
    on either side. From a level state an update is as well conditioned as its gradient."""
    for state in adam.state.values():
        state["exp_avg_sq"].fill_(state["exp_avg_sq"].mean())


def taken(
    adam: torch.optim.Optimizer, mains: Mapping[str, Tensor], step: Callable[[], None]
) -> dict[str, Tensor | None]:
    """Run `step`; the gradient of each main at the moment in which Adam takes it, None where there is none.

    Raises:
        UpdateError: Adam took no step, or more than one.
    """
    seen: list[dict[str, Tensor | None]] = []

    def look(*_: object) -> None:
        seen.append({n: None if m.grad is None else m.grad.detach().clone() for n, m in mains.items()})

    handle = adam.register_step_pre_hook(look)
    try:
        step()
    finally:
        handle.remove()
    if len(seen) != 1:
        raise UpdateError(f"the optimizer took {len(seen)} steps in what was to be one: look at one step")
    return seen[0]


def beside(
    gradients: Mapping[str, Tensor | None],
    changes: Mapping[str, Tensor],
    state: Mapping[str, Moments],
    optimizer: AdamW,
    problem: Problem,
    frozen: Collection[str] = (),
) -> tuple[list[Measured], list[Measured]]:
    """Layer 1 of one step: gradients as they were taken, and changes of mains, each beside the reference's.

    problem: whose reference's gradients are what should have been taken, without the frozen parameters. What its noise
    moves is the floor of both; to that of a change comes the rounding of the main in FP32. A frozen parameter's change
    must be zero.
    """
    exact, moved = draws(problem)
    kept = [name for name in state if name not in frozen]
    exact, *moved = (optimizer.clipped({name: one[name] for name in kept}) for one in (exact, *moved))
    own = {name: state[name] for name in kept}
    change, *moved_changes = (optimizer.changes(own, one) for one in (exact, *moved))
    times, wide = factor(problem.dtype, problem.reduction), torch.float32
    of_gradients, of_changes = [], []
    for name in kept:
        rounding = exact[name].abs() * UNIT[wide]
        against = settled(exact[name], [one[name] for one in moved], rounding)
        of_gradients.append(measure(name, gradients[name], against, wide, times))
        rounding = state[name].main.double().abs() * UNIT[wide]
        against = settled(change[name], [one[name] for one in moved_changes], rounding)
        of_changes.append(measure(name, changes[name], against, wide, times))
    for name in frozen:
        none = torch.zeros_like(changes[name], dtype=torch.float64)
        of_changes.append(measure(name, changes[name], settled(none, [none], none), wide, times))
    return of_gradients, of_changes
