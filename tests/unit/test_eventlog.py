"""The event log: two writers lose nothing; a cut or an edit at any byte shows, and what came before it is read."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.evidence import eventlog

EVENTS = 6


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    for k in range(EVENTS):
        eventlog.append(path, "step", step=k, note="θ" * k + "\n\r\u2028")
    return path


def copy(whole: Path, folder: Path, log: bytes | None = None, head: bytes | None = None) -> Path:
    path = folder / "events.jsonl"
    path.write_bytes(whole.read_bytes() if log is None else log)
    whole_head = whole.with_name("events.jsonl.head").read_bytes()
    path.with_name("events.jsonl.head").write_bytes(whole_head if head is None else head)
    return path


def entries_before(whole: Path, byte: int) -> int:
    return whole.read_bytes()[:byte].count(b"\n")


def test_entries_come_back_in_order(whole: Path) -> None:
    log = eventlog.read(whole)
    assert log.damage is None
    assert [e["seq"] for e in log.entries] == list(range(1, EVENTS + 1))
    assert [e["data"]["step"] for e in log.entries] == list(range(EVENTS))
    assert all(e["event"] == "step" and e["time"].endswith("+00:00") for e in log.entries)


def test_each_line_seals_the_one_before_it(whole: Path) -> None:
    previous = "0" * 64
    for line, entry in zip(whole.read_bytes().splitlines(), eventlog.read(whole).entries, strict=True):
        body = line[: -len(f',"sha256":"{previous}"}}')]
        previous = hashlib.sha256(previous.encode() + body).hexdigest()
        assert entry["sha256"] == previous


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_cut_at_any_byte_shows(whole: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = whole.read_bytes()
    cut = data.draw(st.integers(0, len(content) - 1))
    path = copy(whole, tmp_path_factory.mktemp("cut"), log=content[:cut])
    log = eventlog.read(path)
    assert log.damage
    assert log.entries == eventlog.read(whole).entries[: entries_before(whole, cut)]
    with pytest.raises(eventlog.EventLogError, match="keep it as it is and start the run in a new folder"):
        eventlog.append(path, "more")


def test_a_cut_between_two_lines_shows(whole: Path, tmp_path: Path) -> None:
    lines = whole.read_bytes().splitlines(keepends=True)
    for kept in range(EVENTS):
        log = eventlog.read(copy(whole, tmp_path, log=b"".join(lines[:kept])))
        assert log.damage == f"cut after entry {kept} of {EVENTS}"
        assert len(log.entries) == kept


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_an_edit_at_any_byte_shows(whole: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = bytearray(whole.read_bytes())
    where = data.draw(st.integers(0, len(content) - 1))
    content[where] ^= data.draw(st.integers(1, 255))
    log = eventlog.read(copy(whole, tmp_path_factory.mktemp("edit"), log=bytes(content)))
    assert log.damage
    assert log.entries == eventlog.read(whole).entries[: entries_before(whole, where)]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_an_edit_of_the_head_shows_and_costs_no_entry(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    head = bytearray(whole.with_name("events.jsonl.head").read_bytes())
    head[data.draw(st.integers(0, len(head) - 1))] ^= data.draw(st.integers(1, 255))
    log = eventlog.read(copy(whole, tmp_path_factory.mktemp("head"), head=bytes(head)))
    assert log.damage
    assert log.entries == eventlog.read(whole).entries


def test_a_head_that_is_gone_shows(whole: Path, tmp_path: Path) -> None:
    path = copy(whole, tmp_path)
    path.with_name("events.jsonl.head").unlink()
    assert "head is missing" in str(eventlog.read(path).damage)
    with pytest.raises(eventlog.EventLogError, match="head is missing"):
        eventlog.append(path, "more")


@given(st.binary(max_size=200), st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_no_content_crashes_the_reader(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, log: bytes, head: bytes
) -> None:
    assert eventlog.read(copy(whole, tmp_path_factory.mktemp("any"), log=log, head=head)).damage


@pytest.mark.parametrize("field", ["bytes", "seq", "sha256"])
@pytest.mark.parametrize("value", [-1, 0, 1, 2**62, 1.5, True, None, "x", [], {}])
def test_no_head_crashes_reader_or_writer(whole: Path, tmp_path: Path, field: str, value: object) -> None:
    head = json.loads(whole.with_name("events.jsonl.head").read_bytes()) | {field: value}
    path = copy(whole, tmp_path, head=json.dumps(head, separators=(",", ":")).encode())
    log = eventlog.read(path)
    assert log.damage and log.entries == eventlog.read(whole).entries
    with pytest.raises(eventlog.EventLogError):
        eventlog.append(path, "more")


def test_a_log_that_a_killed_writer_left_one_entry_ahead_is_continued(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    eventlog.append(path, "first")
    head = path.with_name("events.jsonl.head").read_bytes()
    eventlog.append(path, "second")
    path.with_name("events.jsonl.head").write_bytes(head)  # killed between the line and the head
    assert eventlog.append(path, "third") == 3
    log = eventlog.read(path)
    assert (log.damage, [e["event"] for e in log.entries]) == (None, ["first", "second", "third"])


def test_a_full_disk_leaves_the_log_as_it_was(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copy(whole, tmp_path)
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    with pytest.raises(eventlog.EventLogError, match="free space and run again"):
        eventlog.append(path, "more")
    monkeypatch.undo()
    assert path.read_bytes() == whole.read_bytes()
    assert eventlog.append(path, "more") == EVENTS + 1


def _write_many(path: Path, writer: int) -> None:
    for k in range(50):
        eventlog.append(path, "tick", writer=writer, k=k)


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(path, w)) for w in range(2)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    log = eventlog.read(path)
    assert log.damage is None
    for writer in range(2):
        assert [e["data"]["k"] for e in log.entries if e["data"]["writer"] == writer] == list(range(50))


def test_no_log_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        eventlog.read(tmp_path / "events.jsonl")
