"""Training runs side by side, step by step: what each phase takes, what differs, what is earned.

Nothing is recorded but verl's own figures, so the phases are those of a run that only compares (`trainer.verify`). A
run goes on from its last checkpoint: a call takes as many steps as it is told, and the next call those after them.
"""

from __future__ import annotations

import datetime
import json
import pathlib
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.table import Table

from samebits.errors import SamebitsError
from samebits.evidence.measurement import STEPS
from samebits.judge.steps import FIRST, timed, typical
from samebits.recipe import arms, inputs, launch, process, warm_start

Say = launch.Say

# verl's names of the phases; the update's holds what comparing takes, which is a row of its own.
PHASES = {
    "generate": "gen",
    "old logprob": "old_log_prob",
    "actor forward and backward": "update_actor",
    "sync": "update_weights",
}
FIGURES = {
    "reward": "critic/rewards/mean",
    "response": "response_length/mean",
    "compared": "training/rollout_bits_compared",
    "recompute_differ": "training/rollout_recompute_bits_differ",
    "actor_differ": "training/rollout_actor_bits_differ",
    "k3": "rollout_corr/k3_kl",
    "grad_norm": "actor/grad_norm",
    "memory_gb": "actor/perf/max_memory_allocated_gb",
}
TRUNCATED = {"algorithm.rollout_correction.rollout_is": "token"}


class StepsError(SamebitsError):
    """Runs that cannot be compared."""


@dataclass(frozen=True)
class Column:
    """One run: its name in the table, its arm, and what its configuration has besides the recipe's."""

    name: str
    arm: int
    overrides: Mapping[str, object]


COLUMNS = {
    "bi0": Column("bi0", 0, {}),
    "bi1": Column("bi1", 1, {}),
    "bi0-tis": Column("bi0-tis", 0, TRUNCATED),
}


def run(
    columns: Sequence[Column],
    steps: int,
    chunk: int | None,
    out: pathlib.Path,
    overrides: Mapping[str, object],
    model: warm_start.WarmStart | None,
    device: str,
    say: Say,
) -> dict[str, Any] | None:
    """Takes each run `chunk` steps on, all of them without one; the document once all runs have all steps, else None.

    Raises:
        SamebitsError: an arm that cannot run here, a trainer that failed, or one that left no figures of a step.
    """
    planned = {
        column.name: launch.plan(column.arm, steps, {**overrides, **column.overrides}, model, device)
        for column in columns
    }
    contracts = {column.name: arms.contract(column.arm, device) for column in columns}
    for name, plan in planned.items():
        _advance(plan, steps, chunk, (out / name).resolve(), say)
    done = {name: reached(out / name) for name in planned}
    say(", ".join(f"{name}: {step} of {steps} steps" for name, step in done.items()))
    if min(done.values()) < steps:
        return None
    executions = {
        name: launch.identify(plan, launch.taught(plan, lambda _: None), contracts[name])
        for name, plan in planned.items()
    }
    return STEPS.build(
        command=shlex.join(_command(list(planned), steps, chunk, next(iter(planned.values())).command)),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        steps=steps,
        runs={name: rows(out / name, steps) for name in planned},
        executions=executions,
    )


def _command(names: Sequence[str], steps: int, chunk: int | None, recipe: Sequence[str]) -> list[str]:
    words = ["samebits", "bench", "rl", *(word for name in names for word in ("--run", name)), "--steps", str(steps)]
    if chunk is not None:
        words += ["--chunk", str(chunk)]
    # Of the recipe's command: device, settings and warm start.
    return [*words, "--out", "OUT", *recipe[recipe.index("OUT") + 1 :]]


def reached(folder: pathlib.Path) -> int:
    """The last step whose checkpoint is whole; 0 without one."""
    note = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(note.read_text()) if note.is_file() else 0


def _advance(planned: launch.Plan, steps: int, chunk: int | None, folder: pathlib.Path, say: Say) -> None:
    first = reached(folder)
    last = steps if chunk is None else min(first + chunk, steps)
    if first >= last:
        return
    weights = launch.taught(planned, say)
    if not (folder / "data").is_dir():
        inputs.write_rl_data(folder / "data", prompts=steps * planned.config["data"]["train_batch_size"])
    more = {
        "trainer.record": "null",
        "trainer.resume_mode": "auto",
        "trainer.default_local_dir": folder / "checkpoints",
        # The last step of a call is saved whatever this is.
        "trainer.save_freq": last,
        "trainer.max_actor_ckpt_to_keep": 1,
    }
    say(f"{folder.name}: steps {first + 1} to {last} ({folder / f'trainer-{first:04d}.log'})")
    environment = {**planned.environment, "VERL_FILE_LOGGER_PATH": str(folder / f"metrics-{first:04d}.jsonl")}
    command = launch.trainer_command(replace(planned, steps=last), weights, folder, more)
    process.run(command, environment, folder / f"trainer-{first:04d}.log", what=f"the run {folder.name}")


def rows(folder: pathlib.Path, steps: int) -> list[dict[str, Any]]:
    """What verl logged of each step, the figures of this table only. A step that was run twice counts as it was last.

    Raises:
        StepsError: a step without figures, or one that compared nothing.
    """
    logged: dict[int, dict[str, Any]] = {}
    for file in sorted(folder.glob("metrics-*.jsonl")):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            logged[int(row["step"])] = row["data"]
    found = []
    for step in range(1, steps + 1):
        data = logged.get(step)
        missing = [name for name in (*FIGURES.values(), "timing_s/verify") if data is None or name not in data]
        if data is None or missing:
            raise StepsError(f"{folder}: step {step} lacks {', '.join(missing)}; run it again in a new folder")
        if not data[FIGURES["compared"]] > 0:
            raise StepsError(f"{folder}: step {step} compared nothing; see its trainer's log")
        verify = data["timing_s/verify"]
        seconds = {name: data[f"timing_s/{key}"] for name, key in PHASES.items()}
        seconds["actor forward and backward"] -= verify
        seconds |= {"compare": verify, "others": data["timing_s/step"] - verify - sum(seconds.values())}
        seconds["others"] -= data.get("timing_s/save_checkpoint", 0.0)
        kept = {name: float(data[key]) for name, key in FIGURES.items()}
        found.append({"step": step, "seconds": {k: round(v, 5) for k, v in seconds.items()}, **kept})
    return found


def tables(document: Mapping[str, Any]) -> list[Table]:
    """The phases, beside each other; then each step's difference and reward."""
    runs = document["runs"]
    phases = Table(title=f"seconds a step, median of {document['steps'] - FIRST}", box=box.SIMPLE, title_justify="left")
    phases.add_column("phase")
    compared = [name for name in runs if name != "bi0"] if "bi0" in runs else []
    for name in (*runs, *(f"{name} ÷ bi0" for name in compared)):
        phases.add_column(name, justify="right", no_wrap=True)
    names = list(next(iter(runs.values()))[0]["seconds"])
    for phase in (*names, "total", "memory of the trainer, GB"):
        middle = {name: _median(steps, phase) for name, steps in runs.items()}
        base = middle.get("bi0", 0.0)
        ratios = [f"{middle[name] / base:.3f}" if base else "" for name in compared]
        phases.add_row(phase, *(f"{value:.4g}" for value in middle.values()), *ratios)
    curve = Table(title="each step: logprobs that differ (recomputed, actor), k3 KL, mean reward", box=box.SIMPLE)
    curve.add_column("step", justify="right")
    for name in runs:
        curve.add_column(name, justify="right", no_wrap=True)
    for index in range(document["steps"]):
        curve.add_row(str(index + 1), *(_cell(steps[index]) for steps in runs.values()))
    return [phases, curve]


def _cell(step: Mapping[str, Any]) -> str:
    differ = f"{step['recompute_differ']:.0f}, {step['actor_differ']:.0f} of {step['compared']:.0f}"
    return f"{differ}  {step['k3']:.1e}  {step['reward']:.3f}"


def _median(steps: Sequence[Mapping[str, Any]], phase: str) -> float:
    counted = timed(steps)
    if phase == "total":
        return typical(steps)
    if phase.startswith("memory"):
        return max(step["memory_gb"] for step in counted)
    return statistics.median(step["seconds"][phase] for step in counted)
