"""The C3 matrix on a running engine: makes the engines and requests that `samebits.judge.matrix` names, and records.

Every engine runs in a child process on one small seeded Qwen3. Requests are fixed by their names, so that two engines
are asked the same. What was said lies in OUT/recordings/armN-DTYPE/ENGINE.said.json; nothing is judged here.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import pathlib
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from samebits.errors import SamebitsError
from samebits.evidence import provenance, strictjson
from samebits.evidence.invariance import KIND
from samebits.judge import judge_recordings, matrix
from samebits.recipe import arms, launch, process
from samebits.sources.pins import ROOT
from samebits.sources.tree import installed_note

from .device import DTYPES, Device, device
from .engine import SUFFIX
from .weights import VOCABULARY_SIZE, write_weights

SEED = 3
FORCED = 7  # the token that a prompt of the power-of-two cells is answered with: so all are prefixes of one text

Requests = list[dict[str, Any]]
Say = Callable[[str], None]


class OutputInUse(SamebitsError):
    """The output folder holds something already."""


class ModelError(SamebitsError):
    """A model that cannot be made."""


@dataclass(frozen=True)
class Engine:
    """One process of the matrix. group: engines that share one interpreter, each in a process forked from it."""

    name: str
    arguments: dict[str, Any]
    says: dict[str, Requests]
    threads: int
    group: str


@dataclass(frozen=True)
class Asked:
    """What a person asked for. model: the geometry; arms and dtypes in the order of the table."""

    arms: tuple[int, ...]
    dtypes: tuple[str, ...]
    device: str = "cpu"
    layers: int = 6
    hidden: int = 1024
    quick: bool = False


def _prompt(name: str, length: int) -> list[int]:
    return random.Random(name).choices(range(VOCABULARY_SIZE), k=length)


def request(name: str, length: int, **more: Any) -> dict[str, Any]:
    """What an engine is asked under a name."""
    return {"id": name, "prompt": _prompt(name, length), "seed": len(name) + length, **more}


def _ask(plan: dict[str, matrix.Requests]) -> dict[str, Requests]:
    """The requests of one engine, with their tokens and seeds."""
    return {say: [_asked(one, plan) for one in requests] for say, requests in plan.items()}


def _asked(one: matrix.Request, plan: dict[str, matrix.Requests]) -> dict[str, Any]:
    more: dict[str, Any] = {"answer": one.answer}
    if one.after:
        more["after"] = one.after
    if one.prompt_logprobs:
        more["prompt_logprobs"] = True
    if one in plan.get(matrix.WHOLE, ()):
        return {"id": one.id, "prompt": _text(plan), "seed": 0, **more}
    if one in plan.get(matrix.PROMPTS, ()):
        return {"id": one.id, "prompt": _text(plan)[: one.prompt], "seed": 0, "allowed": [FORCED], **more}
    return request(one.id, one.prompt, **more)


def _text(plan: dict[str, matrix.Requests]) -> list[int]:
    """The text that each prompt of the power-of-two cells begins, and goes on as it is answered."""
    (whole,) = plan[matrix.WHOLE]
    text = _prompt(whole.id, whole.prompt)
    for one in plan[matrix.PROMPTS]:
        text[one.prompt : one.tokens] = [FORCED] * one.answer
    return text


def engines(quick: bool) -> list[Engine]:
    """The processes of one arm and dtype, with all that they are asked."""
    says = {name: _ask(plan) for name, plan in matrix.says(quick).items()}
    room = len(says["base"][matrix.WHOLE][0]["prompt"]) + 1
    base = {
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_num_seqs": max(matrix.BATCHES),
        "max_model_len": max(512, room),
        # One step takes the longest prompt, or all prompts of the largest batch, whole. An engine warms up with as
        # many tokens as a step takes, which on a slow machine takes longest: no budget is larger than needed.
        "max_num_batched_tokens": max(400 if quick else 800, room),
    }
    small = {**base, "max_model_len": 256, "max_num_batched_tokens": 256 if quick else 400}
    block = matrix.BLOCK
    arguments = {
        "base": base,
        **{f"chunks-{n}": {**small, "max_num_batched_tokens": n, "max_num_seqs": min(n, 64)} for n in matrix.BUDGETS},
        "prefix": {**small, "enable_prefix_caching": True, "block_size": block},
        "small-cache": {
            **small,
            "block_size": block,
            "num_gpu_blocks_override": matrix.CROWD + 2,
            "max_model_len": 128,
        },
        "one-thread": small,
        "second": small,
        "compiled": {**small, "enforce_eager": False, "max_model_len": 512, "max_num_batched_tokens": 800},
    }
    threads = {"one-thread": 1}
    groups = {"second": "second", "compiled": "compiled"}
    return [
        Engine(name, arguments[name], asked, threads.get(name, matrix.THREADS), groups.get(name, "eager"))
        for name, asked in says.items()
    ]


def steps(asked: Asked) -> int:
    """How many engines `record` runs."""
    return len(asked.arms) * len(asked.dtypes) * len(engines(asked.quick))


def check(asked: Asked, out: pathlib.Path, say: Say = print, step: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Record the matrix and have it judged: the document is also OUT/invariance.json. Raises as `record` does."""
    record(asked, out, say, step)
    document = judge_recordings(out, asked.quick, asked.arms, asked.dtypes)
    KIND.write(out / "invariance.json", document)
    return document


def to_localise(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each arm and dtype the first eager cell that differs."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for cell in document["cells"]:
        if cell["mismatched"] and cell["first"] and "compiled" not in cell["cell"]:
            found.setdefault((cell["arm"], cell["dtype"]), cell)
    return list(found.values())


def command(asked: Asked) -> list[str]:
    """What a person types to get the same."""
    words = ["samebits", "check", "bits", "--out", "OUT", "--device", str(asked.device)]
    words += [word for arm in asked.arms for word in ("--arm", str(arm))]
    words += [word for dtype in asked.dtypes for word in ("--dtype", dtype)]
    words += ["--layers", str(asked.layers), "--hidden", str(asked.hidden)]
    return [*words, "--quick"] if asked.quick else words


def record(asked: Asked, out: pathlib.Path, say: Say = print, step: Callable[[], None] = lambda: None) -> None:
    """Run the matrix and leave OUT/recordings, with an execution.json for each arm.

    say is told each phase, step is called once for each engine that is done.

    Raises:
        SamebitsError: an arm or a device that cannot run, a folder in use, or a child that failed.
    """
    devices = {arm: device(str(asked.device), arm) for arm in asked.arms}
    (head,) = {on.head for on in devices.values()}
    if asked.hidden % (2 * head):
        raise ModelError(f"--hidden {asked.hidden}: give a multiple of {2 * head}")
    for on, dtype in itertools.product(devices.values(), asked.dtypes):
        if dtype not in DTYPES[on.name]:
            raise ModelError(f"--dtype {dtype}: on {on.name} the contract has {', '.join(DTYPES[on.name])}")
    if out.exists() and any(out.iterdir()):
        raise OutputInUse(f"{out} is not empty: choose another --out, or remove it")
    out.mkdir(parents=True, exist_ok=True)
    weights = out / "weights"
    say(f"weights: a seeded Qwen3 of {asked.layers} layers, hidden {asked.hidden}")
    write_weights(weights, SEED, asked.layers, asked.hidden, head)
    for arm in asked.arms:
        _record_arm(asked, arm, devices[arm], weights, out, say, step)
    shutil.rmtree(weights)


def _record_arm(
    asked: Asked, arm: int, on: Device, weights: pathlib.Path, out: pathlib.Path, say: Say, step: Callable[[], None]
) -> None:
    made = engines(asked.quick)
    groups: dict[str, list[pathlib.Path]] = {}
    for dtype in asked.dtypes:
        folder = out / "recordings" / f"arm{arm}-{dtype}"
        folder.mkdir(parents=True)
        for one in made:
            job = folder / f"{one.name}.job.json"
            arguments = {"model": str(weights), "dtype": dtype, **on.arguments, **one.arguments}
            task = {"name": one.name, "engine": arguments, "threads": one.threads, "says": one.says}
            job.write_text(json.dumps(task))
            groups.setdefault(one.group, []).append(job)
    for group, jobs in groups.items():
        say(f"BI={arm}: {group} engines, {len(jobs)}")
        left = {job.with_name(job.name.removesuffix(".job.json") + SUFFIX) for job in jobs}

        def watch(left: set[pathlib.Path] = left) -> None:
            for done in [file for file in left if file.is_file()]:
                left.remove(done)
                step()

        words = [sys.executable, "-m", "samebits.probe.engine", *map(str, jobs)]
        log = out / f"arm{arm}-{group}.log"
        process.run(words, on.environment, log, watch, f"BI={arm}, {group} engines")
    for job in (job for jobs in groups.values() for job in jobs):
        job.unlink()
    facts = strictjson.loads((out / "recordings" / f"arm{arm}-{asked.dtypes[0]}" / f"base{SUFFIX}").read_bytes())
    identity = identify(on, arm, facts["facts"], _plan_sha256(made), asked.layers, asked.hidden, command(asked))
    provenance.write(out / "recordings" / f"arm{arm}.execution.json", identity)


def identify(
    on: Device, arm: int, facts: dict[str, Any], config_sha256: str, layers: int, hidden: int, command: Sequence[str]
) -> dict[str, Any]:
    """The execution identity of engines on the seeded model. facts: what `samebits.probe.engine` said of one of them.

    Raises:
        ProvenanceError: wheels or a lock that are not those of this environment.
    """
    return provenance.collect(
        root=ROOT,
        lock=ROOT / "manifests" / "locks" / f"{on.profile}.txt",
        requirements=ROOT / "build" / "wheels" / on.profile / "requirements.txt",
        arm=arm,
        runner=arms.runner({arms.RUNNER_SWITCH: "0", **on.environment}),
        config_sha256=config_sha256,
        tree=installed_note(),
        model=_model(layers, hidden),
        command=command,
        device=on.name,
        device_name=facts["device_name"],
        threads=facts["threads"],
        contract=facts["contract"],
        kernels=launch.kernels(),
        environment=on.environment,
    )


def _plan_sha256(made: list[Engine]) -> str:
    return hashlib.sha256(json.dumps([vars(one) for one in made], sort_keys=True).encode()).hexdigest()


def _model(layers: int, hidden: int) -> dict[str, Any]:
    from samebits.recipe import model

    words = json.dumps(model.VOCABULARY).encode()
    return {
        "name": f"qwen3-{layers}x{hidden}-random",
        "seed": SEED,
        "tokenizer_sha256": hashlib.sha256(words).hexdigest(),
        "layers": layers,
        "hidden": hidden,
    }
