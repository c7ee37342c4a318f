"""Transformer Engine's Python code with our patches and without, over a stand-in for its kernels (te_on_cpu.py).

Every case passes with the patches; the release fails those that a mend is for, so that each shows what was wrong.
Megatron Core's switch passes its cases over both.
"""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from samebits.bench import backward
from samebits.sources.fetch import fetch
from samebits.sources.pins import load_pins

SCRIPT, MEGATRON = (Path(__file__).with_name(f"{name}.py") for name in ("te_cases", "megatron_te_cases"))
CASES, MEGATRON_CASES = (
    re.findall(r"^@case\ndef (\w+)", script.read_text(), re.MULTILINE) for script in (SCRIPT, MEGATRON)
)
MENDED = {
    "resolution",
    "validation",
    "regions",
    "custom_recipe_with_delayed_scaling",
    "chain_of_ops",
    "norm_before_a_linear_op",
    "frozen_weight_and_trainable_bias",
    "weights_of_another_dtype",
    "unquant_keeps_nothing_quantized",
    "an_overridden_region_is_first",
    "an_overridden_region_comes_after",
    "only_quantized_operands",
    "grouped_op",
    "row_wise_operands",
    "bench",
}
Said = dict[str, dict[str, str]]


def start(script: Path, tree: Path, *cases: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(script), str(tree), *cases]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=os.environ | environment)


def result(process: subprocess.Popen[str]) -> dict[str, str]:
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    said: dict[str, str] = json.loads(out.splitlines()[-1])
    return said


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The release's Python sources, and the same patched, made as for a card."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("release", "patched")}
    with zipfile.ZipFile(fetch(load_pins().upstreams["TransformerEngine"].artefacts_of("2.20.2")[0])) as wheel:
        wheel.extractall(found["release"])
    backward.patched_package(found["release"], found["patched"])
    return found


@pytest.fixture(scope="session")
def said(trees: dict[str, Path]) -> Said:
    processes = {name: start(SCRIPT, tree) for name, tree in trees.items()}
    return {name: result(process) for name, process in processes.items()}


@pytest.fixture(scope="session")
def megatron_said(trees: dict[str, Path]) -> Said:
    processes = {name: start(MEGATRON, tree) for name, tree in trees.items()}
    return {name: result(process) for name, process in processes.items()}


def test_every_case_is_known(said: Said) -> None:
    assert list(said["patched"]) == CASES and set(CASES) > MENDED


@pytest.mark.parametrize("case", CASES)
def test_patched(said: Said, case: str) -> None:
    assert said["patched"][case] == ""


@pytest.mark.parametrize("case", CASES)
def test_the_release_fails_what_is_mended_and_nothing_else(said: Said, case: str) -> None:
    assert (said["release"][case] != "") == (case in MENDED), said["release"][case]


def test_a_variable_from_before_the_import(trees: dict[str, Path]) -> None:
    """As released, a region that does not quantize fails then, for its placeholder is delayed scaling."""
    variable = {"NVTE_BACKWARD_OVERRIDE": "high_precision"}
    patched, release = (start(SCRIPT, trees[name], "placeholder", **variable) for name in ("patched", "release"))
    assert result(patched) == {"placeholder": ""}
    assert "only supports backward_override=None" in result(release)["placeholder"]


@pytest.mark.parametrize("tree", ["release", "patched"])
@pytest.mark.parametrize("case", MEGATRON_CASES)
def test_megatron(megatron_said: Said, case: str, tree: str) -> None:
    assert megatron_said[tree][case] == ""
