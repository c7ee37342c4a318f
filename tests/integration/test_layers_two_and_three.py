"""`samebits check conventions` and `samebits run sft`, small in CI, whole as evidence."""

import pathlib
from typing import Any

import pytest
from typer.testing import CliRunner

from samebits import cli
from samebits.evidence.gradients import CONVENTIONS, SFT
from samebits.judge import conventions, sft


def run(out: pathlib.Path, *words: str) -> Any:
    return CliRunner().invoke(cli.app, [*words, "--out", str(out)])


def test_every_quantized_layer_is_compared_under_both_conventions(tmp_path: pathlib.Path) -> None:
    """Cosines near one for FP8 and far from it for NVFP4, as the size of their roundings has it: 2^-4 against 2^-2."""
    out = tmp_path / "out"
    done = run(out, "check", "conventions", "--layers", "2", "--steps", "2")
    assert done.exit_code == 0, done.output
    document = CONVENTIONS.read(out / "conventions.json")
    assert conventions.missed(document) == [] and (out / "conventions.html").is_file()
    assert len(document["rows"]) == 2 * len(conventions.CLASSES) * len(conventions.COMBINATIONS)
    for row in document["rows"]:
        most = 0.05 if row["combination"].startswith("NVFP4") else 0.005
        assert 0 < row["dx_local_from_one"] < most and 0.9 < row["dx_ratio"] < 1.1
    local = {name: [r["dx_local_from_one"] for r in document["rows"] if r["combination"] == name]
             for name in ("FP8 128x128, BF16", "NVFP4, BF16")}  # fmt: skip
    assert min(local["NVFP4, BF16"]) > 4 * max(local["FP8 128x128, BF16"])


def assert_arms_agree(document: dict[str, Any]) -> None:
    test, reference, native = (document["arms"][name]["steps"] for name in sft.ARMS)
    assert test[0]["loss"] == reference[0]["loss"] and test[-1]["loss"] != reference[-1]["loss"]
    assert test[0]["loss"] != native[0]["loss"]
    for other in (sft.REFERENCE, sft.NATIVE):
        print(f"under test and {other}: at most {sft.apart(document, other):.5f} of {sft.bound(document):.4f} apart")
        assert sft.localise(document, other) is None
    assert not [row for row in document["first"] if row["wrong"]]


def test_three_arms_of_a_short_run_agree_and_are_no_pass(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    done = run(out, "run", "sft", "--steps", "6", "--hidden", "128")
    document = SFT.read(out / "sft.json")
    assert done.exit_code == 1 and (document["verdict"], document["why"]) == (
        "inconclusive",
        ["6 steps, fewer than 40"],
    )
    assert sft.verdict(document) == (document["verdict"], document["why"])
    assert_arms_agree(document)
    assert "surrogates in FP64" in (out / "sft.html").read_text()


@pytest.mark.evidence
def test_three_arms_of_the_loops_model_agree(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path / "out", "run", "sft")
    assert done.exit_code == 0, done.output
    assert_arms_agree(SFT.read(tmp_path / "out" / "sft.json"))
