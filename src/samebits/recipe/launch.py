"""Launching a run: inputs, identity, verl's trainer, fresh engines, and the judge's receipt at the end.

`run_rl` is what ``samebits run rl`` calls. Everything it leaves is under the output folder; what can be reused
(the warm start) is under ``build/cache``.
"""

import fcntl
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from samebits.errors import SamebitsError
from samebits.evidence import eventlog, provenance, receipt
from samebits.judge import verdict
from samebits.recipe import arms, inputs, process, warm_start
from samebits.recipe.arms import ArmError
from samebits.report import render
from samebits.sources import tree
from samebits.sources.pins import ROOT

CONFIG = pathlib.Path(__file__).resolve().parent / "config"
BOUNDS = ROOT / "manifests" / "evidence" / "bounds.json"
WHEELS = {
    device: ROOT / "build" / "wheels" / profile / "requirements.txt"
    for device, profile in (("cpu", "cpu"), ("cuda", "gpu"))
}
CACHE = pathlib.Path(os.environ.get("SAMEBITS_BUILD") or ROOT / "build") / "cache"
# What --out, --steps and --device decide, and the trainer mode that records.
_OURS = ("trainer.record", "trainer.total_training_steps", "trainer.v1.trainer_mode", "trainer.device")
# What a device needs in the configuration of either arm. Trainer and rollout share a card: the rollout sleeps while the
# trainer works, and its keys and values of old weights go.
DEVICE_OVERRIDES: dict[str, dict[str, object]] = {
    "cpu": {},
    "cuda": {
        "trainer.device": "cuda",
        "actor_rollout_ref.rollout.free_cache_engine": True,
        "actor_rollout_ref.rollout.enable_sleep_mode": True,
        # More than 20,000 tokens a step, in two sizes of micro-batch.
        "data.train_batch_size": 168,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 84,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 48,
        "actor_rollout_ref.rollout.max_num_seqs": 256,
        "actor_rollout_ref.rollout.max_num_batched_tokens": 4096,
    },
}
Say = Callable[[str], None]


class OutputInUse(SamebitsError):
    """The output folder holds something already."""


class OverrideError(SamebitsError):
    """A Hydra override that the recipe cannot take."""


@dataclass(frozen=True)
class Plan:
    """A run before anything of it exists.

    Attributes:
        config: the resolved configuration; its text is config.json.
        command: what a person types to get the same run; the recorded one.
    """

    arm: int
    steps: int
    device: str
    overrides: dict[str, object]
    model: warm_start.WarmStart
    environment: dict[str, str]
    config: dict[str, Any]
    command: list[str]

    @property
    def config_text(self) -> str:
        return json.dumps(self.config, indent=1, sort_keys=True) + "\n"

    @property
    def config_sha256(self) -> str:
        return hashlib.sha256(self.config_text.encode()).hexdigest()


def plan(
    arm: int,
    steps: int,
    overrides: Mapping[str, object] | None = None,
    model: warm_start.WarmStart | None = None,
    device: str = "cpu",
) -> Plan:
    """Resolves what `run_rl` would run with the same arguments; starts and writes nothing.

    Raises:
        SamebitsError: an arm that cannot run here, or an override that the recipe cannot take.
    """
    environment = arms.environment(arm, os.environ, device)
    changes, standard = dict(overrides or {}), warm_start.STANDARD[device]
    what = model or standard
    if device == "cuda" and what.head != 128:
        raise ArmError(
            f"--device cuda with heads of {what.head}: the contract has rows for heads of 128 there; "
            "give --warm-start head=128"
        )
    command = ["samebits", "run", "rl", "--arm", str(arm), "--steps", str(steps), "--out", "OUT"]
    if device != "cpu":
        command += ["--device", device]
    for key, value in changes.items():
        bare = key.lstrip("+~")
        if re.split(r"[.@/]", bare)[0] in ("recipe", "hydra") or bare.startswith(_OURS):
            raise OverrideError(
                f"--set {key}: --steps, --out, --device and --warm-start set it; use them, or set another key"
            )
        command += ["--set", f"{key}={value}"]
    for name, value in asdict(what).items():
        if value != asdict(standard)[name]:
            command += ["--warm-start", f"{name}={value}"]
    changes = DEVICE_OVERRIDES[device] | changes
    config = resolved_config({"recipe.steps": steps, **changes})
    return Plan(arm, steps, device, changes, what, environment, config, command)


def resolved_config(overrides: Mapping[str, object]) -> dict[str, Any]:
    """The recipe's whole configuration, composed as verl's entry point will; the folders of this run left out.

    Raises:
        OverrideError: Hydra refuses an override.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    folders = {f"recipe.{name}": name.upper() for name in ("model", "data", "out", "reward")}
    try:
        with initialize_config_dir(str(CONFIG), version_base=None):
            config = compose("rl", [f"{key}={value}" for key, value in {**folders, **overrides}.items()])
        resolved = OmegaConf.to_container(config, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        reason = str(error).splitlines()[0]
        raise OverrideError(
            f"the recipe's configuration: {reason}; correct the --set, `+key=value` adds a key"
        ) from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


@contextmanager
def _claimed(out: pathlib.Path, replace: bool = False) -> Iterator[None]:
    """Holds the output folder for the life of a run: two runs in one folder would be judged as one.

    The lock is the kernel's and ends with this process; that the file is there means only that a run was. With
    ``replace`` a run that is over is removed, anything else refused and left as it is.
    """
    lock = out / "run.lock"
    if out.exists() and not out.is_dir():
        raise OutputInUse(f"{out} is not a folder: choose another --out")
    others = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if others and lock.name not in others:
        raise OutputInUse(f"{out} is not empty and holds no run ({', '.join(others[:3])}): choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputInUse(f"{out}: a run is using it: wait, or choose another --out") from None
        # The event log goes last: it shows that the rest is a run's, should the removal be cut short.
        left = sorted((path for path in out.iterdir() if path != lock), key=lambda path: path.name == "events.jsonl")
        if left and not replace:
            raise OutputInUse(f"{out} holds a run already: choose another --out, or --replace it")
        if left and left[-1].name != "events.jsonl":
            raise OutputInUse(f"{out} is no run's folder, it has no events.jsonl: choose another --out")
        for path in left:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        yield


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
    replace: bool = False,
    page: pathlib.Path | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Runs the recipe and returns the receipt, which is also ``out/receipt.json``.

    Args:
        arm: 0, vLLM and Megatron as they are; 1, batch invariant.
        steps: optimizer steps. Step k compares θ(k-1) and makes θk; three compare θ0, θ1 and θ2.
        out: an empty or new folder.
        overrides: Hydra overrides of the recipe, dotted name to value.
        model: which warm start; by default the recipe's own.
        say: told each phase as it is reached.
        replace: remove a run that is over from ``out``.
        page: where to draw the report, whatever the verdict; by default none is drawn.
        device: cpu or cuda.

    Raises:
        SamebitsError: an arm that cannot run, a folder in use, or a child that failed, with its first error.
    """
    planned = plan(arm, steps, overrides, model, device)
    contract = arms.contract(arm, device)
    out = out.resolve()
    with _claimed(out, replace):
        if page:
            # A run that fails must not leave the page of an earlier one to be taken for its own.
            page.unlink(missing_ok=True)
        try:
            document = _run(planned, contract, out, say)
        except BaseException as error:
            first = error.first_error if isinstance(error, process.RunFailed) else f"{type(error).__name__}: {error}"
            with suppress(SamebitsError, OSError):
                eventlog.append(out / "events.jsonl", "failed", error=first)
            raise
        say(f"verdict: {document['verdict']}")
        if page:
            render([out], page)
    return document


def run_loop(
    steps: int,
    out: pathlib.Path,
    overrides: Mapping[str, object] | None = None,
    model: warm_start.WarmStart | None = None,
    say: Say = print,
    replace: bool = False,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """Runs the recipe as arm 0 and then as arm 1, and draws ``out/report.html`` of both.

    The runs are ``out/bi0`` and ``out/bi1``; the arguments are those of `run_rl`. Whatever arm 0's verdict is, arm 1
    runs too.

    Returns:
        the receipts, arm 0's first.

    Raises:
        SamebitsError: as `run_rl`; an arm 1 that cannot run here is refused before arm 0 begins.
    """
    arms.contract(1, device)
    page = out / "report.html"
    page.unlink(missing_ok=True)
    found = {}
    for arm in arms.CLAIM:
        folder = out / f"bi{arm}"
        say(f"arm {arm}: {folder}")
        found[folder] = run_rl(arm, steps, folder, overrides, model, say, replace, device=device)
    render(list(found), page)
    return list(found.values())


def _run(planned: Plan, contract: str | None, out: pathlib.Path, say: Say) -> dict[str, Any]:
    log = out / "events.jsonl"
    environment = {**planned.environment, "VERL_FILE_LOGGER_PATH": str(out / "metrics.jsonl")}
    steps = planned.steps
    started = time.monotonic()
    eventlog.append(log, "warm start", **asdict(planned.model))
    weights = taught(planned, say)
    eventlog.append(log, "warm start ready", seconds=_since(started), key=weights.name)

    (out / "config.json").write_text(planned.config_text)
    inputs.write_rl_data(out / "data", prompts=steps * planned.config["data"]["train_batch_size"])
    identity = identify(planned, weights, contract)
    provenance.write(out / "execution.json", identity)

    say(f"verl's trainer: Ray, vLLM and Megatron Core start ({out / 'trainer.log'})")
    began = time.monotonic()
    command = trainer_command(planned, weights, out)
    peak = process.run(command, environment, out / "trainer.log", _phases(out, steps, say), "verl's trainer")
    eventlog.append(log, "trained", seconds=_since(began), peak_memory_bytes=peak)

    say("fresh engines on the exported weights of the syncs")
    began = time.monotonic()
    fresh = [sys.executable, "-m", "samebits.probe.fresh", str(out), *map(str, range(steps))]
    peak = process.run(fresh, environment, out / "fresh.log", what="the fresh engine")
    eventlog.append(log, "probed", seconds=_since(began), peak_memory_bytes=peak)

    document = verdict.judge_run(out, arms.CLAIM[planned.arm], verdict.read_bounds(BOUNDS))
    receipt.write(out / "receipt.json", document)
    eventlog.append(log, "judged", receipt=document["checksum"], verdict=document["verdict"], seconds=_since(started))
    return document


def taught(planned: Plan, say: Say) -> pathlib.Path:
    """The folder of the model that a run starts from; taught first if no run before it left it."""
    say("warm start: a seeded Qwen3, taught the task (kept for the next run)")
    note = _note(planned)
    wheels = provenance.wheels_of_tree(note) if note else provenance.wheels_here(ROOT, WHEELS[planned.device])
    return warm_start.obtain(planned.model, wheels, CACHE, planned.environment, say, planned.device)


def _note(planned: Plan) -> pathlib.Path | None:
    return tree.installed_note() if planned.device == "cuda" else None


def identify(planned: Plan, weights: pathlib.Path, contract: str | None) -> dict[str, Any]:
    """The execution identity of a planned run. Raises ProvenanceError."""
    return provenance.collect(
        root=ROOT,
        lock=warm_start.LOCKS[planned.device],
        requirements=WHEELS[planned.device],
        tree=_note(planned),
        arm=planned.arm,
        runner=arms.runner(planned.environment),
        config_sha256=planned.config_sha256,
        model=_model_identity(planned.model, weights, planned.device),
        command=planned.command,
        device=planned.device,
        device_name=_card() if planned.device == "cuda" else None,
        threads=int(planned.environment["OMP_NUM_THREADS"]),
        contract=contract,
        kernels=kernels(),
        environment=planned.environment,
    )


def trainer_command(
    planned: Plan, weights: pathlib.Path, out: pathlib.Path, more: Mapping[str, object] | None = None
) -> list[str]:
    """The command of verl's trainer.

    Args:
        out: where ``data`` is, and where what it leaves goes.
        more: overrides besides the plan's.
    """
    folders = {
        "recipe.model": weights,
        "recipe.data": out / "data",
        "recipe.out": out,
        "recipe.reward": CONFIG.parent / "task.py",
        "recipe.steps": planned.steps,
        "hydra.run.dir": out / "hydra",
    }
    return process.python_module("verl.trainer.main_ppo", "rl", {**folders, **planned.overrides, **(more or {})})


def _since(moment: float) -> float:
    return round(time.monotonic() - moment, 1)


def _card() -> str:
    """The name of the card. Asked of another process: this one must not hold a part of it while the trainer runs."""
    ask = "import torch; print(torch.cuda.get_device_name())"
    return subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()


def kernels() -> dict[str, str]:
    """What torch's own kernels dispatch on here."""
    import torch

    onednn = re.search(r"Intel\(R\) MKL-DNN (.*)", torch.__config__.show())
    return {
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_onednn": onednn[1].strip() if onednn else "none",
    }


def _model_identity(what: warm_start.WarmStart, weights: pathlib.Path, device: str) -> dict[str, Any]:
    tokenizer = hashlib.sha256((weights / "tokenizer.json").read_bytes()).hexdigest()
    geometry = {"layers": what.layers, "hidden": what.hidden, "warm_start_steps": what.steps}
    geometry["warm_start_arm"] = warm_start.teacher(device)
    if device != "cpu":
        geometry |= {name: value for name, value in asdict(what).items() if name in ("head", "ffn", "vocabulary")}
    return {"name": what.name, "seed": what.seed, "tokenizer_sha256": tokenizer, **geometry}
