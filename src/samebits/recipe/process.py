"""One of verl's entry points as a child: its log in a file, its progress watched, its first error named."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import psutil

from samebits.errors import SamebitsError

# The line that a Python traceback ends with, behind whatever prefix a logger or Ray put before it.
_ERROR = re.compile(r"(?:^|\s|\])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Timeout)(?::| \(|$).*)")
# Packages that are optional announce their absence this way.
_HARMLESS = re.compile(r"Warning|is not available|No module named '(?:torchtitan|veomni|nemo_automodel|mindspeed)")
_POLL_S = 0.5


class RunFailed(SamebitsError):
    """A child ended with an error; the message holds the first error of its log."""


def first_error(log: str) -> str | None:
    """The first line of a log that names an exception, without terminal colours; None if there is none."""
    for line in log.splitlines():
        plain = re.sub(r"\x1b\[[0-9;]*m", "", line)
        if not _HARMLESS.search(plain) and (found := _ERROR.search(plain)):
            return found.group(1).strip()
    return None


def _memory_of(process: psutil.Process) -> int:
    """Bytes that the process and its descendants hold, memory that they share counted once."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: pathlib.Path,
    watch: Callable[[], None] = lambda: None,
    what: str = "the run",
) -> int:
    """Runs a command in a process group of its own until it ends, calling ``watch`` every half second.

    Returns:
        the largest memory in bytes that it and its descendants held.

    Raises:
        RunFailed: it ended with another code than 0.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    peak, next_look = 0, 0.0
    with log.open("wb") as file:
        child = subprocess.Popen(
            command, env=dict(environment), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process = psutil.Process(child.pid)
            while child.poll() is None:
                watch()
                if time.monotonic() > next_look:
                    # Asking for shares of memory walks every page table: not at every turn.
                    peak, next_look = max(peak, _memory_of(process)), time.monotonic() + 5
                time.sleep(_POLL_S)
            watch()
        finally:
            _end(child)
    if child.returncode != 0:
        error = first_error(log.read_text(errors="replace")) or "its log names no exception"
        raise RunFailed(f"{what} ended with code {child.returncode}. First error: {error}\nThe whole log: {log}")
    return peak


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends the child's process group: Ray's daemons outlive a driver that was killed."""
    try:
        group = os.getpgid(child.pid)
    except ProcessLookupError:
        group = child.pid
    for signal_, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(group, signal_)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + patience
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
    child.wait()


def python_module(module: str, config: str, overrides: Mapping[str, object]) -> list[str]:
    """The command that runs one of verl's Hydra entry points with a configuration of ours."""
    folder = pathlib.Path(__file__).resolve().parent / "config"
    arguments = [f"{key}={value}" for key, value in overrides.items()]
    return [sys.executable, "-m", module, f"--config-path={folder}", f"--config-name={config}", *arguments]
