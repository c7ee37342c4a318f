"""The command line: every command explains itself with an example, errors are one message, exit codes are kept."""

from pathlib import Path

import pytest
import toy
import typer
from typer.testing import CliRunner

from samebits import cli
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
