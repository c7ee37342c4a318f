"""Runs layer 1 on this machine's CPU; `python -m samebits.probe.gradients JOB`, JOB {"seeds": n}, is its process.

What is asked: the aligned functions of Megatron Core and torch's embedding; composites of its modules, and the model
with its DDP and optimizer; each operator's call in a training step; the specimens, right and wrong; the judge itself.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import pathlib
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from samebits.evidence import strictjson
from samebits.evidence.document import Kind
from samebits.evidence.gradients import KIND
from samebits.judge import gradients as judge
from samebits.judge import modules, updates, vjp
from samebits.judge.modules import MODULES
from samebits.judge.vjp import NAMES, UNIT, Candidate, Cotangent, Measured, Outputs, Problem, Tensors
from samebits.recipe import arms

from .device import DeviceError
from .specimens import FAULTS, Fault, specimen

Say = Callable[[str], None]
PHASE = "phase: "  # begins a line of the log that says what comes next


def aligned() -> dict[str, Candidate]:
    """The aligned functions, and torch's embedding, as Megatron calls it, by the names of their module classes."""
    from .trained import functions

    def embedding(t: Tensors, c: Mapping[str, Any]) -> Tensor:
        return torch.nn.functional.embedding(c["tokens"], t["weight"])

    return {
        "linear": lambda t, c: functions.linear(t["x"], t["weight"]),
        "rms_norm": lambda t, c: functions.rms_norm(t["x"], t["weight"], c["epsilon"]),
        "rotary_embedding": lambda t, c: functions.rotary_embedding(t["query"], t["key"], c["positions"], c["table"]),
        "silu_and_mul": lambda t, c: functions.silu_and_mul(t["x"]),
        "attention": lambda t, c: functions.attention(t["query"], t["key"], t["value"], c["scale"]),
        "selected_log_prob": lambda t, c: functions.selected_log_prob(t["logits"], c["index"]),
        "embedding": embedding,
        "tied embedding": lambda t, c: functions.linear(embedding(t, c), t["weight"]),
    }


def recomputed(candidate: Candidate) -> Candidate:
    """The same, its forward run again in the backward."""

    def run(tensors: Tensors, constants: Mapping[str, Any]) -> Outputs:
        def again(*values: Tensor) -> Outputs:
            return candidate(dict(zip(tensors, values, strict=True)), constants)

        return checkpoint(again, *tensors.values(), use_reentrant=False)

    return run


def under_autocast(candidate: Candidate) -> Candidate:
    """The same, under torch.autocast to bf16."""

    def run(tensors: Tensors, constants: Mapping[str, Any]) -> Outputs:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return candidate(tensors, constants)

    return run


WAYS: dict[str, Callable[[Candidate], Candidate]] = {
    "as it is": lambda candidate: candidate,
    "recomputed": recomputed,
    "autocast": under_autocast,
}


WAYS_SEEDS = 3  # of which each is asked in every way; of the others as it is


class Tally:
    """Comparisons of one implementation, module, dtype and tensor: how many, how many wrong, and the worst."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str, str, str], dict[str, Any]] = {}

    def add(
        self, of: str, module: str, dtype: torch.dtype, where: Mapping[str, str], measured: Iterable[Measured]
    ) -> None:
        """where: what "cases", "cotangents" and "ways" this was one of."""
        for one in measured:
            key = (of, module, NAMES[dtype], one.tensor)
            row = self.rows.setdefault(
                key,
                {
                    **dict(zip(("of", "module", "dtype", "tensor"), key, strict=True)),
                    "cases": [], "cotangents": [], "ways": [],
                    "compared": 0, "unresolved": 0, "zero": 0, "wrong": 0, "worst": None, "first_wrong": None,
                },
            )  # fmt: skip
            for name, value in where.items():
                if value not in row[name]:
                    row[name].append(value)
            row["compared"] += 1
            row["unresolved"] += not one.resolved
            row["zero"] += one.relative is None
            if one.wrong:
                row["wrong"] += 1
                row["first_wrong"] = row["first_wrong"] or f"{', '.join(where.values())}: {one.wrong}"
            if one.relative is None or not one.resolved or one.max_abs is None:
                continue
            if (
                row["worst"] is None
                or one.relative / one.tolerance > row["worst"]["relative"] / row["worst"]["tolerance"]
            ):
                row["worst"] = {
                    "case": where.get("cases", ""),
                    **{
                        name: float(f"{value:.4g}") if value is not None else None
                        for name, value in (
                            ("max_abs", one.max_abs), ("relative", one.relative), ("cosine_from_one", _from_one(one)),
                            ("norm_ratio", one.norm_ratio), ("floor", one.floor), ("tolerance", one.tolerance),
                        )
                    },
                }  # fmt: skip


def _from_one(one: Measured) -> float | None:
    return None if one.cosine is None else 1 - one.cosine


def problems(module: str, dtype: torch.dtype, cotangents: Iterable[Cotangent], seeds: int) -> Iterator[Problem]:
    """Every case of a module class with every cotangent and seed."""
    for case in MODULES[module].cases:
        for cotangent in cotangents:
            for seed in range(seeds):
                yield MODULES[module].problem(case, dtype, cotangent, seed)


def ask(tally: Tally, of: str, module: str, candidate: Candidate, ways: Iterable[str], seeds: int) -> None:
    """One implementation of a module class: every case, cotangent, dtype and way."""
    for dtype in UNIT:
        for problem in problems(module, dtype, judge.COTANGENTS, seeds):
            against = vjp.expected(problem)
            for way in ways if problem.seed < WAYS_SEEDS else ("as it is",):
                found = vjp.compare(WAYS[way](candidate), problem, against)
                where = {"cases": problem.case, "cotangents": problem.cotangent, "ways": way}
                tally.add(of, module, dtype, where, found)


def forwards(candidates: Mapping[str, Mapping[str, Candidate]]) -> list[dict[str, Any]]:
    """Whether each surrogate's value is the forward's: the worst of a module, its error and what is allowed."""
    rows = []
    for of, by_module in candidates.items():
        for module, candidate in by_module.items():
            pairs = [vjp.forward_error(candidate, p) for dtype in UNIT for p in problems(module, dtype, ["ones"], 1)]
            error, allowed = max(pairs, key=lambda pair: pair[0] / pair[1])
            rows.append({"of": of, "module": module, "error": _short(error), "allowed": _short(allowed)})
    return rows


def differences() -> list[dict[str, Any]]:
    """The reference of each smooth module beside finite differences in FP64, its worst case."""
    return [
        {
            "module": name,
            "error": _short(max(vjp.finite_difference_error(p) for p in problems(name, torch.float32, ["random"], 1))),
        }
        for name, module in MODULES.items()
        if module.smooth
    ]


def fault_row(fault: Fault) -> dict[str, Any]:
    """What layer 1 names for a planted fault over all cases, and in how many `y.sum().backward()` alone shows it."""
    candidate = specimen(fault.module, fault.name)
    named: dict[str, str] = {}
    caught = summed = asked = 0
    for dtype in UNIT:
        for case in MODULES[fault.module].cases:
            wrong: list[Measured] = []
            for cotangent in ("random", "sparse"):
                wrong += _wrong(candidate, MODULES[fault.module].problem(case, dtype, cotangent, 0))
            named |= {one.tensor: one.wrong or "" for one in wrong}
            asked += 1
            caught += bool(wrong)
            summed += bool(_wrong(candidate, MODULES[fault.module].problem(case, dtype, "ones", 0)))
    return {
        "fault": fault.name, "module": fault.module, "tensors": list(fault.tensors), "report": fault.report,
        "named": sorted(named), "asked": asked, "caught": caught, "by_sum": summed,
    }  # fmt: skip


def _wrong(candidate: Candidate, problem: Problem) -> list[Measured]:
    return [one for one in vjp.compare(candidate, problem) if one.wrong and one.resolved]


# Planted into a model in training: where, the operator, and the specimen's fault.
IN_PLACE = (
    ("decoder.layers.1.self_attention.linear_proj", "linear", "transposed dW"),
    ("decoder.layers.0.pre_mlp_layernorm", "rms_norm", "norm weight twice"),
    ("decoder.layers.0.self_attention", "rotary_embedding", "rotated the wrong way"),
    ("decoder.layers.1.mlp", "silu_and_mul", "gate and up exchanged"),
    ("decoder.layers.1.self_attention.core_attention", "attention", "one query head of a group"),
    ("decoder.layers.0.self_attention.core_attention", "attention", "softmax scale left out"),
)


def planted(where: str, operator: str, fault: str) -> Callable[[str, str], Candidate | None]:
    """What `trained.recording` plants: the wrong specimen at one operator of one module."""
    wrong = specimen("linear with bias" if operator == "linear" else operator, fault)

    def without_bias(tensors: Tensors, constants: Mapping[str, Any]) -> Outputs:
        none = torch.zeros(tensors["weight"].shape[0], dtype=tensors["weight"].dtype)
        return wrong({**tensors, "bias": none}, constants)

    def plant(module: str, name: str) -> Candidate | None:
        return (without_bias if operator == "linear" else wrong) if (module, name) == (where, operator) else None

    return plant


def in_training(tally: Tally) -> list[dict[str, Any]]:
    """The model's own steps: gradients and updates of all parameters, each operator's call, and faults in place."""
    from .trained import ADAM, Shape, Trainer, one_rank, recording

    rows = []
    shapes = {
        "as it is": (Shape(), Shape(tied=True), Shape(dtype=torch.float32), Shape(dtype=torch.float32, tied=True)),
        "recomputed": (Shape(recompute="full"),),
        "attention recomputed": (Shape(recompute="selective"),),
    }
    with one_rank():
        for way, of_way in shapes.items():
            for shape in of_way:
                trainer = Trainer(shape)
                trainer.backward()
                trainer.step()  # so that the optimizer's state is not empty
                updates.level(trainer.adam)
                problem, state = trainer.problem("second step"), updates.moments(trainer.adam, trainer.mains)
                trainer.backward()
                taken = trainer.step()
                changes = {n: (m.double() - state[n].main.double()).float() for n, m in trainer.mains.items()}
                gradients, changed = updates.beside(taken, changes, state, ADAM, problem)
                where = {"cases": "second step", "cotangents": "recorded", "ways": way}
                tally.add("Megatron Core", problem.module, shape.dtype, where, gradients)
                tally.add("Megatron Core", f"{problem.module}, update", shape.dtype, where, changed)
        for dtype in UNIT:
            trainer = Trainer(Shape(dtype=dtype))
            for _ in range(3):
                trainer.backward()
                trainer.step()
            with recording(trainer.model) as calls:
                trainer.backward()
            for call in calls:
                where = {"cases": "a training step", "cotangents": "recorded", "ways": "as it is"}
                tally.add(
                    "Megatron Core", call.operator, call.problem.dtype, where, vjp.beside(call.gradients, call.problem)
                )
            for module, operator, fault in IN_PLACE:
                with recording(trainer.model, planted(module, operator, fault)) as calls:
                    trainer.backward()
                named = {
                    (call.module, one.tensor)
                    for call in calls
                    for one in vjp.beside(call.gradients, call.problem)
                    if one.wrong and one.resolved
                }
                tensors = next(f.tensors for f in FAULTS if f.name == fault)
                rows.append(
                    {
                        "fault": fault, "module": module, "tensors": list(tensors), "dtype": NAMES[dtype],
                        "named": [f"{where}: {tensor}" for where, tensor in sorted(named)],
                    }
                )  # fmt: skip
        composites(tally)
    return rows


def _mlp(t: Tensors, c: Mapping[str, Any], bridge: vjp.Bridge) -> Outputs:
    return modules.mlp(t["x"], t["linear_fc1.weight"], t["linear_fc2.weight"], bridge)


def _attending(
    run: Callable[..., Tensor], sizes: Mapping[str, Any], t: Tensors, c: Mapping[str, Any], bridge: vjp.Bridge
) -> Outputs:
    return run(t["x"], t, c["table"], bridge, **sizes)


def composites(tally: Tally) -> None:
    """MLP, self-attention and decoder layer of Megatron Core with cotangents of every kind."""
    from .trained import Shape, Trainer, visible

    for dtype in UNIT:
        shape = Shape(dtype=dtype)
        layer = Trainer(shape).model.decoder.layers[0]
        angles = Trainer(shape).model.rotary_pos_emb(shape.length)
        table = modules.rope_table(shape.length, shape.head, dtype)
        sizes = {"heads": shape.heads, "groups": shape.groups, "epsilon": modules.EPSILON}

        def weights(part: torch.nn.Module) -> Tensors:
            return {name: p.detach().clone() for name, p in part.named_parameters()}

        def call(
            part: torch.nn.Module, arguments: tuple[Any, ...], kwargs: dict[str, Any], t: Tensors, _: Any
        ) -> Outputs:
            own = {name: one for name, one in t.items() if name != "x"}
            return torch.func.functional_call(part, own, (t["x"], *arguments), kwargs)[0]

        rope = {"rotary_pos_emb": angles}
        of_layer = {"attention_mask": None, **rope}
        made: dict[str, tuple[torch.nn.Module, Candidate, vjp.Surrogate]] = {
            "mlp": (
                layer.mlp,
                partial(call, layer.mlp, (), {}),
                _mlp,
            ),
            "self attention": (
                layer.self_attention,
                partial(call, layer.self_attention, (None,), rope),
                partial(_attending, modules.self_attention, sizes),
            ),
            "decoder layer": (
                layer,
                partial(call, layer, (), of_layer),
                partial(_attending, modules.layer, sizes),
            ),
        }
        for name, (part, candidate, surrogate) in made.items():
            for kind in judge.COTANGENTS:
                draw = modules.Draw(dtype, 3)
                x = draw(shape.length, shape.batch, shape.hidden)
                given = vjp.cotangents_like(kind, [x], draw.generator)
                problem = Problem(
                    name, "small", dtype, {"x": x, **weights(part)}, {"table": table}, kind, given, surrogate,
                    2 * shape.ffn, visible(),
                )  # fmt: skip
                for way, wrapped in WAYS.items():
                    where = {"cases": "small", "cotangents": kind, "ways": way}
                    tally.add("Megatron Core", name, dtype, where, vjp.compare(wrapped(candidate), problem))


def run(seeds: int, say: Say) -> dict[str, Any]:
    """Everything, as the fields of a document of `samebits check gradients`."""
    tally = Tally()
    ours = {"Megatron Core": aligned()}
    right = {"specimen": {name: specimen(name) for name in judge.SPECIMENS}}
    for module, candidate in ours["Megatron Core"].items():
        say(f"Megatron Core: {module}")
        ask(tally, "Megatron Core", module, candidate, WAYS, seeds)
    for module, candidate in right["specimen"].items():
        say(f"specimen: {module}")
        ask(tally, "specimen", module, candidate, ("as it is",), seeds)
    say("a model in training")
    in_place = in_training(tally)
    say("planted faults")
    return {
        "seeds": seeds,
        "rows": list(tally.rows.values()),
        "forwards": forwards({**ours, **right}),
        "differences": differences(),
        "faults": [fault_row(fault) for fault in FAULTS],
        "in_place": in_place,
        "not_covered": list(judge.NOT_COVERED),
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def check(seeds: int, out: pathlib.Path, say: Say) -> dict[str, Any]:
    """Run layer 1 in a process of its own; the document of schema gradients-1, also at OUT/gradients.json.

    Raises:
        SamebitsError: an environment without our wheels, or a process that ended with an error; OUT that is not empty.
    """
    return conduct(
        "gradients", {"seeds": seeds}, ["samebits", "check", "gradients", "--seeds", str(seeds)], KIND, out, say
    )


def conduct(
    name: str,
    job: dict[str, Any],
    command: list[str],
    kind: Kind,
    out: pathlib.Path,
    say: Say,
    geometry: tuple[int, int] = (2, 128),
) -> dict[str, Any]:
    """Run `samebits.probe.NAME` on a job in the environment of arm 1; OUT/NAME.json is what it found, and how.

    geometry: layers and hidden size of the model, for the identity.
    """
    from samebits.recipe import process

    from .device import device
    from .invariance import identify

    if out.exists() and any(out.iterdir()):
        raise DeviceError(f"{out} is not empty: name a new folder")
    out.mkdir(parents=True, exist_ok=True)
    on = device("cpu", 1)
    path = out / "job.json"
    path.write_bytes(strictjson.dumps(job))
    words = [sys.executable, "-m", f"samebits.probe.{name}", str(path.resolve())]
    log, said = out / f"{name}.log", [0]

    def watch() -> None:
        phases = re.findall(rf"^{PHASE}(.*)$", log.read_text(errors="replace"), re.M)
        for phase in phases[said[0] :]:
            say(phase)
        said[0] = len(phases)

    process.run(words, on.environment, log, watch, f"the check of {name}")
    found = strictjson.loads((out / "found.json").read_bytes())
    facts = {"device_name": None, "threads": found.pop("threads", 1), "contract": found.pop("contract")}
    config = hashlib.sha256(strictjson.canonical(job)).hexdigest()
    execution = identify(on, 1, facts, config, *geometry, command)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    document = kind.build(command=shlex.join(command), date=today, **found, execution=execution)
    kind.write(out / f"{name}.json", document)
    for spent in (path, out / "found.json"):
        spent.unlink()
    return document


def tables(document: Mapping[str, Any]) -> list[Table]:
    """The modules, a row a module: its comparisons, and the worst tensor of each dtype; the faults."""
    asked = Table(title="gradients beside an FP64 reference: the worst of each", box=box.SIMPLE, title_justify="left")
    for i, column in enumerate(("of", "module", "compared", "wrong", *judge.DTYPES)):
        asked.add_column(column, justify="right" if i in (2, 3) else "left", no_wrap=True)
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in document["rows"]:
        grouped.setdefault((row["of"], row["module"]), []).append(row)
    for (of, module), rows in grouped.items():
        worst = [_worst([row for row in rows if row["dtype"] == dtype]) for dtype in judge.DTYPES]
        wrong = sum(row["wrong"] for row in rows)
        colour = "red" if wrong else "green"
        asked.add_row(of, module, f"{sum(row['compared'] for row in rows):,}", f"[{colour}]{wrong}[/]", *worst)
    faults = Table(title="planted faults: in how many cases each is seen", box=box.SIMPLE, title_justify="left")
    for column in ("fault", "module", "tensors named", "layer 1", "y.sum() alone", "as in"):
        faults.add_column(column, no_wrap=True)
    for row in document["faults"]:
        seen = f"{row['by_sum']} of {row['asked']}" if row["by_sum"] else "[yellow]missed[/]"
        caught = f"{row['caught']} of {row['asked']}"
        faults.add_row(row["fault"], row["module"], ", ".join(row["named"]), caught, seen, row["report"])
    for row in document["in_place"]:
        named = ", ".join(name.rpartition(": ")[2] for name in row["named"])
        faults.add_row(f"{row['fault']}, {row['dtype']}", row["module"], named, "in training", "", "")
    return [asked, faults]


def _worst(rows: list[Mapping[str, Any]]) -> str:
    told = [row for row in rows if row["worst"]]
    if not told:
        return ""
    row = max(told, key=lambda one: one["worst"]["relative"] / one["worst"]["tolerance"])
    worst = row["worst"]
    return f"{row['tensor']} {worst['relative']:.1e}, {worst['relative'] / worst['floor']:.1f} floors"


def main(job: pathlib.Path) -> None:
    """``python -m samebits.probe.gradients JOB``"""
    contract = arms.contract(1)
    torch.set_num_threads(1)
    task = json.loads(job.read_text())
    found = run(task["seeds"], lambda text: print(f"{PHASE}{text}", flush=True))
    (job.parent / "found.json").write_bytes(strictjson.dumps({"contract": contract, **found}))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
