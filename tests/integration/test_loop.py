"""The main job, reduced: verl's trainer with vLLM and Megatron Core on this machine's CPU, arm 0, three steps."""

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from loops import REDUCED, REDUCED_MODEL
from runs import rewrite

from samebits.evidence.capsule import Capsule, read_capsule
from samebits.judge import judge_run, read_bounds, rejudge
from samebits.probe import rounding
from samebits.recipe import launch
from samebits.report import render


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of one reduced run; the receipt in it is what `samebits run rl` left."""
    folder = tmp_path_factory.mktemp("loop") / "bi0"
    launch.run_rl(0, 3, folder, REDUCED, REDUCED_MODEL)
    return folder


@pytest.fixture(scope="module")
def receipt(run: pathlib.Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run / "receipt.json").read_text())
    return document


def steps(run: pathlib.Path) -> list[Capsule]:
    return [read_capsule(run / "capsules" / f"step-{k:04d}") for k in (1, 2, 3)]


def test_the_verdict_is_pass_and_the_receipt_stands_on_its_own(run: pathlib.Path, receipt: dict[str, Any]) -> None:
    assert receipt["verdict"] == "pass", receipt["reasons"]
    assert (receipt["arm"], receipt["claim"]) == (0, "observe")
    assert rejudge(receipt, "observe", read_bounds(launch.BOUNDS), run) == "pass"
    for c in receipt["compares"]:
        print(f"{c['weights']} {c['path']:9} {c['mismatched']}/{c['valid_tokens']} differ, max {c['max_abs']:.4f}")


def test_three_weights_are_compared_on_both_paths_and_arm_0_differs(receipt: dict[str, Any]) -> None:
    compared = {(c["weights"], c["path"]): c for c in receipt["compares"]}
    assert set(compared) == {(f"theta{k}", path) for k in range(3) for path in ("recompute", "actor")}
    for path in ("recompute", "actor"):
        assert compared["theta0", path]["mismatched"] > 0
    for c in compared.values():
        assert c["dtype"] == "float32" and c["valid_tokens"] >= 1000
        assert c["max_abs"] <= receipt["bound"]["max_abs"]


def test_two_updates_change_the_fp32_mains(receipt: dict[str, Any]) -> None:
    assert [(u["from"], u["to"]) for u in receipt["updates"]] == [("theta0", "theta1"), ("theta1", "theta2")]
    for update in receipt["updates"]:
        assert np.isfinite(update["grad_norm"]) and update["grad_norm"] > 0
        assert update["changed_parameters"] > 0.99 * update["parameters"]
        assert 0 < update["changed_masters"] <= update["masters"] == update["parameters"]
        assert update["update_rms"] > 0
        assert 2 * update["nonzero_advantage_groups"] >= update["groups"] == 8


def test_every_sync_arrives_bit_for_bit_and_a_fresh_engine_says_the_same(receipt: dict[str, Any]) -> None:
    assert [s["weights"] for s in receipt["sync"]][:3] == ["theta0", "theta1", "theta2"]
    for sync in receipt["sync"][:3]:
        assert sync["tensors"] == 25 and sync["unequal"] == 0
        assert sync["probe_tokens"] == 64 and sync["probe_mismatched"] == 0 and sync["fresh_unequal"] == 0


def test_each_request_had_a_seed_of_its_own(run: pathlib.Path) -> None:
    for capsule in steps(run):
        seeds = capsule.tensors["seed"].read()
        assert len(set(seeds.tolist())) == len(seeds) == 64


def test_the_update_took_the_samples_in_another_order_and_its_micro_batches_are_other(
    run: pathlib.Path,
) -> None:
    for capsule in steps(run):
        order = capsule.tensors["order"].read().tolist()
        assert sorted(order) == list(range(64)) != order
    actor = json.loads((run / "config.json").read_text())["actor_rollout_ref"]["actor"]
    rollout = json.loads((run / "config.json").read_text())["actor_rollout_ref"]["rollout"]
    assert actor["ppo_micro_batch_size_per_gpu"] != rollout["log_prob_micro_batch_size_per_gpu"]


@pytest.mark.parametrize(
    ("lie", "verdict"),
    [
        (lambda t: t["actor"].fill(0), "fail"),  # never computed
        (lambda t: t["actor"].__imul__(np.float32(1 / 1.1)), "fail"),  # another temperature than the rollout's
        (lambda t: t["actor"].__setitem__(slice(None), np.roll(t["actor"], 1, axis=1)), "fail"),  # a place off
        (lambda t: t["advantages"].fill(0), "inconclusive"),  # nothing was learnt
        (lambda t: t["valid"].fill(False), "inconclusive"),  # nothing was compared
    ],
)
def test_a_lie_about_the_real_run_does_not_pass(
    run: pathlib.Path, tmp_path: pathlib.Path, lie: Callable[[dict[str, Any]], Any], verdict: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("weights"))
    assert judge_run(copy, "observe", read_bounds(launch.BOUNDS))["verdict"] == "pass", "the control"
    rewrite(copy, "step-0002", lambda meta, tensors: lie(tensors))
    assert judge_run(copy, "observe", read_bounds(launch.BOUNDS))["verdict"] == verdict


def test_the_bound_of_its_model_lies_between_rounding_and_every_planted_mistake(run: pathlib.Path) -> None:
    """Measured again on θ0 of the run, over fewer tokens than the committed calibration."""
    found = rounding.measure(run / "weights" / "theta0", questions=16)
    bound = json.loads((run / "receipt.json").read_text())["bound"]["max_abs"]
    print(found)
    assert 0 < found.rounding <= bound < min(found.temperature, found.position, found.mask)


def test_the_report_of_the_run_is_one_page(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    render([run], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<svg" in page and "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page


def test_its_memory_stays_within_12_gb(run: pathlib.Path) -> None:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    peak = max(event["data"].get("peak_memory_bytes", 0) for event in events)
    print(f"peak {peak / 1e9:.1f} GB")
    assert 0 < peak < 12e9
