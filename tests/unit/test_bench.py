"""The paired measurement without engines: processes that take turns, what is kept and missed, the document."""

import io
import pathlib
import sys
from typing import Any

import pytest
from rich.console import Console

from samebits.bench import pairs, trainer, turns
from samebits.evidence.measurement import BENCH, MeasurementError
from samebits.judge import speed
from samebits.recipe.process import RunFailed
from samebits.sources.pins import ROOT

# A process that serves two workloads: one that counts, one that fails when it is asked for.
SERVER = """
import contextlib
import sys
import time

from samebits.bench import turns

turns.TURN_S = 0.01

def make(job):
    print("what a library prints is no answer")
    calls = []

    @contextlib.contextmanager
    def awake():
        print("wakes", file=sys.stderr)
        time.sleep(0.5)
        yield
        print("sleeps", file=sys.stderr)

    def fail():
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("the second time it fails")
        return 1

    return turns.Served({"count": lambda: job["units"], "fail": fail}, {"hello": job["units"]}, awake)

turns.serve(make)
"""


@pytest.fixture
def environment(tmp_path: pathlib.Path) -> dict[str, str]:
    (tmp_path / "server.py").write_text(SERVER)
    return {"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}


def test_processes_take_turns_and_who_begins_changes(tmp_path: pathlib.Path, environment: dict[str, str]) -> None:
    children = {
        n: turns.Child(f"the engine with BI={n}", "server", {"units": n + 1}, environment, tmp_path / f"{n}.log")
        for n in (0, 1)
    }
    said: list[str] = []
    with children[0], children[1]:
        assert [child.ready() for child in children.values()] == [{"hello": 1}, {"hello": 2}]
        rates = turns.take_turns(children, ["count"], 2, said.append)
    assert [one.rpartition(", ")[2] for one in said] == [f"the engine with BI={n}" for n in (0, 1, 1, 0)]
    assert {arm: len(values) for arm, values in rates["count"].items()} == {0: 2, 1: 2}
    assert all(rate > 0 for values in rates["count"].values() for rate in values)
    log = (tmp_path / "0.log").read_text()
    assert "what a library prints" in log
    assert (log.count("wakes"), log.count("sleeps")) == (3, 3)  # to warm up, and for each turn


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
        "contract": "batch-invariant-cpu-1" if arm else None,
        "kernels": {"torch_cpu_capability": "AVX2"},
        "threads": 2,
        "runner": "v1",
        "switches": {"VLLM_BATCH_INVARIANT": str(arm)},
        "config_sha256": "0" * 64,
        "arm": arm,
        "model": {"name": "m", "seed": 0, "tokenizer_sha256": "0" * 64, "layers": 6, "hidden": 1024},
        "command": ["samebits", "bench", "cpu"],
    }


GOOD = [95.0, 96.0, 80.0, 99.0, 97.0]


def measured(**changed: list[float]) -> dict[str, Any]:
    """A document whose BI=0 is 100 in each round; changed: BI=1 of a workload, by its first word."""
    rows = [
        {
            "workload": name,
            "unit": bound.unit,
            "values": {"0": [100.0] * 5, "1": changed.get(name.partition(" ")[0].rstrip(","), GOOD)},
        }
        for name, bound in speed.MUST.items()
    ]
    executions = {str(arm): identity(arm) for arm in (0, 1)}
    return BENCH.build(
        command="samebits bench cpu", date="2026-01-31", load=0.5, rounds=5, rows=rows, executions=executions
    )


def test_a_bound_is_kept_by_the_median_ratio_and_in_its_direction() -> None:
    assert speed.missed(measured()) == []
    assert (
        speed.missed(measured(trainer=[10.0, 110.0, 120.0, 120.0, 500.0], prefill=[10.0, 10.0, 85.0, 90.0, 90.0])) == []
    )
    assert speed.missed(measured(trainer=[110.0, 120.0, 121.0, 130.0, 500.0])) == [
        "trainer step, 4 x 64 tokens: 1.21, must be ≤ 1.20"
    ]
    assert speed.missed(measured(decode=[80.0, 94.0, 94.0, 99.0, 99.0])) == [
        "decode, 1 request: 0.94, must be ≥ 0.95",
        "decode, 16 requests: 0.94, must be ≥ 0.95",
    ]


def change(document: dict[str, Any], what: str) -> None:
    rows, executions = document["rows"], document["executions"]
    match what:
        case "a row is missing":
            del rows[1]
        case "another row":
            rows[2]["workload"] = "prefill, 8 tokens"
        case "twice":
            rows.append(rows[0])
        case "few rounds":
            document["rounds"] = 3
        case "fewer turns":
            rows[0]["values"] = {"0": [1.0], "1": [1.0]}
        case "another unit":
            rows[3]["unit"] = "tokens/s"
        case "the switch was ignored":
            executions["1"]["contract"] = None
        case "both arms are one":
            executions["0"]["contract"] = "batch-invariant-cpu-1"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("a row is missing", "decode, 16 requests: is not measured"),
        ("another row", "prefill, 512 tokens: is not measured"),
        ("another row", "prefill, 8 tokens: is none of the workloads"),
        ("twice", "decode, 1 request: is listed twice"),
        ("few rounds", "3 rounds, fewer than 5"),
        ("fewer turns", "decode, 1 request: is not one number a round in tokens/s"),
        ("another unit", "trainer step, 4 x 64 tokens: is not one number a round in s"),
        ("the switch was ignored", "BI=1 computed by no contract"),
        ("both arms are one", "BI=0 computed by the contract batch-invariant-cpu-1"),
    ],
)
def test_a_measurement_of_other_things_is_missed(what: str, said: str) -> None:
    document = measured()
    change(document, what)
    assert said in speed.missed(document)


def test_the_workloads_that_are_timed_are_those_that_are_judged() -> None:
    assert [*pairs.CASES, trainer.WORKLOAD] == list(speed.MUST)


def test_the_contract_of_an_arm_is_the_one_that_all_its_processes_name() -> None:
    assert pairs.contract_of(1, {"engine": "c"}) == pairs.contract_of(1, {"engine": "c", "model": "c"}) == "c"
    assert pairs.contract_of(0, {"engine": None, "model": None}) is None


@pytest.mark.parametrize(
    ("arm", "said"),
    [
        (1, {"engine": None}),
        (1, {"engine": "c", "model": None}),
        (1, {"engine": "c", "model": "d"}),
        (0, {"engine": None, "model": "c"}),
    ],
)
def test_an_arm_that_does_not_compute_by_its_contract_is_not_measured(arm: int, said: dict[str, str | None]) -> None:
    with pytest.raises(pairs.BenchError, match=f"BI={arm} must compute by .* contract, but was .*engine: "):
        pairs.contract_of(arm, said)


def test_the_table_says_median_spread_ratio_and_must() -> None:
    console = Console(width=90, record=True, file=io.StringIO())
    console.print(
        pairs.table(measured(decode=[80.0, 94.0, 94.0, 99.0, 99.0], trainer=[110.0, 120.0, 120.0, 125.0, 130.0]))
    )
    drawn = console.export_text()
    assert "6 layers, hidden 1024, 5 rounds" in drawn
    lines = [" ".join(line.split()) for line in drawn.splitlines()]
    assert "decode, 1 request, tokens/s 100 ±0% 94 ±10% 0.94 ±10% ≥ 0.95" in lines
    assert "trainer step, 4 x 64 tokens, s 100 ±0% 120 ±8% 1.20 ±8% ≤ 1.20" in lines


def test_a_measurement_is_read_as_written_and_an_edited_one_refused(tmp_path: pathlib.Path) -> None:
    document, path = measured(), tmp_path / "bench.json"
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
