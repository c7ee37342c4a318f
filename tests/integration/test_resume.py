"""A run whose trainer is killed amid a step goes on from its checkpoint, and the first comparison after it is 0."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

OPTIONS = ["--run", "bi1", "--steps", "4", "--chunk", "2"]


def command(folder: pathlib.Path) -> list[str]:
    return [sys.executable, "-m", "samebits.cli", "bench", "rl", *OPTIONS, "--out", str(folder)]


def logged(file: pathlib.Path) -> dict[int, dict[str, float]]:
    lines = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return {row["step"]: row["data"] for row in map(json.loads, lines)} if file.exists() else {}


@pytest.mark.evidence
def test_the_first_comparison_after_a_restore_is_zero(tmp_path: pathlib.Path) -> None:
    subprocess.run(command(tmp_path), check=True)
    metrics = tmp_path / "bi1" / "metrics-0002.jsonl"
    killed = subprocess.Popen(command(tmp_path))
    deadline = time.monotonic() + 900
    while killed.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and 3 in logged(metrics):
            break
        time.sleep(0.5)
    assert killed.poll() is None and 3 in logged(metrics)
    # Step 4 has begun: of the trainer's worker nothing is left, and nothing of step 3 was saved.
    workers = (p for p in psutil.process_iter() if p.name().startswith("ray::WorkerDict"))
    (worker,) = (p for p in workers if str(tmp_path) in p.environ().get("VERL_FILE_LOGGER_PATH", ""))
    os.kill(worker.pid, signal.SIGKILL)
    assert killed.wait(timeout=300) != 0
    latest = tmp_path / "bi1" / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert latest.read_text() == "2"

    subprocess.run(command(tmp_path), check=True)
    after = logged(metrics)
    assert sorted(after) == [3, 4], "the step after the checkpoint ran again"
    for step in after.values():
        assert step["training/rollout_bits_compared"] > 0
        assert step["training/rollout_recompute_bits_differ"] == step["training/rollout_actor_bits_differ"] == 0
    assert (tmp_path / "steps.json").is_file()
