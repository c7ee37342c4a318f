"""The main job: verl's trainer with vLLM and Megatron Core on this machine's CPU, three steps, as arm 0 and as arm 1.

What `make loop` runs, with fewer samples; and arm 1 once more, for one step, with one bit of one weight of the rollout
flipped.
"""

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from loops import REDUCED
from runs import rewrite

from samebits.evidence.capsule import Capsule, read_capsule
from samebits.judge import judge_run, read_bounds, rejudge
from samebits.probe import rounding
from samebits.recipe import arms, launch, process

GROUPS, SAMPLES = 8, 8 * 8  # of `REDUCED`


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of one loop; the receipts in it are what `samebits run loop` left."""
    folder = tmp_path_factory.mktemp("loop")
    launch.run_loop(3, folder, REDUCED)
    return folder


@pytest.fixture(params=[0, 1], ids=["bi0", "bi1"])
def run(request: pytest.FixtureRequest, loop: pathlib.Path) -> pathlib.Path:
    return loop / f"bi{request.param}"


@pytest.fixture
def receipt(run: pathlib.Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run / "receipt.json").read_text())
    return document


def steps(run: pathlib.Path) -> list[Capsule]:
    return [read_capsule(run / "capsules" / f"step-{k:04d}") for k in (1, 2, 3)]


def test_the_verdict_is_pass_and_the_receipt_stands_on_its_own(run: pathlib.Path, receipt: dict[str, Any]) -> None:
    assert receipt["verdict"] == "pass", receipt["reasons"]
    assert receipt["claim"] == arms.CLAIM[receipt["arm"]]
    assert rejudge(receipt, receipt["claim"], read_bounds(launch.BOUNDS), run) == "pass"
    for c in receipt["compares"]:
        print(f"{c['weights']} {c['path']:9} {c['mismatched']}/{c['valid_tokens']} differ, max {c['max_abs']:.4f}")


def test_three_weights_are_compared_on_both_paths_arm_0_differs_and_arm_1_does_not(receipt: dict[str, Any]) -> None:
    compared = {(c["weights"], c["path"]): c for c in receipt["compares"]}
    assert set(compared) == {(f"theta{k}", path) for k in range(3) for path in ("recompute", "actor")}
    for c in compared.values():
        assert c["dtype"] == "float32" and c["valid_tokens"] >= 1000
        assert c["max_abs"] <= receipt["bound"]["max_abs"]
        assert receipt["arm"] == 0 or c["mismatched"] == 0
    for path in ("recompute", "actor"):
        assert (compared["theta0", path]["mismatched"] > 0) == (receipt["arm"] == 0)


def test_two_updates_change_the_fp32_mains(receipt: dict[str, Any]) -> None:
    assert [(u["from"], u["to"]) for u in receipt["updates"]] == [("theta0", "theta1"), ("theta1", "theta2")]
    for update in receipt["updates"]:
        assert np.isfinite(update["grad_norm"]) and update["grad_norm"] > 0
        assert update["changed_parameters"] > 0.99 * update["parameters"]
        assert 0 < update["changed_masters"] <= update["masters"] == update["parameters"]
        assert update["update_rms"] > 0
        assert 2 * update["nonzero_advantage_groups"] >= update["groups"] == GROUPS


def test_every_sync_arrives_bit_for_bit_and_a_fresh_engine_says_the_same(receipt: dict[str, Any]) -> None:
    assert [s["weights"] for s in receipt["sync"]][:3] == ["theta0", "theta1", "theta2"]
    for sync in receipt["sync"][:3]:
        assert sync["tensors"] == 25 and sync["unequal"] == 0
        assert sync["probe_tokens"] == 64 and sync["probe_mismatched"] == 0 and sync["fresh_unequal"] == 0


def test_trainer_rollout_and_fresh_engine_name_the_contract_of_their_arm(receipt: dict[str, Any]) -> None:
    contract = arms.contract(receipt["arm"])
    assert receipt["execution"]["contract"] == contract and receipt["execution"]["kernels"]["torch_onednn"] != "none"
    for sync in receipt["sync"][:3]:
        assert sync["contracts"] == dict.fromkeys(("trainer", "rollout", "fresh"), contract)


def test_one_switch_is_all_that_the_arms_differ_by(loop: pathlib.Path) -> None:
    """What ran, as recorded: one configuration, one model, one environment but for the switch."""
    config, identity = (
        [(loop / f"bi{arm}" / f"{name}.json").read_text() for arm in (0, 1)] for name in ("config", "execution")
    )
    assert config[0] == config[1]
    zero, one = map(json.loads, identity)
    assert {key for key in zero if zero[key] != one[key]} == {"arm", "command", "contract", "switches"}
    assert set(zero["switches"].items()) ^ set(one["switches"].items()) == {(arms.SWITCH, "0"), (arms.SWITCH, "1")}
    assert [word for word in zero["command"] if word not in one["command"]] == ["0"]


def test_both_arms_start_from_the_same_weights(loop: pathlib.Path) -> None:
    zero, one = (read_capsule(loop / f"bi{arm}" / "capsules" / "sync-0000").meta["exported"] for arm in (0, 1))
    assert zero == one and len(zero) == 25


def test_each_request_had_a_seed_of_its_own(run: pathlib.Path) -> None:
    for capsule in steps(run):
        seeds = capsule.tensors["seed"].read()
        assert len(set(seeds.tolist())) == len(seeds) == SAMPLES


def test_the_update_took_the_samples_in_another_order_and_its_micro_batches_are_other(
    run: pathlib.Path,
) -> None:
    for capsule in steps(run):
        order = capsule.tensors["order"].read().tolist()
        assert sorted(order) == list(range(SAMPLES)) != order
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
    run: pathlib.Path,
    receipt: dict[str, Any],
    tmp_path: pathlib.Path,
    lie: Callable[[dict[str, Any]], Any],
    verdict: str,
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("weights"))
    assert judge_run(copy, receipt["claim"], read_bounds(launch.BOUNDS))["verdict"] == "pass", "the control"
    rewrite(copy, "step-0002", lambda meta, tensors: lie(tensors))
    assert judge_run(copy, receipt["claim"], read_bounds(launch.BOUNDS))["verdict"] == verdict


def test_the_bound_of_its_model_lies_between_rounding_and_every_planted_mistake(loop: pathlib.Path) -> None:
    """Measured again on θ0 of the run, over fewer tokens than the committed calibration."""
    found = rounding.measure(loop / "bi0" / "weights" / "theta0", questions=16)
    bound = json.loads((loop / "bi0" / "receipt.json").read_text())["bound"]["max_abs"]
    print(found)
    assert 0 < found.rounding <= bound < min(found.temperature, found.position, found.mask)


def test_the_report_of_the_loop_is_one_page_of_both_arms(loop: pathlib.Path) -> None:
    page = (loop / "report.html").read_text()
    assert "<svg" in page and "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page
    assert "BI=0: " in page and "BI=1: none of" in page


def test_its_memory_stays_within_12_gb(run: pathlib.Path) -> None:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    peak = max(event["data"].get("peak_memory_bytes", 0) for event in events)
    print(f"peak {peak / 1e9:.1f} GB")
    assert 0 < peak < 12e9


def test_one_flipped_bit_in_one_weight_of_the_rollout_is_caught_at_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the very first step, by the weights read back and by the logprobs of both paths."""
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parent))
    kwargs = "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls"
    planted = {**REDUCED, f"+{kwargs}": "planted_faults.OneFlippedBit"}
    found = launch.run_rl(1, 1, tmp_path / "run", planted)
    assert found["verdict"] == "fail"
    fails = {reason["where"]: reason["what"] for reason in found["reasons"] if reason["verdict"] == "fail"}
    print(fails)
    assert set(fails) == {"theta0 recompute", "theta0 actor", "sync theta0", "sync theta1"}
    (sync, _) = found["sync"]
    assert (sync["unequal"], sync["fresh_unequal"]) == (1, 0)
    assert {c["path"]: c["mismatched"] > 0 for c in found["compares"]} == {"recompute": True, "actor": True}
    assert found["updates"][0]["grad_norm"] > 0


@pytest.mark.evidence
def test_a_strict_run_ends_at_the_first_step_in_which_a_bit_differs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the token, and the capsule that holds it is there for whoever looks."""
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parent))
    kwargs = "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls"
    planted = {**REDUCED, f"+{kwargs}": "planted_faults.OneFlippedBit", "trainer.verify": "strict"}
    with pytest.raises(
        process.RunFailed, match=r"step 1: \d+ of \d+ logprobs of rollout and recompute differ; the first is"
    ):
        launch.run_rl(1, 2, tmp_path / "run", planted)
    capsules = [path.name for path in (tmp_path / "run" / "capsules").iterdir()]
    assert "step-0001" in capsules and "step-0002" not in capsules
