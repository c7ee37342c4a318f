"""The judge: bits are compared as bits, every rule of a verdict has its lie, and the untouched control passes."""

from __future__ import annotations

import ast
import json
import math
import shutil
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from runs import BOUNDS, half_true, make_run, rewrite

import samebits.judge
from samebits.evidence import receipt
from samebits.evidence.capsule import Tensor
from samebits.judge import JudgeError, compare, judge_run, read_bounds, rejudge, summary
from samebits.sources.pins import ROOT

Lie = Callable[[Path], Any]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The two controls: arm 0, whose logprobs differ a little, and arm 1, whose logprobs do not."""
    folder = tmp_path_factory.mktemp("runs")
    return {arm: make_run(folder / f"arm{arm}", arm) for arm in (0, 1)}


@pytest.fixture
def run(runs: dict[int, Path], tmp_path: Path) -> Path:
    """A copy of the control of arm 1, to tell a lie in."""
    shutil.copytree(runs[1], tmp_path / "run")
    return tmp_path / "run"


# Comparison of bits

SPECIAL = [0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 1e-45, -1e-45, 1.1754942e-38, -200.0, -300.0, -1.5]
FLOATS = st.sampled_from(SPECIAL) | st.floats(width=32) | st.floats(-5, 0, width=32)


def naive(left: np.ndarray, right: np.ndarray, valid: np.ndarray) -> tuple[int, int, int, float, int | None]:
    """The specification: one position after another, bits by struct."""
    tokens = mismatched = nonfinite = 0
    largest, first = 0.0, None
    for i in range(left.size):
        if not valid.flat[i]:
            continue
        a, b = float(left.flat[i]), float(right.flat[i])
        tokens += 1
        finite = math.isfinite(a) and math.isfinite(b)
        same = struct.pack("<f", a) == struct.pack("<f", b)
        if finite:
            largest = max(largest, abs(a - b))
        else:
            nonfinite += 1
        if not (same and finite):
            mismatched += 1
            first = i if first is None else first
    return tokens, mismatched, nonfinite, largest, first


@given(st.data(), st.integers(1, 4), st.integers(1, 9), st.integers(1, 40))
@settings(max_examples=300, deadline=None)
def test_counts_equal_a_naive_loop(data: st.DataObject, n: int, t: int, piece: int) -> None:
    left = data.draw(hnp.arrays(np.float32, (n, t), elements=FLOATS))
    right = data.draw(hnp.arrays(np.float32, (n, t), elements=FLOATS))
    right = np.where(data.draw(hnp.arrays(bool, (n, t))), left, right).astype(np.float32)
    valid = data.draw(hnp.arrays(bool, (n, t)))
    found = compare(Tensor.of(left), Tensor.of(right), Tensor.of(valid), piece)
    expected = naive(left, right, valid)
    assert (found.valid_tokens, found.mismatched, found.nonfinite, found.max_abs, found.first) == expected


@pytest.mark.parametrize(
    ("a", "b", "mismatched", "nonfinite", "max_abs"),
    [
        (-1.5, -1.5, 0, 0, 0.0),
        (0.0, -0.0, 1, 0, 0.0),
        (-200.0, -300.0, 1, 0, 100.0),
        (math.nan, math.nan, 1, 1, 0.0),
        (-math.inf, -math.inf, 1, 1, 0.0),
        (1e-45, 0.0, 1, 0, float(np.float32(1e-45))),
    ],
)
def test_bits_are_compared_as_bits(a: float, b: float, mismatched: int, nonfinite: int, max_abs: float) -> None:
    left, right = (Tensor.of(np.array([[x]], np.float32)) for x in (a, b))
    found = compare(left, right, Tensor.of(np.array([[True]])))
    assert (found.mismatched, found.nonfinite, found.max_abs) == (mismatched, nonfinite, max_abs)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_one_flipped_bit_is_one_mismatch_in_every_dtype(dtype: str) -> None:
    values = -np.linspace(0.1, 3, 12).reshape(3, 4)
    if dtype == "bfloat16":
        bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        bits = values.astype(dtype).view(f"u{np.dtype(dtype).itemsize}")
    other = bits.copy()
    other[1, 2] ^= 1
    left, right = (Tensor.of(b, dtype) if dtype == "bfloat16" else Tensor.of(b.view(dtype)) for b in (bits, other))
    found = compare(left, right, Tensor.of(np.ones((3, 4), bool)))
    assert (found.valid_tokens, found.mismatched, found.first) == (12, 1, 6)
    assert 0 < found.max_abs < 0.02


def test_padding_does_not_count() -> None:
    left = np.array([[-1.0, math.nan, -2.0]], np.float32)
    right = np.array([[-1.0, 5.0, -2.0]], np.float32)
    found = compare(Tensor.of(left), Tensor.of(right), Tensor.of(np.array([[True, False, True]])))
    assert (found.valid_tokens, found.mismatched, found.nonfinite) == (2, 0, 0)


def test_magnitudes_count_the_differences_by_power_of_two() -> None:
    left = np.zeros((1, 6), np.float32)
    right = -np.array([[0, 0.25, 0.3, 0.5, 2**-20, math.inf]], np.float32)
    found = compare(Tensor.of(left), Tensor.of(right), Tensor.of(np.ones((1, 6), bool)))
    assert found.magnitudes == {-19: 1, -1: 2, 0: 1}


def test_unlike_dtypes_and_shapes_are_not_compared() -> None:
    one, mask = Tensor.of(np.zeros((2, 2), np.float32)), Tensor.of(np.ones((2, 2), bool))
    for other in (Tensor.of(np.zeros((2, 2), np.float16)), Tensor.of(np.zeros((2, 3), np.float32))):
        with pytest.raises(ValueError):
            compare(one, other, mask)


def test_two_million_logprobs_take_less_than_a_second() -> None:
    rng = np.random.default_rng(0)
    left = -rng.exponential(1.0, (1000, 2000)).astype(np.float32)
    right = np.where(rng.random(left.shape) < 0.3, left * np.float32(1.0001), left)
    tensors = Tensor.of(left), Tensor.of(right), Tensor.of(rng.random(left.shape) < 0.9)
    start = time.perf_counter()
    found = compare(*tensors)
    assert time.perf_counter() - start <= 1.0
    assert found.valid_tokens > 1_700_000 and 0 < found.mismatched < found.valid_tokens


# The controls


def test_the_control_of_arm_0_is_observed(runs: dict[int, Path]) -> None:
    document = judge_run(runs[0], "observe", BOUNDS)
    assert (document["verdict"], document["reasons"]) == ("pass", [])
    assert [(c["weights"], c["path"]) for c in document["compares"]] == [
        (weights, path) for weights in ("theta0", "theta1", "theta2") for path in ("recompute", "actor")
    ]
    assert all(0 < c["mismatched"] < c["valid_tokens"] for c in document["compares"])
    assert [(u["from"], u["to"]) for u in document["updates"]] == [("theta0", "theta1"), ("theta1", "theta2")]
    assert [s["weights"] for s in document["sync"]] == ["theta0", "theta1", "theta2"]
    assert "observe: PASS" in summary(document)


def test_the_control_of_arm_1_is_zero(runs: dict[int, Path]) -> None:
    document = judge_run(runs[1], "zero")
    assert (document["verdict"], document["reasons"]) == ("pass", [])
    assert {c["mismatched"] for c in document["compares"]} == {0}


def test_the_control_of_arm_0_is_not_zero(runs: dict[int, Path]) -> None:
    document = judge_run(runs[0], "zero", BOUNDS)
    assert document["verdict"] == "fail"
    assert all("logprobs differ" in r["what"] for r in document["reasons"])


# One lie a rule


def edit(name: str, change: Callable[[dict[str, Any], dict[str, Any]], Any], to: str | None = None) -> Lie:
    return lambda run: rewrite(run, name, change, to)


def put(tensor: str, value: float, where: Any = (0, 0)) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(meta: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors[tensor][where] = value

    return change


def update(**fields: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda meta, tensors: meta["update"].update(fields)


def only_one_group_learns(meta: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["advantages"][tensors["group"] > 0] = 0


def shift(meta: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["actor"] = np.roll(tensors["actor"], 1, axis=1)


def stale_sync(run: Path) -> None:
    source = json.loads((run / "capsules/sync-0000/capsule.json").read_text())["exported"]
    rewrite(run, "sync-0001", lambda meta, tensors: meta.update(exported=source, loaded=source))
    rewrite(run, "fresh-0001", lambda meta, tensors: meta.update(loaded=source))


def unchanged_weights(run: Path) -> None:
    stale_sync(run)
    rewrite(run, "step-0001", update(changed_masters=0))


def replayed(run: Path) -> None:
    from samebits.evidence.capsule import read_capsule

    first = {name: t.read() for name, t in read_capsule(run / "capsules/step-0001").tensors.items()}
    rewrite(run, "step-0002", lambda meta, tensors: tensors.update(first))


def without_a_contract(run: Path) -> None:
    """A run whose identity, in every place, names none."""
    identity = json.loads((run / "execution.json").read_text()) | {"contract": None}
    (run / "execution.json").write_text(json.dumps(identity))
    for folder in sorted((run / "capsules").iterdir()):
        rewrite(run, folder.name, lambda meta, tensors: meta.update(execution=identity))


def empty_log(run: Path) -> None:
    (run / "events.jsonl").write_bytes(b"")
    (run / "events.jsonl.head").write_text(
        json.dumps({"bytes": 0, "seq": 0, "sha256": "0" * 64}, separators=(",", ":"))
    )


def cut(name: str) -> Lie:
    def lie(run: Path) -> None:
        path = run / name
        path.write_bytes(path.read_bytes()[:-1])

    return lie


def remove(name: str) -> Lie:
    def lie(run: Path) -> None:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return lie


LIES: list[tuple[str, Lie, str, str]] = [
    # damage
    (
        "truncated tensors",
        cut("capsules/step-0001/tensors.safetensors"),
        "fail",
        "step-0001/tensors.safetensors: trunc",
    ),
    (
        "truncated sidecar",
        cut("capsules/sync-0002/capsule.json"),
        "fail",
        "sync-0002/capsule.json: truncated or edited",
    ),
    ("truncated sums", cut("capsules/fresh-0001/SHA256SUMS"), "fail", "fresh-0001/SHA256SUMS: truncated or edited"),
    ("a mask that is neither", half_true, "fail", "step-0001/tensors.safetensors: tensor valid holds a byte"),
    ("cut event log", cut("events.jsonl"), "fail", "events.jsonl: cut"),
    ("damaged identity", lambda run: (run / "execution.json").write_text("{"), "fail", "execution.json: not JSON"),
    ("no identity", remove("execution.json"), "fail", "execution.json: cannot be read"),
    (
        "unknown folder",
        lambda run: (run / "capsules/step-1").mkdir(),
        "fail",
        "capsules/step-1: not the name of a capsule",
    ),
    ("empty folder", lambda run: (run / "capsules/step-0004").mkdir(), "fail", "step-0004/SHA256SUMS: missing"),
    (
        "NaN in the rollout",
        edit("step-0002", put("rollout", math.nan)),
        "fail",
        "theta1 recompute: 1 logprobs are infinite",
    ),
    (
        "NaN on both sides",
        edit("step-0002", lambda m, t: [put(p, math.nan)(m, t) for p in ("rollout", "recompute", "actor")]),
        "fail",
        "theta1 actor: 1 logprobs are infinite or NaN",
    ),
    (
        "infinity in the actor",
        edit("step-0003", put("actor", -math.inf)),
        "fail",
        "theta2 actor: 1 logprobs are infinite",
    ),
    ("NaN reward", edit("step-0001", put("reward", math.nan, 0)), "fail", "a reward is infinite or NaN"),
    ("NaN advantage", edit("step-0001", put("advantages", math.nan)), "fail", "an advantage is infinite or NaN"),
    ("no token", edit("step-0001", put("responses", -1)), "fail", "a valid position holds no token"),
    ("prompt too long", edit("step-0001", put("prompt_length", 10, 0)), "fail", "a prompt length is outside 1 to 9"),
    (
        "one path in another dtype",
        edit("step-0001", lambda m, t: t.update(actor=t["actor"].astype(np.float64))),
        "fail",
        "actor is float64, rollout float32",
    ),
    # order and versions
    (
        "two steps exchanged",
        lambda run: [
            edit("step-0001", lambda m, t: None, "x")(run),
            edit("step-0002", lambda m, t: None, "step-0001")(run),
            edit("x", lambda m, t: None, "step-0002")(run),
        ],
        "fail",
        "step-0001: holds step 2 of theta1, not step 1 of theta0",
    ),
    (
        "cross-version comparison",
        edit("step-0002", lambda m, t: m.update(weights="theta0")),
        "fail",
        "holds step 2 of theta0, not step 2 of theta1",
    ),
    (
        "a sync in place of a step",
        lambda run: [
            remove("capsules/step-0001")(run),
            shutil.copytree(run / "capsules/sync-0000", run / "capsules/step-0001"),
        ],
        "fail",
        "holds sync 0 of theta0, not step 1",
    ),
    (
        "an update from elsewhere",
        edit("step-0002", update(**{"from": "theta0"})),
        "fail",
        "update does not lead from theta1",
    ),
    ("tensors of another step", replayed, "fail", "holds the tensors of step-0001"),
    (
        "capsule of another run",
        edit("step-0003", lambda m, t: m["execution"].update(threads=64)),
        "fail",
        "its execution identity is not that of the run",
    ),
    # syncs
    (
        "a tensor not loaded",
        edit("sync-0001", lambda m, t: m["loaded"].popitem()),
        "fail",
        "sync theta1: 1 of 3 tensors in the engine are not the exported ones",
    ),
    (
        "a tensor loaded wrong",
        edit("sync-0001", lambda m, t: m["loaded"]["model.layers.0.weight"].update(sha256="0" * 64)),
        "fail",
        "sync theta1: 1 of 3 tensors in the engine",
    ),
    (
        "a fresh engine on other weights",
        edit("fresh-0002", lambda m, t: m["loaded"]["model.layers.0.weight"].update(shape=[4, 8])),
        "fail",
        "sync theta2: 1 of 3 tensors in the fresh engine",
    ),
    (
        "a probe that differs",
        edit("fresh-0000", put("probe_log_probs", -9.0, (0, 3))),
        "fail",
        "sync theta0: 1 of 12 probe logprobs differ",
    ),
    ("another probe", edit("fresh-0000", put("probe_tokens", 31)), "fail", "its probe is not that of sync-0000"),
    (
        "probe lengths",
        lambda run: [edit(f"{kind}-0000", put("probe_length", 99, 0))(run) for kind in ("sync", "fresh")],
        "fail",
        "a probe's lengths are not",
    ),
    (
        "stale weights synced",
        stale_sync,
        "fail",
        "its weights are those of the sync before, but the update changed 240",
    ),
    (
        "weights changed without an update",
        edit("step-0001", update(changed_masters=0)),
        "fail",
        "its weights differ, but the update changed 0 masters",
    ),
    # the contract
    (
        "a rollout by another contract",
        edit("sync-0001", lambda m, t: m["contracts"].update(rollout="another")),
        "fail",
        "sync theta1: the rollout computes by another, the run by a contract",
    ),
    (
        "a trainer without the operators",
        edit("sync-0002", lambda m, t: m["contracts"].update(trainer=None)),
        "fail",
        "sync theta2: the trainer computes by no contract, the run by a contract",
    ),
    (
        "sides that do not say",
        edit("sync-0000", lambda m, t: m.pop("contracts")),
        "fail",
        "sync theta0: the rollout computes by no contract",
    ),
    (
        "a fresh engine by another contract",
        edit("fresh-0001", lambda m, t: m.update(contract="another")),
        "fail",
        "sync theta1: the fresh engine computes by another",
    ),
    ("a run without a contract", without_a_contract, "fail", "arm 1 without the name of its numerical contract"),
    # what was not shown
    ("a step is missing", remove("capsules/step-0003"), "inconclusive", "capsules/step-0003: missing"),
    ("a sync is missing", remove("capsules/sync-0001"), "inconclusive", "capsules/sync-0001: missing"),
    ("no fresh engine", remove("capsules/fresh-0002"), "inconclusive", "capsules/fresh-0002: missing"),
    ("nothing recorded", remove("capsules"), "inconclusive", "capsules/step-0001: missing"),
    ("no event log", remove("events.jsonl"), "inconclusive", "no event log"),
    ("an event log without an event", empty_log, "inconclusive", "the run did not reach its end"),
    ("bypass", edit("step-0002", lambda m, t: m.update(bypass=True)), "inconclusive", "recomputation was bypassed"),
    ("a sequence seen twice", edit("step-0001", lambda m, t: t["order"].fill(0)), "fail", "see each sequence once"),
    (
        "another configuration",
        lambda run: (run / "config.json").write_text("other"),
        "fail",
        "is not the configuration",
    ),
    ("no configuration", lambda run: (run / "config.json").unlink(), "inconclusive", "no resolved configuration"),
    (
        "zero valid tokens",
        edit("step-0001", lambda m, t: t["valid"].fill(False)),
        "inconclusive",
        "0 valid tokens, fewer than 1000",
    ),
    (
        "a path not executed",
        edit("step-0001", lambda m, t: [t[p].fill(0) for p in ("rollout", "recompute", "actor")]),
        "inconclusive",
        "theta0 actor: every logprob is one and the same value",
    ),
    ("no advantage", edit("step-0001", lambda m, t: t["advantages"].fill(0)), "inconclusive", "0 of 4 groups"),
    (
        "no advantage in the last step",
        edit("step-0003", lambda m, t: t["advantages"].fill(0)),
        "inconclusive",
        "no group has an advantage",
    ),
    (
        "advantage in the padding alone",
        edit("step-0001", lambda m, t: t.update(advantages=np.where(t["valid"], 0, 1).astype(np.float32))),
        "inconclusive",
        "0 of 4 groups",
    ),
    ("few groups with an advantage", edit("step-0002", only_one_group_learns), "inconclusive", "1 of 4 groups"),
    ("one sample n times", edit("step-0001", lambda m, t: t["seed"].fill(7)), "inconclusive", "share a sampling seed"),
    ("zero gradient", edit("step-0001", update(grad_norm=0.0)), "inconclusive", "the gradient is zero"),
    ("more changed than there are", edit("step-0002", update(changed_parameters=1001)), "fail", "more changed than"),
    ("unchanged parameters", edit("step-0002", update(changed_parameters=0)), "inconclusive", "no parameter changed"),
    ("unchanged BF16 weights", unchanged_weights, "inconclusive", "no BF16 master changed"),
    (
        "no probe",
        lambda run: [
            edit(f"{kind}-0000", lambda m, t: t.update(probe_prompt_length=t["probe_length"]))(run)
            for kind in ("sync", "fresh")
        ],
        "inconclusive",
        "no probe token compared",
    ),
    (
        "no tensor exported",
        lambda run: [
            edit("sync-0000", lambda m, t: m.update(exported={}, loaded={}))(run),
            edit("fresh-0000", lambda m, t: m.update(loaded={}))(run),
        ],
        "inconclusive",
        "no tensor compared",
    ),
    # the claim
    (
        "one bit in one logprob",
        edit("step-0003", lambda m, t: put("actor", np.nextafter(t["actor"][0, 0], -99))(m, t)),
        "fail",
        "theta2 actor: 1 of",
    ),
    (
        "minus zero",
        edit(
            "step-0003", lambda m, t: [put("rollout", 0.0)(m, t), put("recompute", -0.0)(m, t), put("actor", 0.0)(m, t)]
        ),
        "fail",
        "theta2 recompute: 1 of",
    ),
]


@pytest.mark.parametrize(("lie", "verdict", "reason"), [x[1:] for x in LIES], ids=[x[0] for x in LIES])
def test_a_lie_is_refused_with_its_reason(run: Path, lie: Lie, verdict: str, reason: str) -> None:
    assert judge_run(run, "zero")["verdict"] == "pass", "the control"
    lie(run)
    document = judge_run(run, "zero")
    assert document["verdict"] == verdict, document["reasons"]
    assert any(reason in f"{r['where']}: {r['what']}" for r in document["reasons"]), document["reasons"]
    assert str(run) not in json.dumps(document), "a receipt can be published: it holds no path of this machine"
    assert rejudge(document, "zero") == verdict, "and the receipt does not contradict itself"


def test_every_reason_is_listed_and_the_worst_decides(run: Path) -> None:
    edit("step-0001", update(grad_norm=0.0))(run)
    edit("step-0002", put("actor", math.nan))(run)
    document = judge_run(run, "zero")
    assert document["verdict"] == "fail"
    assert {r["verdict"] for r in document["reasons"]} == {"fail", "inconclusive"}


def test_a_capsule_whose_writer_was_killed_never_was_one(run: Path) -> None:
    shutil.copytree(run / "capsules/step-0001", run / "capsules/.step-0004.1234")
    assert judge_run(run, "zero")["verdict"] == "pass"


def test_a_fourth_step_is_compared_too(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1, steps=4)
    assert judge_run(run, "zero")["verdict"] == "pass"
    edit("step-0004", put("actor", -77.0))(run)
    assert judge_run(run, "zero")["verdict"] == "fail"


NUMBERS = st.sampled_from([0, -1, 1, 2, 2**62, -(2**62)]) | st.sampled_from(SPECIAL)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_no_recorded_number_crashes_the_judge(
    runs: dict[int, Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    run = tmp_path_factory.mktemp("any") / "run"
    shutil.copytree(runs[1], run)

    def change(meta: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensor = tensors[data.draw(st.sampled_from(sorted(tensors)))]
        number = data.draw(NUMBERS)
        if tensor.dtype.kind == "f" or math.isfinite(number):
            where = data.draw(st.integers(0, tensor.size - 1)) if data.draw(st.booleans()) else slice(None)
            tensor.reshape(-1)[where] = number
        if "update" in meta:
            key = data.draw(st.sampled_from(["grad_norm", "update_rms", "parameters", "changed_masters", "masters"]))
            meta["update"][key] = data.draw(st.integers(0, 2**62))

    names = sorted(p.name for p in (run / "capsules").iterdir())
    rewrite(run, data.draw(st.sampled_from(names)), change)
    document = judge_run(run, "zero", BOUNDS)
    assert rejudge(document, "zero", BOUNDS) == document["verdict"]
    shutil.rmtree(run)


@pytest.mark.parametrize("lie", [shift, lambda m, t: t.update(actor=t["actor"] * np.float32(1.5))])
def test_a_planted_bug_exceeds_the_bound(runs: dict[int, Path], tmp_path: Path, lie: Any) -> None:
    shutil.copytree(runs[0], tmp_path / "run")
    edit("step-0002", lie)(tmp_path / "run")
    document = judge_run(tmp_path / "run", "observe", BOUNDS)
    assert document["verdict"] == "fail"
    assert "exceeds 0.25, which rounding explains" in document["reasons"][0]["what"]


def test_without_a_calibrated_bound_nothing_is_observed(runs: dict[int, Path]) -> None:
    assert judge_run(runs[0], "observe")["verdict"] == "inconclusive"


def test_arm_and_switch_must_agree(run: Path) -> None:
    for name in ["execution.json", *(f"capsules/{p.name}/capsule.json" for p in (run / "capsules").iterdir())]:
        (run / name).write_text(
            (run / name).read_text().replace('"VLLM_BATCH_INVARIANT": "1"', '"VLLM_BATCH_INVARIANT": "0"')
        )
    document = judge_run(run, "zero")
    assert {"verdict": "fail", "where": "execution.json", "what": "arm 1 ran with VLLM_BATCH_INVARIANT=0"} in document[
        "reasons"
    ]


def test_what_is_no_run_is_not_judged(tmp_path: Path) -> None:
    with pytest.raises(JudgeError, match="pass the folder that `samebits run rl --out` wrote"):
        judge_run(tmp_path / "nothing")
    with pytest.raises(JudgeError, match="use observe or zero"):
        judge_run(tmp_path, "equal")


CALIBRATED = {"max_abs": 0.5, "rounding": 0.25, "temperature": 1.5, "position": 8.0, "mask": 3.0, "tokens": 6144}


def bounds_file(folder: Path, **changes: Any) -> Path:
    row = {**CALIBRATED, "command": "samebits probe", **changes}
    (folder / "bounds.json").write_text(json.dumps({"qwen3-4x1024": row}))
    return folder / "bounds.json"


def test_bounds_are_looked_up_by_model(runs: dict[int, Path], tmp_path: Path) -> None:
    bounds = read_bounds(bounds_file(tmp_path))
    said = "samebits probe: rounding 0.25 over 6144 tokens; planted temperature 1.5, position 8, mask 3"
    assert judge_run(runs[0], "observe", bounds)["bound"] == {"max_abs": 0.5, "calibrated": said}
    assert judge_run(runs[0], "observe", {"another model": bounds["qwen3-4x1024"]})["verdict"] == "inconclusive"


@pytest.mark.parametrize("change", [{"mask": 0.5}, {"position": 0.1}, {"max_abs": 0.0, "rounding": 0.0}])
def test_a_bound_that_separates_nothing_is_refused(tmp_path: Path, change: dict[str, float]) -> None:
    """Zero, or at or above what a planted mistake does: it would accuse all or nobody."""
    with pytest.raises(JudgeError, match="does not lie below every planted mistake"):
        read_bounds(bounds_file(tmp_path, **change))


@pytest.mark.parametrize("change", [{"max_abs": 0.2}, {"max_abs": 1.4}, {"rounding": 0.3}])
def test_a_bound_is_twice_what_was_measured(tmp_path: Path, change: dict[str, float]) -> None:
    with pytest.raises(JudgeError, match="is not twice the measured rounding"):
        read_bounds(bounds_file(tmp_path, **change))


@pytest.mark.parametrize("content", ["[]", "{", '{"small": 1}', '{"small": {"max_abs": "x"}}'])
def test_what_is_no_table_of_bounds_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "bounds.json").write_text(content)
    with pytest.raises(JudgeError, match="restore the file"):
        read_bounds(tmp_path / "bounds.json")


def test_a_committed_bound_is_calibrated() -> None:
    assert read_bounds(ROOT / "manifests" / "evidence" / "bounds.json")


# Committed receipts


@pytest.fixture(scope="session")
def sealed(runs: dict[int, Path]) -> str:
    return json.dumps(judge_run(runs[1], "zero", BOUNDS))


@pytest.fixture
def committed(sealed: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(sealed)
    return document


def forge(document: dict[str, Any]) -> dict[str, Any]:
    """Give an edited receipt a checksum that fits, as a careful liar would."""
    return receipt.build(**{k: v for k, v in document.items() if k not in ("schema", "checksum")})


def test_a_receipt_is_judged_again_without_capsules(committed: dict[str, Any], tmp_path: Path) -> None:
    receipt.write(tmp_path / "receipt.json", committed)
    assert receipt.read(tmp_path / "receipt.json") == committed
    assert rejudge(receipt.read(tmp_path / "receipt.json"), claim="zero") == "pass"
    assert [p.name for p in tmp_path.iterdir()] == ["receipt.json"]


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_an_edited_number_breaks_the_checksum(sealed: str, data: st.DataObject) -> None:
    document = json.loads(sealed)
    assert rejudge(document, "zero") == "pass", "the control"
    place: Any = data.draw(st.sampled_from(document["compares"] + document["updates"] + document["sync"]))
    key = data.draw(st.sampled_from([k for k, v in place.items() if isinstance(v, int | float)]))
    place[key] = not place[key] if isinstance(place[key], bool) else place[key] + data.draw(st.integers(1, 100))
    with pytest.raises((receipt.ReceiptError, JudgeError)):
        rejudge(document)


FORGERIES: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    (
        "hidden mismatches",
        lambda d: d["compares"][0].update(mismatched=3, first_mismatch={"sequence": 0, "position": 0}),
        "3 of .* logprobs differ, but this is not among the reasons",
    ),
    (
        "difference above the bound",
        lambda d: d["compares"][0].update(mismatched=1, max_abs=0.5, first_mismatch={"sequence": 0, "position": 0}),
        "exceeds 0.25",
    ),
    (
        "a first mismatch without one",
        lambda d: d["compares"][0].update(first_mismatch={"sequence": 0, "position": 0}),
        "mismatched and first_mismatch disagree",
    ),
    (
        "a compare without its capsule",
        lambda d: d["compares"].append({**d["compares"][0], "weights": "theta3"}),
        "theta3 recompute: compared without its capsule",
    ),
    ("a compare removed", lambda d: d["compares"].pop(), "theta2 actor: not compared"),
    ("a compare repeated", lambda d: d["compares"].append(d["compares"][0]), "compares: one entry twice"),
    ("an update removed", lambda d: d["updates"].pop(), "update theta1: not recorded"),
    ("a sync removed", lambda d: d["sync"].pop(), "sync theta2: not recorded"),
    ("a capsule removed", lambda d: d["capsules"].pop("capsules/step-0002"), "capsules/step-0002: missing"),
    ("no tokens", lambda d: [c.update(valid_tokens=0) for c in d["compares"]], "0 valid tokens, fewer than 1000"),
    ("unequal token counts", lambda d: d["compares"][0].update(valid_tokens=5), "one number of valid tokens"),
    ("more mismatches than tokens", lambda d: d["compares"][0].update(mismatched=10**6), "mismatched <= valid_tokens"),
    (
        "a difference without a mismatch",
        lambda d: d["compares"][0].update(max_abs=0.1),
        "max_abs without a finite mismatch",
    ),
    (
        "more changed than there are",
        lambda d: d["updates"][0].update(changed_parameters=10**6),
        "more changed than there are",
    ),
    ("more groups than groups", lambda d: d["updates"][0].update(nonzero_advantage_groups=9), "more groups"),
    ("an update to elsewhere", lambda d: d["updates"][0].update(to="theta2"), "update theta0: leads to theta2"),
    ("a gradient of zero", lambda d: d["updates"][0].update(grad_norm=0), "the gradient is zero"),
    ("an unequal tensor", lambda d: d["sync"][0].update(unequal=1), "1 of 3 tensors"),
    ("a probe not run", lambda d: d["sync"][0].update(probe_mismatched=None), "not compared with a fresh engine"),
    (
        "more probes than probes",
        lambda d: d["sync"][0].update(probe_mismatched=10**6),
        "probe_mismatched <= probe_tokens",
    ),
    (
        "a pass with a reason",
        lambda d: d["reasons"].append({"verdict": "fail", "where": "x", "what": "y"}),
        "verdict pass with reasons for fail",
    ),
    ("another arm", lambda d: d.update(arm=0), "not that of its execution identity"),
    ("another model", lambda d: d.update(model={"name": "llama"}), "not that of its execution identity"),
    ("no identity", lambda d: d.update(execution=None, arm=None, model=None), "a pass without an execution identity"),
    ("the other switch", lambda d: d["execution"]["switches"].update(VLLM_BATCH_INVARIANT="0"), "arm 1 ran with"),
    ("a wider bound", lambda d: d["bound"].update(max_abs=99), "not the calibrated one of its model"),
    ("a weaker claim", lambda d: d.update(claim="observe"), "the claim is observe, not zero"),
]


@pytest.mark.parametrize(("change", "message"), [f[1:] for f in FORGERIES], ids=[f[0] for f in FORGERIES])
def test_a_forged_receipt_is_refused(
    committed: dict[str, Any], change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    assert rejudge(forge(committed), "zero", BOUNDS) == "pass", "the control"
    change(committed)
    with pytest.raises(JudgeError, match=message):
        rejudge(forge(committed), "zero", BOUNDS)


def test_a_receipt_of_other_capsules_is_refused(runs: dict[int, Path], run: Path, committed: dict[str, Any]) -> None:
    assert rejudge(committed, run=runs[1]) == "pass"
    edit("step-0002", put("seed", 5000, 0))(run)
    with pytest.raises(JudgeError, match="capsules/step-0002 is not the capsule that was judged"):
        rejudge(committed, run=run)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b"\xff", b'{"schema": "samebits.receipt/2"}'])
def test_what_is_no_receipt_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "receipt.json").write_bytes(content)
    with pytest.raises(receipt.ReceiptError, match="judge the run again"):
        receipt.read(tmp_path / "receipt.json")
    with pytest.raises(receipt.ReceiptError, match="judge the run first"):
        receipt.read(tmp_path / "none.json")


# What computes references of gradients does so in plain PyTorch.
IN_TORCH = {"conventions", "modules", "quantized", "updates", "vjp"}


def test_the_judge_imports_nothing_that_it_judges() -> None:
    known = {"numpy", "samebits", *sys.stdlib_module_names}
    for source in Path(samebits.judge.__file__).parent.glob("*.py"):
        allowed = known | ({"torch"} if source.stem in IN_TORCH else set())
        for node in ast.walk(ast.parse(source.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in names:
                assert name.split(".")[0] in allowed
                assert not name.startswith("samebits.") or name.startswith(("samebits.evidence", "samebits.errors"))
