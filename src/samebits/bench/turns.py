"""Processes that take turns: one a arm, kept alive, asked for one workload at a time; the others sleep meanwhile.

A process answers on the standard output that it was started with; what it and its libraries print goes into its log.
"""

import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from samebits.recipe.process import RunFailed, first_error

# A turn repeats its workload until this long has passed, so that a clock's or a scheduler's grain does not count.
TURN_S = 2.0
PATIENCE_S = 10.0

Workload = Callable[[], int]


@dataclass(frozen=True)
class Served:
    """What a process serves: workloads by name, what it says of itself, and what wraps a turn without being timed."""

    workloads: Mapping[str, Workload]
    said: dict[str, Any]
    awake: Callable[[], AbstractContextManager[None]] = nullcontext


class Child:
    """A process that serves workloads (see `serve`), in a session of its own; to be used as a context."""

    def __init__(
        self, what: str, module: str, job: Mapping[str, Any], environment: Mapping[str, str], log: pathlib.Path
    ):
        self.what, self.log = what, log
        command = [sys.executable, "-m", module, json.dumps(job)]
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
            )

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # what it waits for: it ends by itself
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE_S)
        with suppress(ProcessLookupError):  # and what it started: an engine's own processes outlive one that failed
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ready(self) -> dict[str, Any]:
        """What the process says of itself once it can serve. RunFailed if it ends before."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            error = first_error(self.log.read_text(errors="replace")) or "its log names no exception"
            raise RunFailed(self.what, code, error, self.log)
        return dict(json.loads(line))

    def ask(self, workload: str) -> dict[str, Any]:
        """{"units": done, "seconds": taken} of one turn. RunFailed if the process ends."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(workload + "\n")
            self._process.stdin.flush()
        return self.ready()


def serve(make: Callable[[dict[str, Any]], Served]) -> None:
    """The main of such a process. make: its job -> what it serves.

    A workload does its work once and returns how many units (tokens) it did; it is called once more at the start, for
    what only the first call does."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    served = make(json.loads(sys.argv[1]))
    with served.awake():
        for workload in served.workloads.values():
            workload()
    print(json.dumps(served.said), file=answers, flush=True)
    for line in sys.stdin:
        with served.awake():
            units, began = 0, time.perf_counter()
            while (seconds := time.perf_counter() - began) < TURN_S:
                units += served.workloads[line.strip()]()
        print(json.dumps({"units": units, "seconds": seconds}), file=answers, flush=True)
    sys.stdout.flush()
    os._exit(0)  # threads of the libraries would keep it waiting


def take_turns[Arm](
    children: Mapping[Arm, Child], workloads: Sequence[str], rounds: int, say: Callable[[str], None]
) -> dict[str, dict[Arm, list[float]]]:
    """Units a second of each workload and arm, one number a round. Who begins changes with the round."""
    rates: dict[str, dict[Arm, list[float]]] = {w: {arm: [] for arm in children} for w in workloads}
    for turn in range(rounds):
        for workload in workloads:
            order = list(children)[:: -1 if turn % 2 else 1]
            for arm in order:
                say(f"round {turn + 1} of {rounds}: {workload}, {children[arm].what}")
                done = children[arm].ask(workload)
                rates[workload][arm].append(done["units"] / done["seconds"])
    return rates


def spread(values: Sequence[float], form: str) -> str:
    """The median of the rounds as `form` writes it, and half their range in percent of it."""
    middle = statistics.median(values)
    return f"{form.format(middle)} ±{50 * (max(values) - min(values)) / middle:.0f}%"
