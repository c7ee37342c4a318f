"""The committed receipts, judged again from their own counts: what the README's table says is what they hold."""

import json
import pathlib
from typing import Any

import pytest

from samebits.evidence import eventlog, receipt
from samebits.judge import read_bounds, rejudge
from samebits.recipe import arms, launch
from samebits.report import render_svg_summary
from samebits.sources.pins import ROOT

EVIDENCE = ROOT / "manifests" / "evidence"
RECEIPTS = sorted(EVIDENCE.rglob("receipt.json"))


def ids(path: pathlib.Path) -> str:
    return str(path.parent.relative_to(EVIDENCE))


@pytest.mark.parametrize("path", RECEIPTS, ids=ids)
def test_a_committed_receipt_passes_again_with_its_arms_claim(path: pathlib.Path) -> None:
    document = receipt.read(path)
    assert rejudge(document, arms.CLAIM[document["arm"]], read_bounds(launch.BOUNDS)) == "pass"


@pytest.mark.parametrize("path", RECEIPTS, ids=ids)
def test_it_was_made_from_committed_sources(path: pathlib.Path) -> None:
    execution = receipt.read(path)["execution"]
    assert execution["git_commit"] and execution["git_dirty"] is False


@pytest.fixture
def bi0() -> dict[str, Any]:
    return receipt.read(EVIDENCE / "cpu" / "bi0" / "receipt.json")


def test_arm_0_on_the_cpu_was_compared_over_2000_tokens_for_each_of_three_weights_and_two_paths(
    bi0: dict[str, Any],
) -> None:
    compared = {(c["weights"], c["path"]): c for c in bi0["compares"]}
    assert set(compared) == {(f"theta{k}", path) for k in range(3) for path in ("recompute", "actor")}
    assert all(c["valid_tokens"] >= 2000 for c in compared.values())
    assert compared["theta0", "recompute"]["mismatched"] > 0 and compared["theta0", "actor"]["mismatched"] > 0


def test_arm_0s_updates_are_not_degenerate(bi0: dict[str, Any]) -> None:
    assert [(u["from"], u["to"]) for u in bi0["updates"]] == [("theta0", "theta1"), ("theta1", "theta2")]
    for update in bi0["updates"]:
        assert update["grad_norm"] > 0 and update["changed_parameters"] > 0 and update["changed_masters"] > 0
        assert 2 * update["nonzero_advantage_groups"] >= update["groups"]


def test_arm_0s_syncs_arrived_and_a_fresh_engine_said_the_same(bi0: dict[str, Any]) -> None:
    for sync in bi0["sync"][:3]:
        assert sync["tensors"] == 25 and sync["unequal"] == sync["fresh_unequal"] == 0
        assert sync["probe_tokens"] > 0 and sync["probe_mismatched"] == 0


def test_arm_0s_run_kept_its_time_and_memory() -> None:
    """The event log of the committed run: ten minutes with its warm start, six without, 12 GB."""
    log = eventlog.read(EVIDENCE / "cpu" / "bi0" / "events.jsonl")
    assert log.damage is None
    assert log.entries[-1]["data"]["receipt"] == receipt.read(EVIDENCE / "cpu" / "bi0" / "receipt.json")["checksum"]
    seconds = {entry["event"]: entry["data"].get("seconds", 0) for entry in log.entries}
    assert seconds["judged"] <= 600 and seconds["judged"] - seconds["warm start ready"] <= 360
    assert max(entry["data"].get("peak_memory_bytes", 0) for entry in log.entries) <= 12e9


def test_the_readme_says_what_the_receipt_holds(bi0: dict[str, Any]) -> None:
    table = (ROOT / "README.md").read_text()
    for c in bi0["compares"]:
        counts = f"{c['mismatched']:,} of {c['valid_tokens']:,}"
        assert f"| θ{c['weights'][-1]} | {c['path']} | {counts} | {c['max_abs']:.3f} |" in table


def test_the_picture_is_of_the_receipt() -> None:
    assert (ROOT / "docs" / "report.svg").read_text() == render_svg_summary(EVIDENCE / "cpu" / "bi0")


def test_every_number_of_the_bounds_has_its_command() -> None:
    for row in json.loads(launch.BOUNDS.read_text()).values():
        assert "python -m samebits.probe.rounding RUN/weights/theta0" in row["command"]
