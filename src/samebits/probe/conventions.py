"""Runs layer 2 on this machine's CPU: `python -m samebits.probe.conventions JOB`, JOB {"steps": n, "layers": n}.

The checkpoint is a small aligned model that took `steps` steps; the batch is the one of its next.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import torch
from rich import box
from rich.table import Table

from samebits.evidence import strictjson
from samebits.evidence.gradients import CONVENTIONS
from samebits.judge import conventions as judge
from samebits.recipe import arms

from .gradients import PHASE, Say, conduct

HIDDEN = 256


def check(steps: int, layers: int, out: pathlib.Path, say: Say) -> dict[str, Any]:
    """Run layer 2 in a process of its own; the document of schema conventions-1, also at OUT/conventions.json.

    Raises:
        SamebitsError: an environment without our wheels, or a process that ended with an error; OUT that is not empty.
    """
    job = {"steps": steps, "layers": layers}
    command = ["samebits", "check", "conventions", "--steps", str(steps), "--layers", str(layers)]
    return conduct("conventions", job, command, CONVENTIONS, out, say, (layers, HIDDEN))


def run(steps: int, layers: int, say: Say) -> dict[str, Any]:
    """The fields of a document of `samebits check conventions`."""
    from .trained import Shape, Trainer, one_rank

    with one_rank():
        shape = Shape(layers=layers, hidden=HIDDEN, ffn=2 * HIDDEN, heads=4, groups=2, length=64)
        trainer = Trainer(shape)
        say(f"{steps} steps")
        losses = []
        for _ in range(steps):
            losses.append(trainer.backward())
            trainer.step()
        losses.append(trainer.backward())
        say("both conventions")
        rows = judge.compare(trainer.problem("checkpoint"), layers)
    return {"layers": layers, "steps": steps, "loss": [round(losses[i], 4) for i in (0, -1)], "rows": rows}


def tables(document: Mapping[str, Any]) -> list[Table]:
    """A row for each combination and class, and the outliers."""
    heads = (
        "weight, activation", "class", "dX: 1 - cosine, median", "worst", "of layer", "norm ratio", "by itself",
        "dW: 1 - cosine", "outliers",
    )  # fmt: skip
    drawn = Table(
        title=f"master against dequantized, {document['layers']} layers after {document['steps']} steps",
        box=box.SIMPLE,
        title_justify="left",
    )
    for i, head in enumerate(heads):
        drawn.add_column(head, justify="left" if i in (0, 1, 8) else "right", no_wrap=True)
    for row in judge.summary(document):
        low, high = row["ratios"]
        outliers = ", ".join(f"layer {i}" for i in row["outliers"])
        drawn.add_row(
            row["combination"], row["class"], f"{row['median']:.1e}", f"{row['worst']['dx_from_one']:.1e}",
            str(row["worst"]["layer"]), f"{low:.3f} to {high:.3f}", f"{row['local']:.1e}", f"{row['dw']:.1e}", outliers,
        )  # fmt: skip
    return [drawn]


def main(job: pathlib.Path) -> None:
    """``python -m samebits.probe.conventions JOB``"""
    contract = arms.contract(1)
    torch.set_num_threads(1)
    task = json.loads(job.read_text())
    found = run(task["steps"], task["layers"], lambda text: print(f"{PHASE}{text}", flush=True))
    (job.parent / "found.json").write_bytes(strictjson.dumps({"contract": contract, **found}))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
