"""Runs side by side: which figures of verl's count, and which run goes on where."""

import json
import pathlib
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from samebits.bench import steps
from samebits.errors import SamebitsError
from samebits.evidence import schema
from samebits.report import charts
from samebits.report.steps import figures
from samebits.report.tables import write_page


def logged(**changes: Any) -> dict[str, Any]:
    data = {name: 1.0 for name in steps.FIGURES.values()} | {f"timing_s/{key}": 2.0 for key in steps.PHASES.values()}
    return {**data, "timing_s/verify": 0.5, "timing_s/step": 10.0, **changes}


def write(folder: pathlib.Path, first: int, rows: dict[int, dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"step": step, "data": data}) + "\n" for step, data in rows.items()]
    (folder / f"metrics-{first:04d}.jsonl").write_text("".join(lines))


def test_the_phases_of_a_step_add_up_to_it_and_comparing_is_one_of_them(tmp_path: pathlib.Path) -> None:
    write(tmp_path, 0, {1: logged(**{"timing_s/save_checkpoint": 0.25})})
    ((row),) = steps.rows(tmp_path, 1)
    assert row["seconds"]["actor forward and backward"] == 1.5 and row["seconds"]["compare"] == 0.5
    assert sum(row["seconds"].values()) == 10.0 - 0.25, "saving a checkpoint is no part of a step"


def test_a_step_that_ran_twice_counts_as_it_was_last(tmp_path: pathlib.Path) -> None:
    """A run that was killed after step 3 and goes on from the checkpoint of step 2."""
    reward = steps.FIGURES["reward"]
    write(tmp_path, 0, {step: logged(**{reward: 1.0 * step}) for step in (1, 2, 3)})
    write(tmp_path, 2, {step: logged(**{reward: 10.0 * step}) for step in (3, 4)})
    assert [row["reward"] for row in steps.rows(tmp_path, 4)] == [1.0, 2.0, 30.0, 40.0]


@pytest.mark.parametrize("name", [*steps.FIGURES.values(), "timing_s/verify"])
def test_a_step_without_a_figure_is_an_error(tmp_path: pathlib.Path, name: str) -> None:
    data = logged()
    del data[name]
    write(tmp_path, 0, {1: data})
    with pytest.raises(SamebitsError, match=f"step 1 lacks {name}"):
        steps.rows(tmp_path, 1)


def test_a_step_that_compared_nothing_or_is_missing_is_an_error(tmp_path: pathlib.Path) -> None:
    write(tmp_path, 0, {1: logged(**{steps.FIGURES["compared"]: 0.0})})
    with pytest.raises(SamebitsError, match="step 1 compared nothing"):
        steps.rows(tmp_path, 1)
    write(tmp_path, 0, {1: logged()})
    with pytest.raises(SamebitsError, match="step 2 lacks"):
        steps.rows(tmp_path, 2)


def test_a_run_goes_on_from_its_last_whole_checkpoint(tmp_path: pathlib.Path) -> None:
    assert steps.reached(tmp_path) == 0
    (tmp_path / "checkpoints" / "global_step_5").mkdir(parents=True)
    assert steps.reached(tmp_path) == 0, "a checkpoint that is being written is none"
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")
    assert steps.reached(tmp_path) == 4


def test_the_table_has_the_ratio_of_each_phase_and_the_first_step_is_not_timed(tmp_path: pathlib.Path) -> None:
    runs = {}
    for name, seconds in (("bi0", 2.0), ("bi1", 3.0)):
        first = logged(**{"timing_s/gen": 99.0, "timing_s/step": 107.0})
        later = logged(**{"timing_s/gen": seconds, "timing_s/step": seconds + 8})
        write(tmp_path / name, 0, {1: first, 2: later})
        runs[name] = steps.rows(tmp_path / name, 2)
    console = Console(width=200, record=True)
    for table in steps.tables({"steps": 2, "runs": runs}):
        console.print(table)
    text = console.export_text()
    (generate,) = (line.split() for line in text.splitlines() if line.strip().startswith("generate"))
    (total,) = (line.split() for line in text.splitlines() if line.strip().startswith("total"))
    assert generate == ["generate", "2", "3", "1.500"] and total == ["total", "10", "11", "1.100"]


def test_the_page_has_a_curve_of_each_run_and_needs_nothing_but_itself(tmp_path: pathlib.Path) -> None:
    row = {"seconds": {"generate": 1.0}, **dict.fromkeys(steps.FIGURES, 1.0)}
    runs = {name: [{"step": i + 1, **row, "reward": i / 4.0} for i in range(5)] for name in steps.COLUMNS}
    document = {"steps": 5, "runs": runs}
    drawn = figures(document)
    for what, svg in drawn:
        root = ElementTree.fromstring(str(svg))
        assert root.get("aria-label") == what
        assert [t.text for t in root.iter() if t.get("class") == "value"] == list(steps.COLUMNS)
        lines = [path.get("d", "") for path in root.iter() if (path.get("class") or "").startswith("line-")]
        assert [line.count("L") for line in lines[::2]] == [4, 4, 4], "a point a step, then the mark of the name"
    (reward,) = (str(svg) for what, svg in drawn if what == "mean reward")
    assert ">1</text>" in reward and ">0</text>" in reward
    page = tmp_path / "steps.html"
    write_page(page, "Runs", steps.tables(document), ["missed: nothing"], drawn)
    text = page.read_text()
    assert text.count("<figure>") == 4 and "missed: nothing" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_a_run_of_one_step_has_a_curve_too() -> None:
    assert "<svg" in charts.curves([("bi1", [0.0])], "k3")


def test_a_document_of_steps_follows_its_schema() -> None:
    row = {"step": 1, "seconds": {"generate": 1.0}, **dict.fromkeys(steps.FIGURES, 1.0)}
    document = {"schema": "samebits.steps/1", "command": "x", "date": "2026-12-01", "steps": 1, "runs": {"bi0": [row]}}
    found = schema.problems({**document, "executions": {}, "checksum": "0" * 64}, "steps-1")
    assert found and all("executions" in problem or "non-empty" in problem for problem in found)
    found = schema.problems({**document, "runs": {"bi0": [{**row, "more": 1}]}, "checksum": "0" * 64}, "steps-1")
    assert any("more" in problem for problem in found)
