"""verl's recipe, as its pull request has it: composed on a machine without a card, started nowhere."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from samebits.sources.pins import ROOT

FILES = ROOT / "patches" / "verl" / "0005-aligned-recipe" / "files"
SCRIPT = FILES / "examples" / "aligned_trainer" / "run_qwen3_1_7b_megatron.sh"


def composed(aligned: str, folder: Path) -> dict[Any, Any]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "VERL_"))},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "VERL_PLATFORM": "cpu",
        "DRY_RUN": "1",
        "ALIGNED": aligned,
        "EXPERIMENT_NAME": "one",
    }
    done = subprocess.run(["bash", SCRIPT], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = OmegaConf.to_container(OmegaConf.create(done.stdout))
    assert isinstance(found, dict)
    return found


def test_a_dry_run_composes_one_configuration_for_both_arms_and_starts_nothing(tmp_path: Path) -> None:
    one, zero = composed("1", tmp_path), composed("0", tmp_path)
    assert one == zero
    assert one["trainer"]["v1"]["trainer_mode"] == "sync_recorded" and one["trainer"]["verify"] == "observe"
    rollout = one["actor_rollout_ref"]["rollout"]
    assert rollout["calculate_log_probs"] and rollout["temperature"] == 1.0 and rollout["top_p"] == 1
    assert list(tmp_path.glob("*")) in ([], [tmp_path / "outputs"])


def test_the_name_ends_in_the_backend_and_the_pins_are_the_locks() -> None:
    assert SCRIPT.name.removesuffix(".sh").endswith("_megatron")
    lock = (ROOT / "manifests" / "locks" / "gpu.txt").read_text()
    locked = {
        name.lower().replace("_", "-"): version for name, version in re.findall(r"^([\w.-]+)==([^\s;\\]+)", lock, re.M)
    }
    pins = re.findall(r"^([\w.-]+)(?:\[[\w,-]+\])?==(\S+)$", (SCRIPT.parent / "requirements.txt").read_text(), re.M)
    assert len(pins) == 7
    from samebits.sources.pins import load_pins

    ours = {a.name: a.version for u in load_pins().patched() for a in u.artefact if "gpu" in a.profiles}
    for name, version in pins:
        assert (locked | ours)[name.lower()] == version, name


@pytest.mark.parametrize("file", ["examples/aligned_trainer/README.md", "docker/Dockerfile.aligned.vllm"])
def test_what_is_named_is_there(file: str) -> None:
    text = (FILES / file).read_text()
    for path in re.findall(r"(?:examples|docker)/[\w./]+\w", text):
        assert (FILES / path).exists(), path
