"""One of verl's entry points as a child: its log in a file, its progress watched, its first error named."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import psutil

from samebits.errors import SamebitsError

# The line that a Python traceback ends with, behind whatever prefix a logger or Ray put before it.
_ERROR = re.compile(r"(?:^|\s|\])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Timeout)(?::| \(|$).*)")
# Packages that are optional announce their absence this way.
_HARMLESS = re.compile(r"\w*Warning: |\w+ engine is not available: ")
_POLL_S = 0.5
# Seconds between two looks at the memory: asking for the share of each page walks every page table.
LOOK_S = 5.0
# Seconds that what is left of a run has to end after SIGTERM, and again after SIGKILL.
PATIENCE_S = 5.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RunFailed(SamebitsError):
    """A child ended with an error; ``first_error`` is that of its log."""

    def __init__(self, what: str, code: int, first_error: str, log: pathlib.Path) -> None:
        how = f"code {code}"
        if code < 0:
            killed = " (often the kernel, short of memory)" if -code == signal.SIGKILL else ""
            how = f"signal {signal.Signals(-code).name}{killed}"
        super().__init__(f"{what} ended with {how}. First error: {first_error}\nThe whole log: {log}")
        self.what, self.code, self.first_error = what, code, first_error


def first_error(log: str) -> str | None:
    """The first line of a log that names an exception, without terminal colours; None if there is none."""
    for line in log.splitlines():
        plain = re.sub(r"\x1b\[[0-9;]*m", "", line)
        if not _HARMLESS.search(plain) and (found := _ERROR.search(plain)):
            return found.group(1).strip()
    return None


def _memory_of(family: set[psutil.Process]) -> int:
    """Bytes that the processes hold, memory that they share counted once."""
    total = 0
    for one in family:
        with suppress(psutil.Error):
            total += one.memory_full_info().pss
    return total


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: pathlib.Path,
    watch: Callable[[], None] = lambda: None,
    what: str = "the run",
) -> int:
    """Runs a command in a session of its own until it ends, calling ``watch`` every half second.

    Whatever ends it (the command itself, an error in ``watch``, Ctrl-C, SIGTERM or SIGHUP), nothing that it started
    runs on.

    Returns:
        the largest memory in bytes that it and its descendants held.

    Raises:
        RunFailed: it ended with another code than 0.
        SystemExit: SIGTERM or SIGHUP came; the code is 128 and the signal's number.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    peak, next_look = 0, 0.0
    with log.open("wb") as file, _signals_noted() as signals:
        child = subprocess.Popen(
            command, env=dict(environment), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        family = {psutil.Process(child.pid)}
        try:
            while not signals and _runs(child):
                watch()
                if time.monotonic() > next_look:
                    family |= _members(child.pid, family)
                    peak, next_look = max(peak, _memory_of(family)), time.monotonic() + LOOK_S
                time.sleep(_POLL_S)
            watch()
        finally:
            _end(child, family)
    if signal.SIGINT in signals:
        raise KeyboardInterrupt
    if signals:
        raise SystemExit(128 + signals[0])
    if child.returncode != 0:
        error = first_error(log.read_text(errors="replace")) or "its log names no exception"
        raise RunFailed(what, child.returncode, error, log)
    return peak


@contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Notes the signals that would end us, for the loop to act on: none of them cuts short the ending of a child.

    Only the main thread can; elsewhere nothing is noted. A signal that is ignored, as under nohup, stays so.
    """
    noted: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in _ENDING}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda came, _: noted.append(came))
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _runs(child: subprocess.Popen[bytes]) -> bool:
    """Whether the child runs. One that ended stays unreaped, so that no other gets its pid, the session's id."""
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _members(session: int, family: set[psutil.Process]) -> set[psutil.Process]:
    """What runs of a session, of ``family``, and of the descendants of both.

    Ray's workers and vLLM's engines are in process groups of their own and lose their parent early; they keep the
    session. A process that left the session as well is known if it was once seen as a descendant.
    """
    # Only those that still are: another process may have the pid of one that ended, and children of its own.
    found = {one for one in family if one.is_running()}
    children = defaultdict[int, list[psutil.Process]](list)
    for one in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            children[one.ppid()].append(one)
            if os.getsid(one.pid) == session:
                found.add(one)
    todo = list(found)
    while todo:
        new = set(children[todo.pop().pid]) - found
        found |= new
        todo += new
    return {one for one in found if _lives(one)}


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _end(child: subprocess.Popen[bytes], family: set[psutil.Process]) -> None:
    """Ends the child and all that it left running, at first kindly, then not; then reaps it."""
    for stop in (psutil.Process.terminate, psutil.Process.kill):
        asked: set[psutil.Process] = set()
        deadline = time.monotonic() + PATIENCE_S
        # Looked up at every turn: one that is about to end may yet start another.
        while (family := _members(child.pid, family)) and time.monotonic() < deadline:
            for one in family - asked:
                with suppress(psutil.Error):
                    stop(one)
            asked |= family
            time.sleep(0.1)
    child.wait()


def python_module(module: str, config: str, overrides: Mapping[str, object]) -> list[str]:
    """The command that runs one of verl's Hydra entry points with a configuration of ours."""
    folder = pathlib.Path(__file__).resolve().parent / "config"
    arguments = [f"{key}={value}" for key, value in overrides.items()]
    return [sys.executable, "-m", module, f"--config-path={folder}", f"--config-name={config}", *arguments]
