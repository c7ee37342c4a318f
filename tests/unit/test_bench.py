"""The paired measurement without engines: processes that take turns, what is kept and missed, the document."""

import io
import pathlib
import sys
from typing import Any

import pytest
from rich.console import Console

from samebits.bench import pairs, turns
from samebits.evidence.measurement import BENCH, MeasurementError
from samebits.recipe.process import RunFailed
from samebits.sources.pins import ROOT

# A process that serves two workloads: one that counts, one that fails when it is asked for.
SERVER = """
from samebits.bench import turns

turns.TURN_S = 0.01

def make(job):
    print("what a library prints is no answer")
    calls = []

    def fail():
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("the second time it fails")
        return 1

    return {"count": lambda: job["units"], "fail": fail}, {"hello": job["units"]}

turns.serve(make)
"""


@pytest.fixture
def environment(tmp_path: pathlib.Path) -> dict[str, str]:
    (tmp_path / "server.py").write_text(SERVER)
    return {"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}


def test_processes_take_turns_and_who_begins_changes(tmp_path: pathlib.Path, environment: dict[str, str]) -> None:
    children = {
        n: turns.Child(f"child {n}", "server", {"units": n + 1}, environment, tmp_path / f"{n}.log") for n in (0, 1)
    }
    said: list[str] = []
    with children[0], children[1]:
        assert [child.ready() for child in children.values()] == [{"hello": 1}, {"hello": 2}]
        rates = turns.take_turns(children, ["count"], 2, said.append)
    assert [one.rpartition(", ")[2] for one in said] == ["child 0", "child 1", "child 1", "child 0"]
    assert {arm: len(values) for arm, values in rates["count"].items()} == {0: 2, 1: 2}
    assert all(rate > 0 for values in rates["count"].values() for rate in values)
    assert "what a library prints" in (tmp_path / "0.log").read_text()


def test_a_process_that_fails_is_named_with_its_error(tmp_path: pathlib.Path, environment: dict[str, str]) -> None:
    with turns.Child("the engine", "server", {"units": 1}, environment, tmp_path / "log") as child:
        child.ready()
        with pytest.raises(RunFailed, match=r"the engine ended with code 1\. First error: RuntimeError: the second"):
            child.ask("fail")


def identity(arm: int) -> dict[str, Any]:
    return {
        "schema": "samebits.execution/1",
        "git_commit": "0" * 40,
        "git_dirty": False,
        "lock": {"name": "cpu.txt", "sha256": "0" * 64},
        "wheels": {},
        "versions": {},
        "python": "3.12.0",
        "device": "cpu",
        "device_name": "one",
        "instruction_set": ["avx2"],
        "threads": 2,
        "runner": "v1",
        "switches": {"VLLM_BATCH_INVARIANT": str(arm)},
        "config_sha256": "0" * 64,
        "arm": arm,
        "model": {"name": "m", "seed": 0, "tokenizer_sha256": "0" * 64, "layers": 6, "hidden": 1024},
        "command": ["samebits", "bench", "cpu"],
    }


def measured(decode: list[float], trainer: list[float]) -> dict[str, Any]:
    """A document whose BI=0 is 100 in each round."""
    rows = [
        {"workload": name, "unit": unit, "values": {"0": [100.0] * len(values), "1": values}, "must": must}
        for name, unit, values, must in (
            ("decode", "tokens/s", decode, pairs.DECODE),
            ("trainer", "s", trainer, pairs.TRAINER),
        )
    ]
    executions = {str(arm): identity(arm) for arm in (0, 1)}
    return BENCH.build(command="samebits bench cpu", date="2026-01-31", rounds=3, rows=rows, executions=executions)


def test_what_is_missed_is_by_the_median_ratio_and_in_its_direction() -> None:
    assert pairs.missed(measured([80.0, 95.0, 96.0], [110.0, 120.0, 500.0])) == []
    assert pairs.missed(measured([80.0, 94.0, 99.0], [110.0, 120.1, 500.0])) == ["decode", "trainer"]
    assert pairs.missed(measured([200.0, 200.0, 200.0], [10.0, 10.0, 10.0])) == []


def test_the_table_says_median_spread_ratio_and_must() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(pairs.table(measured([80.0, 94.0, 99.0], [110.0, 120.0, 130.0])))
    drawn = console.export_text()
    assert "6 layers, hidden 1024, 3 rounds" in drawn
    lines = [" ".join(line.split()) for line in drawn.splitlines()]
    assert "decode, tokens/s 100 ±0% 94 ±10% 0.94 ±10% ≥ 0.95" in lines
    assert "trainer, s 100 ±0% 120 ±8% 1.20 ±8% ≤ 1.20" in lines


def test_a_measurement_is_read_as_written_and_an_edited_one_refused(tmp_path: pathlib.Path) -> None:
    document, path = measured([100.0], [100.0]), tmp_path / "bench.json"
    BENCH.write(path, document)
    assert BENCH.read(path) == document
    path.write_text(path.read_text().replace("100.0", "150.0", 1))
    with pytest.raises(MeasurementError, match=r"bench\.json: edited: .*; measure again"):
        BENCH.read(path)
    path.write_text("{}")
    with pytest.raises(MeasurementError, match=r"breaks samebits\.bench/1"):
        BENCH.read(path)


def test_sizes_that_no_model_has_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(pairs.BenchError, match="hidden a multiple of 128"):
        pairs.measure(6, 1000, 3, False, print, tmp_path)


def test_the_recorded_command_is_one_of_this_repository() -> None:
    assert pairs._command(6, 1024, 3, True)[-1] == "--compiled"
    assert pathlib.Path(sys.executable).with_name(pairs._command(6, 1024, 3, False)[0]).exists()
