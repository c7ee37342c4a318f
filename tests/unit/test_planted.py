"""Planted faults without engines: what counts as named, what a document must hold, and what a README says of it."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from test_bench import identity, measured
from test_invariance import alter, flip, judged, record

from samebits.errors import SamebitsError
from samebits.evidence import invariance, planted
from samebits.evidence.measurement import BENCH
from samebits.judge import missed_faults
from samebits.judge.localise import first_difference
from samebits.judge.matrix import cells
from samebits.judge.planted import KINDS, SEEDS, operators_of
from samebits.report import render_measured

NORM = "model.layers.2.post_attention_layernorm"
Row = dict[str, Any]


@pytest.mark.parametrize(
    ("arm", "kind", "module", "operator"),
    [
        (0, "weight", "model.layers.0.mlp.down_proj", ("aten.linear.default", 0)),
        (1, "weight", "model.layers.0.self_attn.qkv_proj", ("batch_invariant.linear.default", 0)),
        (0, "weight", "model.layers.1.self_attn.q_norm", ("aten.mul.Tensor", 1)),
        (0, "epsilon", "model.layers.1.self_attn.q_norm", ("aten.add.Tensor", 0)),
        (0, "epsilon", NORM, ("aten.add.Tensor", 1)),
        (0, "epsilon", "model.layers.0.input_layernorm", ("aten.add.Tensor", 0)),
        (0, "epsilon", "model.layers.1.input_layernorm", ("aten.add.Tensor", 1)),
        (1, "epsilon", "model.layers.0.input_layernorm", ("batch_invariant.rms_norm.default", 0)),
        (1, "epsilon", "model.layers.10.input_layernorm", ("batch_invariant.add_rms_norm.default", 0)),
        (1, "weight", NORM, ("batch_invariant.add_rms_norm.default", 0)),
    ],
)
def test_the_operator_in_which_a_fault_shows(arm: int, kind: str, module: str, operator: tuple[str, int]) -> None:
    assert operators_of(arm, kind, module)[0] == operator


def row(arm: int, seed: int) -> Row:
    kind = KINDS[seed % 3]
    ((operator, call),) = operators_of(arm, kind, NORM)
    place = {"layer": 2, "module": NORM, "operator": operator, "call": call}
    named = {**place, "weight": None, "request": "first", "position": 1, "differ": 3, "rows": 37}
    truth = {"kind": kind, **place, "what": "a fault"}
    return {"seed": seed, "truth": truth, "named": named, "right": True, "unchanged": None, "seconds": 2.5}


def document() -> dict[str, Any]:
    return planted.KIND.build(
        command="samebits check planted",
        date="2026-01-31",
        arms={str(arm): {"start_seconds": 9.0, "seeds": [row(arm, seed) for seed in SEEDS]} for arm in (0, 1)},
        executions={str(arm): identity(arm) for arm in (0, 1)},
    )


def test_all_named_and_nobody_accused() -> None:
    assert missed_faults(document()) == []


def other_operator(one: Row) -> None:
    one["truth"]["operator"] = one["named"]["operator"] = "aten.to.dtype"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda one: one.update(named=None, right=False), "the planted fault was not named"),
        (lambda one: one["named"].update(operator="aten.to.dtype"), "the planted fault was not named"),
        (lambda one: one["named"].update(call=3), "the planted fault was not named"),
        (lambda one: one["named"].update(layer=3), "the planted fault was not named"),
        (lambda one: one.update(right=False), "right is False"),
        (lambda one: one.update(unchanged=one["named"]), "the unchanged run was accused"),
        (lambda one: one.update(seconds=60.5), "took 60.5 s, more than 60"),
        (lambda one: one["truth"].update(kind="operator"), "a fault of kind operator"),
        (other_operator, f"aten.to.dtype is not the operator of {NORM}"),
    ],
)
def test_what_is_wrong_with_a_seed_is_said(change: Callable[[Row], None], said: str) -> None:
    found = document()
    change(found["arms"]["1"]["seeds"][1])
    assert f"BI=1, seed 101: {said}" in missed_faults(found)


def test_seeds_arms_and_contracts_are_those_that_are_claimed() -> None:
    fewer, one_arm, ignored = document(), document(), document()
    del fewer["arms"]["0"]["seeds"][7]
    assert missed_faults(fewer) == ["BI=0: not the seeds 100 to 119"] and missed_faults(fewer, None) == []
    del one_arm["arms"]["0"]
    assert missed_faults(one_arm) == ["tried at BI=1 only"] and missed_faults(one_arm, None) == []
    ignored["executions"]["1"]["contract"] = None
    assert missed_faults(ignored) == ["BI=1 computed by no contract"]


def test_a_weight_accuses_the_operator_that_shows_it_and_the_first_if_none_does() -> None:
    keys = [["n.norm", "to", 0], ["n.norm", "mul", 0], ["n.norm", "output", 0], ["n.next", "linear", 0]]

    def trace(weight: str, *digests: str) -> dict[str, Any]:
        rows = {"r": {"0": {str(k): digest for k, digest in enumerate(digests)}}}
        return {"operators": keys, "rows": rows, "weights": {"n.norm.weight": weight}}

    one = trace("w", "a", "b", "c", "d")
    shown = first_difference(one, trace("v", "a", "x", "x", "x"))
    assert shown is not None and (shown.operator, shown.weight, shown.differ) == ("mul", "n.norm.weight", 1)
    for hidden in (trace("v", "a", "b", "c", "d"), trace("v", "a", "b", "c", "x")):
        found = first_difference(one, hidden)
        assert found is not None and (found.operator, found.weight, found.differ) == ("to", "n.norm.weight", 0)


def matrix(out: pathlib.Path) -> dict[str, Any]:
    """A quick matrix of both arms in fp32; BI=0 differs in one cell."""
    record(out, quick=True, arms=(0, 1))
    alter(out, 0, "base", flip("batch-8", "victim-20"))
    return judged(out)


def test_the_readme_is_told_what_the_files_hold(tmp_path: pathlib.Path) -> None:
    invariance.KIND.write(tmp_path / "invariance.json", matrix(tmp_path / "out"))
    planted.KIND.write(tmp_path / "planted.json", document())
    BENCH.write(tmp_path / "bench.json", measured(decode=[96.0, 97.0, 120.0, 140.0, 80.0]))
    said = render_measured(tmp_path)
    prose = " ".join(said.split())
    number = len(cells(True))
    assert f"differs: BI=0 1 of {number} in float32, BI=1 0 of {number} in float32 (`invariance.json`)" in prose
    assert "by layer, module and operator: 20 of 20 at BI=0, 20 of 20 at BI=1" in prose
    assert (
        "unchanged runs that were accused: 0 of 20 at BI=0, 0 of 20 at BI=1; seconds a seed: 2.5, at most 2.5" in prose
    )
    assert "beside other work of load 0.5: the median of 5 rounds, the least and the largest" in prose
    assert "| decode, 1 request, tokens/s | 100 (100 to 100) | 97 (80 to 140) | 0.97 (0.80 to 1.40) | ≥ 0.95 |" in said
    assert said.count("\n| ") == 1 + 4 and max(map(len, said.splitlines())) <= 120

    BENCH.write(tmp_path / "bench.json", measured(decode=[90.0] * 5))
    with pytest.raises(SamebitsError, match=r"bench\.json is not what it must be: decode, 1 request: 0\.90"):
        render_measured(tmp_path)
