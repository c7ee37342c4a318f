"""Localisation from outside: starts the tracing engines, has their traces compared, and keeps the accused operator.

`between` compares two runs of the same tokens (two weight folders, two arms); `planted` tries the localisation itself
on faults drawn from seeds; `of_cell` takes up a cell of the matrix that differed.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from samebits.errors import SamebitsError
from samebits.evidence import strictjson
from samebits.judge.localise import Accused, first_difference
from samebits.judge.matrix import cells
from samebits.recipe import process

from . import invariance
from .device import Device, device
from .weights import write_weights

Say = Callable[[str], None]
# A prompt, and one beside it, each with two tokens of answer: prefill, decode and a batch.
PROMPTS = {"first": 24, "second": 9}
_ENGINE = {
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "max_model_len": 128,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
}


class TraceError(SamebitsError):
    """A comparison that cannot be traced."""


@dataclass(frozen=True)
class Side:
    """One of two runs: its device (arm and environment), its job, the request to look at (None: all)."""

    name: str
    on: Device
    job: dict[str, Any]
    request: str | None = None


@dataclass(frozen=True)
class Planted:
    """One seed: what was planted, what was named for it, and what was named for the unchanged run."""

    truth: dict[str, Any]
    named: Accused | None
    unchanged: Accused | None

    @property
    def right(self) -> bool:
        """The layer, the module and, where one was planted in, the operator and its call are the named ones."""
        if self.named is None or self.unchanged is not None:
            return False
        wanted, named = self.truth, self.named
        same = (named.layer, named.module) == (wanted["layer"], wanted["module"])
        return same and wanted["operator"] in (None, named.operator) and wanted["call"] in (None, named.call)


def _requests() -> list[dict[str, Any]]:
    return [invariance.request(name, length, answer=2) for name, length in PROMPTS.items()]


def _job(weights: pathlib.Path, dtype: str, on: Device, **more: Any) -> dict[str, Any]:
    # With its weights kept under their names, an engine can be asked which of them differs.
    keep = {"additional_config": {"cpu_keep_weights": True}} if on.name == "cpu" else {}
    arguments = {"model": str(weights.resolve()), "dtype": dtype, **on.arguments, **_ENGINE, **keep}
    return {"engine": arguments, "says": [_requests()], **more}


def _run(job: dict[str, Any], on: Device, folder: pathlib.Path, what: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "job.json"
    file.write_text(json.dumps(job))
    words = [sys.executable, "-m", "samebits.probe.localise", str(file)]
    process.run(words, on.environment, folder / "engine.log", what=what)


def _trace(folder: pathlib.Path, name: str = "reference") -> Any:
    return strictjson.loads((folder / f"{name}.trace.json").read_bytes())


def model_folder(out: pathlib.Path, layers: int, hidden: int) -> pathlib.Path:
    """The seeded model of the matrix under OUT/weights."""
    if out.exists() and any(out.iterdir()):
        raise invariance.OutputInUse(f"{out} is not empty: choose another --out, or remove it")
    write_weights(out / "weights", invariance.SEED, layers, hidden)
    return out / "weights"


def planted(
    seeds: Sequence[int], weights: pathlib.Path, out: pathlib.Path, arm: int, dtype: str, device_name: str
) -> list[Planted]:
    """Plant a fault for each seed in a second run of one engine, and name it. Raises RunFailed."""
    on = device(device_name, arm)
    _run(_job(weights, dtype, on, seeds=list(seeds)), on, out / "planted", "the traced engine")
    reference = _trace(out / "planted")
    found = []
    for seed in seeds:
        faulty, same = (_trace(out / "planted", f"{kind}-{seed}") for kind in ("planted", "unchanged"))
        named = first_difference(reference, faulty)
        found.append(Planted(faulty["truth"], named, first_difference(reference, same)))
    return found


def between(left: Side, right: Side, out: pathlib.Path, say: Say) -> Accused | None:
    """Trace two runs and name the first difference; its operator's inputs are kept in OUT/replay/left and right."""
    for side in (left, right):
        say(f"tracing {side.name}")
        _run(side.job, side.on, out / side.name, f"the traced engine, {side.name}")
    traces = [_trace(out / side.name) for side in (left, right)]
    named = first_difference(traces[0], traces[1], left.request, right.request)
    (out / "localised.json").write_bytes(strictjson.dumps(named and named.document()))
    if named is None or not named.differ:
        return named
    for side, trace in zip((left, right), traces, strict=True):
        key = [named.module, named.operator, named.call]
        if named.operator == "output" or key not in trace["operators"]:
            say(f"no replay of {side.name}: {named.operator} is a whole module, not one operator")
            continue
        request = side.request or named.request
        say(f"keeping {named.operator} of {side.name}")
        capture = {"key": key, "request": request, "position": named.position}
        _run({**side.job, "capture": capture}, side.on, out / side.name, f"the traced engine, {side.name}")
        if (why := out / side.name / "no-replay.txt").is_file():
            say(f"no replay of {side.name}: {why.read_text().strip()}")
            continue
        (out / "replay").mkdir(exist_ok=True)
        (out / side.name / "replay").rename(out / "replay" / side.name)
    return named


def two_sides(weights: Sequence[pathlib.Path], arms: Sequence[int], dtype: str, device_name: str) -> tuple[Side, Side]:
    """Two weight folders under one arm, or one under two arms, or both."""
    if not (len(weights) == 2 or len(arms) == 2):
        raise TraceError("there is one side only: give --weights or --arm twice, or --plant SEED")
    sides = []
    for i, name in enumerate(("left", "right")):
        on = device(device_name, arms[min(i, len(arms) - 1)])
        sides.append(Side(name, on, _job(weights[min(i, len(weights) - 1)], dtype, on)))
    return sides[0], sides[1]


def of_cell(
    asked: invariance.Asked, cell: dict[str, Any], out: pathlib.Path, say: Say
) -> tuple[Accused | None, pathlib.Path]:
    """Trace both sides of a cell that differed, its engines and requests as in the matrix."""
    wanted = next(c for c in cells(asked.quick) if c.name == cell["cell"])
    made = {one.name: one for one in invariance.engines(asked.quick)}
    folder = out / "localised" / f"arm{cell['arm']}-{cell['dtype']}"
    weights = folder / "weights"
    write_weights(weights, invariance.SEED, asked.layers, asked.hidden)
    on = device(str(asked.device), cell["arm"])
    sides = []
    places = zip(("left", "right"), (wanted.left, wanted.right), ("request", "against"), strict=True)
    for name, (engine, last), request in places:
        one = made[engine]
        if not one.arguments["enforce_eager"]:
            raise TraceError(f"{cell['cell']}: a compiled engine runs no hooks: localise an eager cell")
        names = list(one.says)
        # A warm cache needs what came before; other requests leave nothing behind.
        says = [one.says[n] for n in (names[: names.index(last) + 1] if engine == "prefix" else [last])]
        arguments = {"model": str(weights.resolve()), "dtype": cell["dtype"], **on.arguments, **one.arguments}
        job = {"engine": arguments, "threads": one.threads, "says": says}
        sides.append(Side(name, on, job, cell["first"][request]))
    try:
        return between(sides[0], sides[1], folder, say), folder
    finally:
        shutil.rmtree(weights)


def replay(folders: Sequence[pathlib.Path], arm: int, device_name: str) -> list[dict[str, Any]]:
    """Run kept operators again in a child: folder, operator, differing elements, elements. Raises RunFailed."""
    on = device(device_name, arm)
    with tempfile.TemporaryDirectory() as scratch:
        log = pathlib.Path(scratch) / "replay.log"
        words = [sys.executable, "-m", "samebits.probe.replay", *(str(folder.resolve()) for folder in folders)]
        process.run(words, on.environment, log, what="the replay")
        return [strictjson.loads(line) for line in log.read_bytes().splitlines() if line.startswith(b"{")]
