"""Launching a run: inputs, identity, verl's trainer, fresh engines, and the judge's receipt at the end.

`run_rl` is what ``samebits run rl`` calls. Everything it leaves is under the output folder; what can be reused
(the warm start) is under ``build/cache``.
"""

import hashlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from samebits.errors import SamebitsError
from samebits.evidence import eventlog, provenance, receipt
from samebits.judge import verdict
from samebits.recipe import arms, inputs, process, warm_start
from samebits.sources.pins import ROOT

CONFIG = pathlib.Path(__file__).resolve().parent / "config"
BOUNDS = ROOT / "manifests" / "evidence" / "bounds.json"
Say = Callable[[str], None]


class OutputInUse(SamebitsError):
    """The output folder holds something already."""


def resolved_config(overrides: Mapping[str, object]) -> dict[str, Any]:
    """The recipe's whole configuration, composed as verl's entry point will; the folders of this run left out."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    folders = {f"recipe.{name}": name.upper() for name in ("model", "data", "out", "reward")}
    with initialize_config_dir(str(CONFIG), version_base=None):
        config = compose("rl", [f"{key}={value}" for key, value in {**folders, **overrides}.items()])
    resolved = OmegaConf.to_container(config, resolve=True)
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _claim(out: pathlib.Path) -> None:
    """Takes the output folder, or refuses: two runs in one folder would be judged as one."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        with (out / "run.lock").open("x") as file:
            file.write(f"{os.getpid()}\n")
    except FileExistsError:
        raise OutputInUse(f"{out} holds a run already: choose another --out, or remove the folder first") from None
    others = sorted(path.name for path in out.iterdir() if path.name != "run.lock")
    if others:
        (out / "run.lock").unlink()
        raise OutputInUse(f"{out} is not empty ({', '.join(others[:3])}): choose another --out, or remove the folder")


def _phases(out: pathlib.Path, steps: int, say: Say) -> Callable[[], None]:
    """Says each thing that a run leaves behind, once, when it appears."""
    awaited = [("capsules/sync-0000", "engine up, θ0 in it")]
    for step in range(1, steps + 1):
        awaited.append((f"capsules/step-{step:04d}", f"step {step}: θ{step - 1} compared, θ{step} made"))
        awaited.append((f"capsules/sync-{step:04d}", f"θ{step} in the engine"))

    def watch() -> None:
        while awaited and (out / awaited[0][0]).is_dir():
            say(awaited.pop(0)[1])

    return watch


def run_rl(
    arm: int,
    steps: int,
    out: pathlib.Path,
    overrides: Mapping[str, object] | None = None,
    model: warm_start.WarmStart | None = None,
    say: Say = print,
) -> dict[str, Any]:
    """Runs the recipe and returns the receipt, which is also ``out/receipt.json``.

    Args:
        arm: 0, vLLM and Megatron as they are; 1, batch invariant.
        steps: optimizer steps. Step k compares θ(k-1) and makes θk; three compare θ0, θ1 and θ2.
        out: an empty or new folder.
        overrides: Hydra overrides of the recipe, dotted name to value.
        model: which warm start; by default the recipe's own.
        say: told each phase as it is reached.

    Raises:
        SamebitsError: an arm that cannot run, a folder in use, or a child that failed, with its first error.
    """
    environment = arms.environment(arm, os.environ)
    changes, what = dict(overrides or {}), model or warm_start.WarmStart()
    out = out.resolve()
    _claim(out)
    log = out / "events.jsonl"
    wheels = provenance.installed_wheels(ROOT / "build" / "wheels" / "cpu" / "requirements.txt")

    started = time.monotonic()
    eventlog.append(log, "warm start", **_fields(what))
    say("warm start: a seeded Qwen3, taught the task (kept for the next run)")
    weights = warm_start.obtain(what, wheels, ROOT / "build" / "cache", environment)
    eventlog.append(log, "warm start ready", seconds=round(time.monotonic() - started, 1), key=weights.name)

    changes = {"recipe.steps": steps, **changes}
    config = resolved_config(changes)
    (out / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    inputs.write_rl_data(out / "data", prompts=steps * config["data"]["train_batch_size"])
    identity = provenance.collect(
        root=ROOT,
        lock=ROOT / "manifests" / "locks" / "cpu.txt",
        requirements=ROOT / "build" / "wheels" / "cpu" / "requirements.txt",
        arm=arm,
        runner="v1",
        config_sha256=hashlib.sha256((out / "config.json").read_bytes()).hexdigest(),
        model=_model_identity(what, weights),
        command=["samebits", "run", "rl", "--arm", str(arm), "--steps", str(steps), "--out", "OUT"],
        threads=int(environment["OMP_NUM_THREADS"]),
        environment=environment,
    )
    provenance.write(out / "execution.json", identity)

    folders = {
        "recipe.model": weights,
        "recipe.data": out / "data",
        "recipe.out": out,
        "recipe.reward": CONFIG.parent / "task.py",
        "hydra.run.dir": out / "hydra",
    }
    say(f"verl's trainer: Ray, vLLM and Megatron Core start ({out / 'trainer.log'})")
    began = time.monotonic()
    command = process.python_module("verl.trainer.main_ppo", "rl", {**folders, **changes})
    peak = process.run(command, environment, out / "trainer.log", _phases(out, steps, say), "verl's trainer")
    eventlog.append(log, "trained", seconds=round(time.monotonic() - began, 1), peak_memory_bytes=peak)

    say("fresh engines on the exported weights of the syncs")
    began = time.monotonic()
    fresh = [sys.executable, "-m", "samebits.probe.fresh", str(out), *map(str, range(steps))]
    peak = process.run(fresh, environment, out / "fresh.log", what="the fresh engine")
    eventlog.append(log, "probed", seconds=round(time.monotonic() - began, 1), peak_memory_bytes=peak)

    document = verdict.judge_run(out, arms.CLAIM[arm], verdict.read_bounds(BOUNDS))
    receipt.write(out / "receipt.json", document)
    eventlog.append(log, "judged", verdict=document["verdict"], seconds=round(time.monotonic() - started, 1))
    return document


def _fields(what: warm_start.WarmStart) -> dict[str, int]:
    return {"seed": what.seed, "layers": what.layers, "hidden": what.hidden, "steps": what.steps}


def _model_identity(what: warm_start.WarmStart, weights: pathlib.Path) -> dict[str, Any]:
    tokenizer = hashlib.sha256((weights / "tokenizer.json").read_bytes()).hexdigest()
    geometry = {"layers": what.layers, "hidden": what.hidden, "warm_start_steps": what.steps}
    return {"name": f"qwen3-{what.layers}x{what.hidden}", "seed": what.seed, "tokenizer_sha256": tokenizer, **geometry}
