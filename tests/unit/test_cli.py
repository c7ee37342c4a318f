"""The command line: every command explains itself with an example, errors are one message, exit codes are kept."""

import json
from pathlib import Path

import pytest
import runs
import toy
import typer
from typer.testing import CliRunner

from samebits import cli
from samebits.evidence import receipt
from samebits.judge import judge_run, read_bounds
from samebits.recipe import launch
from samebits.sources.pins import Pins


def commands(app: typer.Typer, *path: str) -> list[list[str]]:
    named = [[*path, str(command.name)] for command in app.registered_commands]
    return named + [
        c for g in app.registered_groups if g.typer_instance for c in commands(g.typer_instance, *path, str(g.name))
    ]


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, list(arguments))
    return done.exit_code, done.output


@pytest.mark.parametrize("command", commands(cli.app), ids=" ".join)
def test_each_command_has_help_with_an_example(command: list[str]) -> None:
    code, said = run(*command, "--help")
    assert code == 0 and "Example" in said


@pytest.fixture
def checkable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose one upstream is toy: release 1.0 in the cache, base main not at hand."""
    source, pin = toy.release(tmp_path)
    cached = tmp_path / "cache" / pin.sha256 / pin.file
    cached.parent.mkdir(parents=True)
    source.rename(cached)
    monkeypatch.setenv("SAMEBITS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cli, "PATCHES", toy.series(tmp_path / "patches"))
    monkeypatch.setattr(cli, "RECORDS", tmp_path / "records")
    pins = Pins(toy.COMMIT, {"toy": toy.upstream(pin, commit="1" * 40)}, ())
    monkeypatch.setattr("samebits.sources.pins.load_pins", lambda: pins)
    return tmp_path


def test_check_proves_what_is_at_hand_and_prints_what_is_not(checkable: Path) -> None:
    code, said = run("patch", "check", "--record")
    assert code == 1 and "toy main: toy-main.json does not exist" in said and "--checkout PATH" in said
    record = (checkable / "records" / "toy-1.0.json").read_text()
    for_main = record.replace('"base": "1.0"', f'"base": "main",\n "commit": "{"1" * 40}"')
    (checkable / "records" / "toy-main.json").write_text(for_main)
    code, said = run("patch", "check")
    assert code == 0
    assert "ok       toy 1.0  toy_cpu-1.0-py3-none-any.whl  2 files, as recorded" in said
    assert "missing  toy main 111111111111" in said and "1 bases are missing: they were not checked here." in said


def test_check_fails_with_one_message_and_without_a_traceback(checkable: Path) -> None:
    (checkable / "patches" / "toy" / "0001-answer-two" / "edits.toml").write_text(toy.EDITS.replace('"size"', '"gone"'))
    code, said = run("patch", "check", "--record")
    assert code == 1
    assert "error: toy 1.0: patches/toy/0001-answer-two, edit 1: toy/mod.py: gone: there is no 'gone'. Remedy:" in said
    assert "Traceback" not in said


def test_hashes_lists_statements(tmp_path: Path) -> None:
    (tmp_path / "mod.py").write_text(toy.FILES["toy/mod.py"])
    code, said = run("patch", "hashes", str(tmp_path / "mod.py"), "size")
    assert code == 0 and "return 1" in said and "its header" in said
    code, said = run("patch", "hashes", str(tmp_path / "mod.py"), "gone")
    assert code == 1 and "there is no 'gone'" in said


def test_an_unknown_base_is_a_usage_error(checkable: Path) -> None:
    code, said = run("patch", "export", "--base", "toy/2.0")
    assert code == 2 and "toy/2.0" in said


def test_a_run_is_judged_and_drawn_and_the_exit_code_is_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = {
        "max_abs": 0.25,
        "rounding": 0.125,
        "temperature": 1,
        "position": 1,
        "mask": 1,
        "tokens": 9,
        "command": "x",
    }
    (tmp_path / "bounds.json").write_text(json.dumps({"qwen3-4x1024": bounds}))
    monkeypatch.setattr(launch, "BOUNDS", tmp_path / "bounds.json")
    bi0, bi1 = runs.make_run(tmp_path / "bi0", 0), runs.make_run(tmp_path / "bi1", 1)

    assert run("judge", str(bi0))[0] == 0, "arm 0 claims observe"
    assert run("judge", str(bi0), "--claim", "zero")[0] == 1
    assert run("judge", str(bi1))[0] == 0, "arm 1 claims zero"

    for folder, claim in ((bi0, "observe"), (bi1, "zero")):
        receipt.write(folder / "receipt.json", judge_run(folder, claim, read_bounds(launch.BOUNDS)))
        assert run("judge", str(folder / "receipt.json"))[0] == 0
    facts = {k: v for k, v in receipt.read(bi1 / "receipt.json").items() if k not in ("schema", "checksum")}
    receipt.write(tmp_path / "lie.json", receipt.build(**{**facts, "claim": "observe"}))
    code, said = run("judge", str(tmp_path / "lie.json"))
    assert code == 1 and "the claim is observe, not zero" in said, "arm 1 may not claim less than zero"
    page, picture = tmp_path / "page.html", tmp_path / "picture.svg"
    assert run("report", str(bi0), str(bi1), "--out", str(page), "--svg", str(picture))[0] == 0
    assert page.read_text().startswith("<!DOCTYPE html>") and picture.read_text().startswith("<svg")


def test_a_run_that_is_not_there_is_one_message(tmp_path: Path) -> None:
    code, said = run("judge", str(tmp_path / "nowhere.json"))
    assert code == 1 and "error:" in said and "Traceback" not in said
