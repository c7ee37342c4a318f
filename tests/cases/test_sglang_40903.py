"""sglang#40903: a prefix's base-2 LSE is merged as a natural logarithm with a suffix's, on each hit of a prefix cache.

The report's sizes: 3072 keys of prefix and 64 new tokens. Each part attends by itself, and its LSE says how much it
weighs. Off by 1 / ln 2 the prefix weighs far too much, outputs stay plausible, and gradients go wrong with them.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from samebits.judge import vjp
from samebits.judge.modules import MODULES, Draw, Drawn, Module
from samebits.judge.vjp import Problem
from samebits.probe.specimens import specimen

PREFIX, SUFFIX, HEADS, HEAD = 3072, 64, 2, 64


def merged(t: Any, c: Any, base: float) -> torch.Tensor:
    """Both parts by themselves and put together, in plain autograd; base: of the prefix's LSE, read as natural."""
    query, key, value = (t[name].float().permute(1, 2, 0, 3) for name in ("query", "key", "value"))
    scores = query @ key.transpose(-1, -2) * c["scale"]
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(c["prefix"] + 1)
    scores = scores.masked_fill(later, -torch.inf)
    parts = [(scores[..., :PREFIX], value[..., :PREFIX, :]), (scores[..., PREFIX:], value[..., PREFIX:, :])]
    lses = [torch.logsumexp(one, -1, keepdim=True) for one, _ in parts]
    lses[0] = lses[0] / math.log(base)
    outs = [torch.softmax(one, -1) @ v for one, v in parts]
    whole = torch.logaddexp(*lses)
    out = outs[0] * torch.exp(lses[0] - whole) + outs[1] * torch.exp(lses[1] - whole)
    return out.permute(2, 0, 1, 3).flatten(2).to(t["query"].dtype)


def draw(d: Draw) -> Drawn:
    inputs = {name: d(PREFIX + SUFFIX, 1, HEADS, HEAD) for name in ("key", "value")}
    inputs = {"query": d(SUFFIX, 1, HEADS, HEAD), **inputs}
    return Drawn(inputs, {"scale": HEAD**-0.5, "prefix": PREFIX}, PREFIX + SUFFIX)


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def problem(request: pytest.FixtureRequest) -> Problem:
    module = Module("merged attention", MODULES["merged attention"].surrogate, {"3072 and 64": draw})
    return module.problem("3072 and 64", request.param, "random", 0)


def wrong(candidate: Any, problem: Problem) -> dict[str, str]:
    return {one.tensor: str(one.wrong) for one in vjp.compare(candidate, problem) if one.wrong}


def test_parts_that_are_merged_by_natural_logarithms_are_the_whole(problem: Problem) -> None:
    def right(t: Any, c: Any) -> torch.Tensor:
        return merged(t, c, math.e)

    error, allowed = vjp.forward_error(right, problem)
    assert error <= allowed and wrong(right, problem) == {}


def test_a_base_2_lse_is_told_by_the_forward_and_by_every_gradient(problem: Problem) -> None:
    def base_2(t: Any, c: Any) -> torch.Tensor:
        return merged(t, c, 2.0)

    error, allowed = vjp.forward_error(base_2, problem)
    print(f"{problem.dtype}: output off by {error:.2e}, {allowed:.2e} is allowed")
    assert error > allowed
    assert wrong(base_2, problem).keys() == {"query", "key", "value"}


def test_a_backward_that_mixes_the_bases_is_named_though_the_forward_is_right(problem: Problem) -> None:
    """The forward's merge is right; the backward makes the probabilities again from the two LSEs of two bases."""
    planted = specimen("merged attention", "base-2 LSE in a natural-log merge")
    error, allowed = vjp.forward_error(planted, problem)
    assert error <= allowed and wrong(planted, problem).keys() == {"query", "key", "value"}
