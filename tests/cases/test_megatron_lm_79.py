"""ISEEKYAN/Megatron-LM#79: a replayed route reads a probability that this forward's own top k set to zero.

A trainer that replays the rollout's routes gathers their probabilities. If it gathers them after the router has zeroed
whatever is not in its own top k, a route on which rollout and trainer disagree reads exactly zero: the expert has no
weight and the router no gradient, silently. They must come from the whole softmax.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samebits.judge import vjp
from samebits.judge.modules import MODULES

TOKENS = MODULES["router"]


def replay(t: Any, c: Any, zeroed: bool) -> torch.Tensor:
    """Normalized probabilities of the given routes, by plain autograd."""
    probabilities = torch.softmax(t["x"].float() @ t["weight"].float().t(), -1)
    if zeroed:
        own = probabilities.topk(c["routes"].shape[-1], -1).indices
        probabilities = probabilities * torch.zeros_like(probabilities).scatter(-1, own, 1.0)
    chosen = probabilities.gather(-1, c["routes"])
    return (chosen / chosen.sum(-1, keepdim=True).clamp(min=1e-20)).to(t["x"].dtype)


def whole(t: Any, c: Any) -> torch.Tensor:
    return replay(t, c, zeroed=False)


def masked(t: Any, c: Any) -> torch.Tensor:
    return replay(t, c, zeroed=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("case", list(TOKENS.cases))
def test_probabilities_of_the_whole_softmax_are_right_on_any_routes(case: str, dtype: torch.dtype) -> None:
    problem = TOKENS.problem(case, dtype, "random", 0)
    assert not [one for one in vjp.compare(whole, problem) if one.wrong]


def test_routes_that_drifted_kill_the_gradient_and_are_named() -> None:
    problem = TOKENS.problem("replayed routes", torch.float32, "random", 0)
    found = {one.tensor: one for one in vjp.compare(masked, problem)}
    assert found["weight"].wrong == found["x"].wrong == "off"
    error, allowed = vjp.forward_error(masked, problem)
    assert error > allowed
    # Of a token none of whose routes this forward would take itself, nothing is left.
    logits = problem.inputs["x"].double() @ problem.inputs["weight"].double().t()
    own = logits.topk(2, -1).indices
    drifted = ~(problem.constants["routes"][..., None] == own[:, None]).any(-1).any(-1)
    gradient = vjp.gradients(masked, problem)["x"]
    assert drifted.any() and gradient is not None and not gradient[drifted].any()
    assert vjp.expected(problem)["x"].gradient[drifted].abs().amax(-1).min() > 0


def test_routes_that_did_not_drift_hide_it() -> None:
    problem = TOKENS.problem("top two", torch.float32, "random", 0)
    assert not [one for one in vjp.compare(masked, problem) if one.wrong]


def test_a_sum_and_its_backward_do_not_see_it() -> None:
    """The probabilities of a token sum to one, or to zero: either way the sum's gradient is none."""
    for case in TOKENS.cases:
        problem = TOKENS.problem(case, torch.float32, "ones", 0)
        assert not [one for one in vjp.compare(masked, problem) if one.wrong and one.resolved]
