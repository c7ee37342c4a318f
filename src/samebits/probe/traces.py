"""Localisation from outside: starts the tracing engines, has their traces compared, and keeps the accused operator.

`between` compares two runs of the same tokens (two weight folders, two arms); `planted` tries the localisation itself
on faults drawn from seeds; `of_cell` takes up a cell of the matrix that differed.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import pathlib
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from samebits.errors import SamebitsError
from samebits.evidence import strictjson
from samebits.evidence.planted import KIND
from samebits.judge.localise import Accused, first_difference
from samebits.judge.matrix import cells
from samebits.judge.planted import is_right
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
    """One seed: what was planted, what was named for it and for the unchanged run, and how long both took."""

    truth: dict[str, Any]
    named: Accused | None
    unchanged: Accused | None
    seconds: float

    @property
    def right(self) -> bool:
        """What was planted was named, and the unchanged run was accused of nothing."""
        return is_right(self.truth, _document(self.named)) and self.unchanged is None

    def document(self) -> dict[str, Any]:
        return {
            "seed": self.truth["seed"],
            "truth": {key: self.truth[key] for key in ("kind", "layer", "module", "operator", "call", "what")},
            "named": _document(self.named),
            "right": self.right,
            "unchanged": _document(self.unchanged),
            "seconds": round(self.seconds, 2),
        }


def _document(accused: Accused | None) -> dict[str, Any] | None:
    return None if accused is None else accused.document()


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
        began = time.monotonic()
        faulty, same = (_trace(out / "planted", f"{kind}-{seed}") for kind in ("planted", "unchanged"))
        named = first_difference(reference, faulty)
        unchanged = first_difference(reference, same)
        seconds = faulty["seconds"] + time.monotonic() - began
        found.append(Planted(faulty["truth"], named, unchanged, seconds))
    return found


def try_planted(
    seeds: range,
    tried: Sequence[int],
    out: pathlib.Path,
    dtype: str,
    device_name: str,
    size: tuple[int, int],
    say: Say,
) -> dict[str, Any]:
    """Plant a fault for each seed in the seeded model under each arm of `tried`; the document is OUT/planted.json too.

    size: layers and hidden of the model.

    Raises:
        SamebitsError: a folder in use, an arm that cannot run, or a run that failed.
    """
    on = {arm: device(device_name, arm) for arm in tried}
    weights = model_folder(out, *size)
    plan = {"engine": {**_ENGINE, "dtype": dtype}, "prompts": PROMPTS, "seeds": list(seeds)}
    digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
    words = ["samebits", "check", "planted", "--out", "OUT", "--seeds", f"{seeds.start}:{seeds.stop}"]
    words += [word for arm in tried for word in ("--arm", str(arm))]
    words += ["--dtype", dtype, "--device", device_name, "--layers", str(size[0]), "--hidden", str(size[1])]
    found, executions = {}, {}
    for arm in tried:
        say(f"BI={arm}: {len(seeds)} seeds")
        folder = out / f"arm{arm}"
        began = time.monotonic()
        rows = planted(seeds, weights, folder, arm, dtype, device_name)
        start = time.monotonic() - began - sum(row.seconds for row in rows)
        found[str(arm)] = {"start_seconds": round(start, 1), "seeds": [row.document() for row in rows]}
        facts = _trace(folder / "planted")["facts"]
        executions[str(arm)] = invariance.identify(on[arm], arm, facts, digest, *size, words)
    shutil.rmtree(weights)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    document = KIND.build(command=shlex.join(words), date=today, arms=found, executions=executions)
    KIND.write(out / "planted.json", document)
    return document


def between(left: Side, right: Side, out: pathlib.Path, say: Say) -> Accused | None:
    """Trace two runs and name the first difference; its operator's inputs are kept in OUT/replay/left and right."""
    for side in (left, right):
        say(f"tracing {side.name}")
        _run(side.job, side.on, out / side.name, f"the traced engine, {side.name}")
    traces = [_trace(out / side.name) for side in (left, right)]
    named = first_difference(traces[0], traces[1], left.request, right.request)
    (out / "localised.json").write_bytes(strictjson.dumps(_document(named)))
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
        raise TraceError("there is one side only: give --weights or --arm twice")
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
