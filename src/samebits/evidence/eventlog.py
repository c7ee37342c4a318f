"""The event log: what happened in a run, in order, append-only, one JSON object a line.

Each line ends with a sha256 over the line before it and itself, so an edit shows at its line. A small file beside
the log (`<log>.head`) holds the length and last sha256, so a cut shows too, even one between two lines.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from samebits.errors import SamebitsError

from . import strictjson

START = "0" * 64
_SEAL = re.compile(rb',"sha256":"([0-9a-f]{64})"\}\n')
_SEAL_LENGTH = len(',"sha256":""}\n') + 64


class EventLogError(SamebitsError):
    """A log that cannot be continued: the file, what is wrong with it, what to do."""


class Head(NamedTuple):
    """A state of the log: its length in bytes, its number of entries, the sha256 of the last one."""

    bytes: int
    seq: int
    sha256: str


@dataclass(frozen=True)
class Log:
    """The entries before the first damage, and what the damage is (None: the log is whole)."""

    entries: list[dict[str, Any]]
    damage: str | None


def append(path: Path, event: str, **data: Any) -> int:
    """Append one event with JSON values `data`; return its sequence number, counted from 1.

    Writers take turns by a lock on the log. EventLogError if the log is damaged, or the disk does not take the
    whole line: its part is removed again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path, create=True) as log:
        size = os.fstat(log).st_size
        if size == 0 and not _head(path).exists():
            _write_head(path, Head(0, 0, START))
        parsed, damage = _verify(log, path)
        if damage:
            raise EventLogError(f"{path}: {damage}; keep it as it is and start the run in a new folder")
        last = parsed[-1][1] if parsed else Head(0, 0, START)
        time = datetime.now(UTC).isoformat(timespec="microseconds")
        body = strictjson.canonical({"seq": last.seq + 1, "time": time, "event": event, "data": data})[:-1]
        digest = _seal(last.sha256, body)
        line = body + f',"sha256":"{digest}"}}\n'.encode()
        try:
            if os.write(log, line) != len(line):
                raise OSError("no space for the whole line")
            os.fsync(log)
        except OSError as error:
            os.ftruncate(log, size)
            raise EventLogError(f"{path}: event not written: {error}; free space and run again") from error
        _write_head(path, Head(size + len(line), last.seq + 1, digest))
    return last.seq + 1


def read(path: Path) -> Log:
    """Everything before the first cut or edit. FileNotFoundError if there is no log."""
    with _locked(path, create=False) as log:
        parsed, damage = _verify(log, path)
    return Log([entry for entry, _ in parsed], damage)


def _verify(log: int, path: Path) -> tuple[list[tuple[dict[str, Any], Head]], str | None]:
    """The whole log against itself and its head, which a writer that was killed may have left one entry behind."""
    parsed, damage = _parse(_content(log), Head(0, 0, START))
    if damage:
        return parsed, damage
    try:
        head = _read_head(path)
    except EventLogError as error:
        return parsed, str(error)
    if head.seq > len(parsed):
        return parsed, f"cut after entry {len(parsed)} of {head.seq}"
    if head.seq and parsed[head.seq - 1][1] != head:
        return parsed, f"entry {head.seq} is not the one recorded in {_head(path).name}"
    return parsed, None


def _parse(data: bytes, after: Head) -> tuple[list[tuple[dict[str, Any], Head]], str | None]:
    """The entries in `data`, which follow `after`, each with the head that it makes; and the first damage."""
    parsed: list[tuple[dict[str, Any], Head]] = []
    for line in data.splitlines(keepends=True):
        seal = _SEAL.fullmatch(line[-_SEAL_LENGTH:])
        if not seal or _seal(after.sha256, line[:-_SEAL_LENGTH]) != seal[1].decode():
            return parsed, f"cut or edited after entry {after.seq}"
        try:
            entry = strictjson.loads(line)
            sequence = entry["seq"]
        except (ValueError, KeyError, TypeError):
            sequence = None
        if sequence != after.seq + 1:
            return parsed, f"line after entry {after.seq} is not the next event"
        after = Head(after.bytes + len(line), sequence, entry["sha256"])
        parsed.append((entry, after))
    return parsed, None


def _seal(previous: str, body: bytes) -> str:
    return hashlib.sha256(previous.encode() + body).hexdigest()


def _head(path: Path) -> Path:
    return path.with_name(path.name + ".head")


def _write_head(path: Path, head: Head) -> None:
    temporary = path.with_name(path.name + ".head.tmp")  # one writer at a time: the log is locked
    temporary.write_bytes(strictjson.canonical(head._asdict()))
    temporary.replace(_head(path))


def _read_head(path: Path) -> Head:
    try:
        data = _head(path).read_bytes()
        head = Head(**strictjson.loads(data))
        counts = all(type(count) is int and count >= 0 for count in (head.bytes, head.seq))
        if not counts or strictjson.canonical(head._asdict()) != data or (head.seq == 0) != (head == Head(0, 0, START)):
            raise ValueError
    except (OSError, ValueError, TypeError):
        raise EventLogError(f"{_head(path).name} is missing or edited: a cut of the log would not show") from None
    return head


def _content(log: int) -> bytes:
    pieces: list[bytes] = []
    while piece := os.pread(log, 1 << 20, sum(map(len, pieces))):
        pieces.append(piece)
    return b"".join(pieces)


@contextmanager
def _locked(path: Path, create: bool) -> Iterator[int]:
    log = os.open(path, (os.O_RDWR | os.O_APPEND | os.O_CREAT) if create else os.O_RDONLY, 0o644)
    try:
        fcntl.flock(log, fcntl.LOCK_EX if create else fcntl.LOCK_SH)
        yield log
    finally:
        os.close(log)
