"""Runs layer 3 on this machine's CPU: `python -m samebits.probe.sft JOB`, JOB {"steps", "layers", "hidden"}.

The model and the task are the loop's: a seeded Qwen3 that learns running sums. Megatron's DDP and optimizer take the
steps.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import pathlib
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from samebits.evidence import strictjson
from samebits.evidence.gradients import SFT
from samebits.judge import sft as judge
from samebits.judge import updates, vjp
from samebits.recipe import arms, model, task

from .gradients import PHASE, Say, conduct
from .trained import ADAM, WEIGHT_DECAY, Batch, Shape, Trainer, one_rank, substituted

MICRO_BATCHES, MICRO_BATCH, LENGTH = 2, 4, 56
RATE, WARM_UP = 3e-4, 10
VALIDATION, EVERY = 16, 5  # sequences; steps between two looks
SEED, SEEDS = 0, (1, 2, 3)  # of the three arms; of the baseline runs whose spread is the measure
SIZES = ("dtype", "layers", "hidden", "ffn", "heads", "groups", "head", "vocabulary", "tied")
CHECKPOINT = 3  # steps before the first comparison, so that Adam's state is not empty


def check(steps: int, layers: int, hidden: int, out: pathlib.Path, say: Say) -> dict[str, Any]:
    """Run layer 3 in a process of its own; the document of schema sft-1, also at OUT/sft.json.

    Raises:
        SamebitsError: an environment without our wheels, or a process that ended with an error; OUT that is not empty.
    """
    job = {"steps": steps, "layers": layers, "hidden": hidden}
    command = ["samebits", "run", "sft", "--steps", str(steps), "--layers", str(layers), "--hidden", str(hidden)]
    return conduct("sft", job, command, SFT, out, say, (layers, hidden))


def batch(pairs: list[tuple[str, str]], micro_batches: int) -> Batch:
    """Conversations, padded on the right; what counts are the answers and the token that ends each."""
    tokenizer = model.tokenizer()
    size = (len(pairs), LENGTH)
    tokens, labels, counts = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long), torch.zeros(size)
    for i, (question, answer) in enumerate(pairs):
        asked = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
        both = [*asked, {"role": "assistant", "content": answer}]
        ids = torch.tensor(tokenizer.apply_chat_template(both)["input_ids"][: LENGTH + 1])
        tokens[i, : len(ids) - 1], labels[i, : len(ids) - 1] = ids[:-1], ids[1:]
        counts[i, len(prompt) - 1 : len(ids) - 1] = 1
    parts = (t.view(micro_batches, -1, LENGTH) for t in (tokens, labels, counts / counts.sum()))
    return Batch(*parts)


def batches(steps: int, seed: int) -> list[Batch]:
    """The batch of each step, the same for every arm of a seed."""
    count = MICRO_BATCHES * MICRO_BATCH
    pairs = task.examples(steps * count, 1000 + seed)
    return [batch(pairs[i * count : (i + 1) * count], MICRO_BATCHES) for i in range(steps)]


class Arm:
    """One arm of a seed."""

    def __init__(self, name: str, layers: int, hidden: int, seed: int):
        geometry = model.config(layers, hidden)
        self.name = name
        self.shape = Shape(
            aligned=name != judge.NATIVE,
            layers=layers,
            hidden=hidden,
            ffn=geometry.intermediate_size,
            heads=geometry.num_attention_heads,
            groups=geometry.num_key_value_heads,
            head=geometry.head_dim,
            vocabulary=geometry.vocab_size,
        )
        self.trainer = Trainer(self.shape, seed)
        self.held_out = batch(task.examples(VALIDATION, 999), 1)

    def weights_sha256(self) -> str:
        digest = hashlib.sha256()
        for _, parameter in sorted(self.trainer.model.named_parameters()):
            digest.update(parameter.detach().view(torch.int16).numpy().tobytes())
        return digest.hexdigest()

    def step(self, number: int, one: Batch) -> dict[str, Any]:
        """One optimizer step; number: from 1."""
        began = time.monotonic()
        trainer = self.trainer
        trainer.batch = one
        for group in trainer.adam.param_groups:
            group["lr"] = rate(number)
        before = {name: main.detach().clone() for name, main in trainer.mains.items()}
        with substituted() if self.name == judge.REFERENCE else nullcontext():
            loss = trainer.backward()
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in trainer.gradients().values()))
        wrong = sum(int((~torch.isfinite(g)).sum()) for g in trainer.gradients().values()) + (not math.isfinite(loss))
        trainer.step()
        changes = [main.detach().double() - before[name].double() for name, main in trainer.mains.items()]
        square = sum(float(c.square().sum()) for c in changes) / sum(c.numel() for c in changes)
        return {
            "step": number, "loss": loss, "grad_norm": norm, "update_rms": math.sqrt(square),
            "clip": min(1.0, ADAM.clip / (norm + 1e-6)), "nonfinite": wrong,
            "tokens": int(one.weights.count_nonzero()), "seconds": round(time.monotonic() - began, 3),
        }  # fmt: skip

    @torch.no_grad()
    def nll(self) -> float:
        """Of the answers that are never trained on, in nats a token."""
        held = self.held_out
        said = self.trainer.log_probs(held.tokens[0], held.labels[0])
        return -float((said.double() * held.weights[0].double()).sum())

    def run(self, steps: int, seed: int, say: Say) -> dict[str, Any]:
        sha = self.weights_sha256()
        rows, validation = [], [{"step": 0, "nll": self.nll()}]
        for number, one in enumerate(batches(steps, seed), 1):
            rows.append(self.step(number, one))
            if number % EVERY == 0 or number == steps:
                validation.append({"step": number, "nll": self.nll()})
                say(f"{self.name}, seed {seed}, step {number}: validation NLL {validation[-1]['nll']:.4f}")
        return {"weights_sha256": sha, "steps": rows, "validation": validation}


def rate(number: int) -> float:
    """The learning rate of a step: a linear warm-up, then constant."""
    return RATE * min(1.0, number / WARM_UP)


def settings(layers: int, hidden: int, steps: int) -> dict[str, dict[str, Any]]:
    """The configuration of each arm, setting by setting."""
    shape = Arm(judge.TEST, layers, hidden, SEED).shape
    common = {
        **{key: str(getattr(shape, key)) for key in SIZES},
        "data": "running sums", "seed": SEED, "steps": steps, "micro batches": MICRO_BATCHES,
        "sequences each": MICRO_BATCH, "tokens each": LENGTH,
        "loss": "mean over the answers' tokens", "packing": "none, padded on the right", "optimizer": "AdamW",
        "learning rate": RATE, "warm-up steps": WARM_UP, "schedule": "constant", "betas": f"{ADAM.beta1}, {ADAM.beta2}",
        "weight decay": WEIGHT_DECAY, "clip": ADAM.clip, "loss scaling": "none", "main": "float32",
        "recomputation": "none",
    }  # fmt: skip
    table = {key: dict.fromkeys(judge.ARMS, value) for key, value in common.items()}
    return {**table, **{key: dict(of) for key, of in judge.DIFFERENCES.items()}}


def first(layers: int, hidden: int) -> list[dict[str, Any]]:
    """Gradients and one step on a fixed checkpoint and batch: under test and its reference beside FP64."""
    arm = Arm(judge.TEST, layers, hidden, SEED)
    trainer = arm.trainer
    given = batches(CHECKPOINT + 1, SEED)
    for number, one in enumerate(given[:-1], 1):
        arm.step(number, one)
    trainer.batch = given[-1]
    problem = trainer.problem("checkpoint")
    updates.level(trainer.adam)
    state = updates.moments(trainer.adam, trainer.mains)
    optimizer = dataclasses.replace(ADAM, learning_rate=rate(CHECKPOINT + 1))
    for group in trainer.adam.param_groups:
        group["lr"] = optimizer.learning_rate
    with substituted():
        trainer.backward()
    of_reference: dict[str, Tensor] = trainer.gradients()
    trainer.backward()
    taken = trainer.step()
    changes = {n: (m.double() - state[n].main.double()).float() for n, m in trainer.mains.items()}
    clipped = {n: g.float() for n, g in optimizer.clipped({n: g.double() for n, g in of_reference.items()}).items()}
    reference, _ = updates.beside(clipped, changes, state, optimizer, problem)
    gradients, changed = updates.beside(taken, changes, state, optimizer, problem)
    kinds = (("gradient", gradients), ("update", changed), ("gradient of the reference", reference))
    return [_row(what, one) for what, found in kinds for one in found]


def _row(what: str, one: vjp.Measured) -> dict[str, Any]:
    numbers = {"relative": one.relative, "floor": one.floor, "tolerance": one.tolerance}
    short = {name: None if value is None else float(f"{value:.4g}") for name, value in numbers.items()}
    return {"what": what, "tensor": one.tensor, **short, "wrong": one.wrong}


def run(steps: int, layers: int, hidden: int, say: Say) -> dict[str, Any]:
    """The fields of a document of `samebits run sft`."""
    with one_rank():
        say("one step beside FP64")
        found: dict[str, Any] = {
            "steps": steps, "layers": layers, "hidden": hidden, "config": settings(layers, hidden, steps),
            "first": first(layers, hidden), "arms": {}, "seeds": [],
        }  # fmt: skip
        for name in judge.ARMS:
            found["arms"][name] = Arm(name, layers, hidden, SEED).run(steps, SEED, say)
        for seed in SEEDS:
            ran = Arm(judge.NATIVE, layers, hidden, seed).run(steps, seed, say)
            found["seeds"].append({"seed": seed, "validation": ran["validation"]})
    found["verdict"], found["why"] = judge.verdict(found)
    return found


def tables(document: Mapping[str, Any]) -> list[Table]:
    """The arms' differences, the first step, and the curves."""
    config = Table(title="settings in which the arms differ", box=box.SIMPLE, title_justify="left")
    for head in ("setting", *judge.ARMS):
        config.add_column(head)
    for key, of in document["config"].items():
        if len(set(map(str, of.values()))) > 1:
            config.add_row(key, *(str(of[arm]) for arm in judge.ARMS))
    one = Table(title="one step beside FP64, the worst tensor", box=box.SIMPLE, title_justify="left")
    for head in ("what", "tensors", "tensor", "relative", "floors", "of the tolerance", "wrong"):
        one.add_column(head)
    for what in dict.fromkeys(row["what"] for row in document["first"]):
        rows = [row for row in document["first"] if row["what"] == what]
        worst = max(rows, key=lambda row: (row["relative"] or 0) / row["tolerance"])
        numbers = (worst["relative"], worst["relative"] / worst["floor"], worst["relative"] / worst["tolerance"])
        wrong = str(sum(row["wrong"] is not None for row in rows))
        one.add_row(what, str(len(rows)), worst["tensor"], *(f"{n:.2g}" for n in numbers), wrong)
    curves = Table(title="curves, by step", box=box.SIMPLE, title_justify="left")
    curves.add_column("")
    looks = [row["step"] for row in document["arms"][judge.TEST]["validation"]]
    for step in looks:
        curves.add_column(str(step), justify="right", no_wrap=True)
    for arm, ran in document["arms"].items():
        by_step = {row["step"]: row for row in ran["steps"]}
        nll = {row["step"]: row["nll"] for row in ran["validation"]}
        curves.add_row(f"{arm}: validation NLL", *(f"{nll[step]:.4f}" for step in looks))
        for key in judge.NUMBERS:
            values = [by_step[step][key] if step else None for step in looks]
            curves.add_row(f"  {key.replace('_', ' ')}", *("" if v is None else f"{v:.4g}" for v in values))
        total = sum(row["tokens"] for row in ran["steps"]) / sum(row["seconds"] for row in ran["steps"])
        curves.add_row(f"  effective tokens a second: {total:.3g}")
    return [config, one, curves]


def notes(document: Mapping[str, Any]) -> list[str]:
    """The verdict, and the numbers behind it."""
    bound, seeds = judge.bound(document), ", ".join(str(one["seed"]) for one in document["seeds"])
    said = [f"verdict: {document['verdict']}", *document["why"]]
    said.append(
        f"spread of the last validation NLL over seeds {seeds}: {judge.spread(document):.4f}; bound {bound:.4f}"
    )
    said += [
        f"under test and {other}: at most {judge.apart(document, other):.5f} apart in the window"
        for other in (judge.REFERENCE, judge.NATIVE)
    ]
    return said


def main(job: pathlib.Path) -> None:
    """``python -m samebits.probe.sft JOB``"""
    contract = arms.contract(1)
    todo = json.loads(job.read_text())
    threads = 2 if todo["hidden"] >= 512 else 1  # of less a second thread makes nothing faster
    torch.set_num_threads(threads)
    found = run(todo["steps"], todo["layers"], todo["hidden"], lambda text: print(f"{PHASE}{text}", flush=True))
    (job.parent / "found.json").write_bytes(strictjson.dumps({"contract": contract, "threads": threads, **found}))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
