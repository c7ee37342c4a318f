"""The paired measurement of the two arms on a CPU: vLLM's throughput, and a training step of Megatron Core.

One random Qwen3 for all; each arm's engine and trainer is a process of its own, alive for the whole run.
"""

import datetime
import hashlib
import json
import os
import pathlib
import shlex
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from rich import box
from rich.table import Table

from samebits.errors import SamebitsError
from samebits.evidence import provenance
from samebits.evidence.measurement import BENCH
from samebits.judge.speed import MUST, kept, ratios
from samebits.recipe import arms, model
from samebits.recipe.launch import WHEELS, kernels
from samebits.recipe.warm_start import LOCKS
from samebits.sources.pins import ROOT

from . import trainer
from .turns import Child, spread, take_turns

SEED = 0
CASES = {  # what of an engine is timed; what BI=1 ÷ BI=0 must be is the judge's
    "decode, 1 request": {"prompt": 8, "answer": 32, "requests": 1},
    "decode, 16 requests": {"prompt": 8, "answer": 32, "requests": 16},
    "prefill, 512 tokens": {"prompt": 512, "answer": 1, "requests": 1},
}
Say = Callable[[str], None]


class BenchError(SamebitsError):
    """A measurement that cannot be made so."""


def engine_arguments(folder: pathlib.Path, compiled: bool) -> dict[str, Any]:
    """vLLM's arguments, the same for both arms. No prefix cache: each prefill computes its whole prompt."""
    return {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
        "enable_prefix_caching": False,
        "enforce_eager": not compiled,
        "seed": SEED,
    }


def measure(layers: int, hidden: int, rounds: int, compiled: bool, say: Say, logs: pathlib.Path) -> dict[str, Any]:
    """The measurement as a document of schema bench-1. logs: the folder for the processes' logs.

    Raises:
        SamebitsError: an arm that cannot run here, sizes that no model has, a process that ended, or one that does not
            compute by its arm's contract.
    """
    if min(layers, hidden, rounds) < 1 or hidden % 128:
        raise BenchError(
            f"{layers} layers, hidden {hidden}, {rounds} rounds: give 1 or more of each, hidden a multiple of 128"
        )
    load = round(os.getloadavg()[0], 2)  # the processors that others kept busy in the minute before
    environments = {arm: _environment(arm, compiled) for arm in arms.CLAIM}
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        weights = pathlib.Path(folder) / "model"
        model.write_model(weights, SEED, model.config(layers, hidden))
        arguments = engine_arguments(weights, compiled)
        command = _command(layers, hidden, rounds, compiled)
        executions = {
            str(arm): provenance.collect(
                root=ROOT,
                lock=LOCKS["cpu"],
                requirements=WHEELS["cpu"],
                arm=arm,
                runner=arms.runner(environment),
                config_sha256=hashlib.sha256(
                    json.dumps({**arguments, "model": "MODEL"}, sort_keys=True).encode()
                ).hexdigest(),
                model={
                    "name": f"random-qwen3-{layers}x{hidden}",
                    "seed": SEED,
                    "tokenizer_sha256": hashlib.sha256((weights / "tokenizer.json").read_bytes()).hexdigest(),
                    "layers": layers,
                    "hidden": hidden,
                },
                command=command,
                threads=int(environment["OMP_NUM_THREADS"]),
                kernels=kernels(),
                environment=environment,
            )
            for arm, environment in environments.items()
        }
        contracts: dict[int, dict[str, str | None]] = {arm: {} for arm in environments}

        def start(what: str, module: str, job: Mapping[str, Any]) -> dict[int, Child]:
            children = {}
            for arm, environment in environments.items():
                say(f"{what} with BI={arm} starts")
                log = logs / f"{module.rpartition('.')[2]}-bi{arm}.log"
                child = stack.enter_context(Child(f"{what} with BI={arm}", module, job, environment, log))
                contracts[arm][what] = child.ready()["contract"]
                children[arm] = child
            for arm, said in contracts.items():
                executions[str(arm)]["contract"] = contract_of(arm, said)
            return children

        job = {"engine": arguments, "cases": list(CASES.values())}
        workloads = [",".join(map(str, case.values())) for case in CASES.values()]
        found = take_turns(start("vLLM's engine", "samebits.bench.engine", job), workloads, rounds, say)
        rows = [_row(name, found[workload]) for name, workload in zip(CASES, workloads, strict=True)]
        stack.close()  # the engines give their memory back
        (steps,) = take_turns(
            start("Megatron Core's model", "samebits.bench.trainer", {"layers": layers, "hidden": hidden}),
            [trainer.WORKLOAD],
            rounds,
            say,
        ).values()
        seconds = {arm: [1 / rate for rate in rates] for arm, rates in steps.items()}
        rows.append(_row(trainer.WORKLOAD, seconds))
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return BENCH.build(
        command=shlex.join(command), date=today, load=load, rounds=rounds, rows=rows, executions=executions
    )


def contract_of(arm: int, said: Mapping[str, str | None]) -> str | None:
    """The contract that every process of an arm computes by. said: what each process named.

    Raises:
        BenchError: a process of BI=1 that names none or another than its sibling, or one of BI=0 that names any.
    """
    names = set(said.values())
    if names == {None} if arm == 0 else len(names) == 1 and None not in names:
        return names.pop()
    named = ", ".join(f"{what}: {name or 'none'}" for what, name in said.items())
    wanted = "no contract" if arm == 0 else "one contract"
    raise BenchError(
        f"BI={arm} must compute by {wanted}, but was ({named}): the switch was not heeded; run `make env`, which "
        "installs our wheels"
    )


def _environment(arm: int, compiled: bool) -> dict[str, str]:
    environment = arms.environment(arm, os.environ)
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in the process that is timed
    if compiled:
        del environment["TORCH_COMPILE_DISABLE"]
    return environment


def _command(layers: int, hidden: int, rounds: int, compiled: bool) -> list[str]:
    words = ["samebits", "bench", "cpu", "--layers", str(layers), "--hidden", str(hidden), "--rounds", str(rounds)]
    return [*words, "--compiled"] if compiled else words


def _row(workload: str, values: Mapping[int, list[float]]) -> dict[str, Any]:
    said = {str(arm): [float(f"{value:.4g}") for value in of_arm] for arm, of_arm in values.items()}
    return {"workload": workload, "unit": MUST[workload].unit, "values": said}


def table(document: Mapping[str, Any]) -> Table:
    """Medians, each with the half of its range in percent; the ratio is of each round's pair."""
    size = document["executions"]["0"]["model"]
    drawn = Table(
        title=f"{size['layers']} layers, hidden {size['hidden']}, {document['rounds']} rounds", box=box.SIMPLE
    )
    drawn.add_column("workload")
    for column in ("BI=0", "BI=1", "BI=1 ÷ BI=0", "must"):
        drawn.add_column(column, justify="right", no_wrap=True)
    for row in document["rows"]:
        colour = "green" if kept(row) else "red"
        drawn.add_row(
            f"{row['workload']}, {row['unit']}",
            *(spread(row["values"][arm], "{:.3g}") for arm in ("0", "1")),
            f"[{colour}]{spread(ratios(row), '{:.2f}')}[/]",
            MUST[row["workload"]].text(),
        )
    return drawn
