"""`samebits check bits` and `check localise` on real engines of a tiny model: through the command line, both arms."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from samebits.evidence.invariance import KIND
from samebits.evidence.planted import KIND as PLANTED
from samebits.judge import missed_faults, rejudge_matrix
from samebits.judge.matrix import cells
from samebits.probe import traces
from samebits.probe.traces import Planted

SAMEBITS = pathlib.Path(sys.executable).with_name("samebits")
TINY = ("--layers", "2", "--hidden", "256")
ARMS = (0, 1)
SEEDS = range(6)


def run(*words: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return subprocess.run([SAMEBITS, *map(str, words)], env=environment, capture_output=True, text=True, timeout=1200)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, subprocess.CompletedProcess[str]]:
    """A quick matrix of both arms, in one table."""
    out = tmp_path_factory.mktemp("bits") / "out"
    which = [word for arm in ARMS for word in ("--arm", arm)]
    return out, run("check", "bits", "--quick", *TINY, "--dtype", "float32", *which, "--out", out)


def test_both_arms_in_one_table_and_batch_invariance_has_no_mismatch(
    matrix: tuple[pathlib.Path, subprocess.CompletedProcess[str]],
) -> None:
    out, done = matrix
    assert done.returncode == 0, done.stdout + done.stderr
    document = KIND.read(out / "invariance.json")
    assert rejudge_matrix(document) == "pass"
    assert {(c["arm"], c["cell"]) for c in document["cells"]} == {(a, c.name) for a in ARMS for c in cells(True)}
    assert all(c["compared"] > 0 and c["nonfinite"] == 0 for c in document["cells"])
    assert not any(c["mismatched"] for c in document["cells"] if c["arm"] == 1)
    assert any(c["mismatched"] for c in document["cells"] if c["arm"] == 0), "the model is too small to show anything"
    for name in ("preemption and recompute", "prefix cache: off, warm", "chunked prefill, budget 32"):
        proofs = [c["proof"] for c in document["cells"] if c["cell"] == name]
        assert all(not any(p["left"].values()) and all(p["right"].values()) for p in proofs) and len(proofs) == 2
    assert "BI=0 float32" in done.stdout and "BI=1 float32" in done.stdout and "request order" in done.stdout


def test_the_document_is_judged_again_by_the_same_command_as_a_receipt(
    matrix: tuple[pathlib.Path, subprocess.CompletedProcess[str]],
) -> None:
    out, _ = matrix
    again = run("judge", out / "invariance.json")
    assert again.returncode == 0 and "quick matrix: PASS" in again.stdout


def test_what_was_recorded_before_is_not_overwritten(
    matrix: tuple[pathlib.Path, subprocess.CompletedProcess[str]],
) -> None:
    out, _ = matrix
    again = run("check", "bits", "--quick", "--out", out)
    assert again.returncode == 1 and "is not empty" in again.stderr


def show(found: list[Planted]) -> None:
    for one in found:
        print("right" if one.right else "WRONG", one.truth, one.named and one.named.text(), one.unchanged)


@pytest.mark.parametrize("arm", ARMS)
def test_a_planted_fault_is_named_and_an_unchanged_run_accused_of_nothing(tmp_path: pathlib.Path, arm: int) -> None:
    """Two seeds of each kind: a bit of a weight, the last bit of an operator's output, a norm's epsilon."""
    weights = traces.model_folder(tmp_path / "out", layers=3, hidden=256)
    found = traces.planted(SEEDS, weights, tmp_path / "out", arm, "bfloat16", "cpu")
    show(found)
    assert all(one.right for one in found) and {one.truth["kind"] for one in found} == {"weight", "operator", "epsilon"}


def test_two_arms_part_at_an_operator_that_is_kept_and_runs_again(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    done = run(
        "check",
        "localise",
        *TINY,
        "--weights",
        traces.model_folder(tmp_path / "m", 2, 256),
        "--arm",
        0,
        "--arm",
        1,
        "--out",
        out,
    )
    assert done.returncode == 1 and "layer" in done.stdout, done.stdout + done.stderr
    named = json.loads((out / "localised.json").read_text())
    assert named["rows"] > 0 and named["differ"] > 0


def test_one_changed_weight_folder_is_named_and_its_operator_runs_again(tmp_path: pathlib.Path) -> None:
    """The operator's inputs are kept on both sides; run again in a new process it puts out the recorded bits."""
    import torch
    from safetensors.torch import load_file, save_file

    right = traces.model_folder(tmp_path / "a", 2, 256), traces.model_folder(tmp_path / "b", 2, 256)
    name = "model.layers.1.mlp.down_proj.weight"
    weights = load_file(right[1] / "model.safetensors")
    weights[name][0] += torch.ones_like(weights[name][0])
    save_file(weights, right[1] / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "out"
    sides = [word for folder in right for word in ("--weights", folder)]
    done = run("check", "localise", "--arm", 1, *sides, "--out", out)
    assert done.returncode == 1, done.stdout + done.stderr
    named = json.loads((out / "localised.json").read_text())
    assert (named["layer"], named["module"], named["weight"]) == (1, name.removesuffix(".weight"), name)
    assert named["differ"] > 0
    again = run("check", "replay", "--arm", 1, out / "replay" / "left", out / "replay" / "right")
    assert again.returncode == 0 and again.stdout.count(": 0 of ") == 2, again.stdout + again.stderr


@pytest.mark.evidence
def test_twenty_planted_faults_are_named_in_each_arm_and_no_unchanged_run_is_accused(tmp_path: pathlib.Path) -> None:
    done = run("check", "planted", "--out", tmp_path / "out")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert missed_faults(PLANTED.read(tmp_path / "out" / "planted.json")) == []
