"""Engines that trace their operators, and planted faults to try the localisation on: `... localise JOB`.

A job is a JSON file: the engine's arguments, the requests, and either `seeds` (for each an unchanged and a planted run
on the same engine, beside one that is the reference) or one run, with `capture` to keep one operator's inputs.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open

from samebits.judge.planted import KINDS, operators_of

from .engine import facts, serve, start
from .trace import OUTPUT, Key, ReplayError, Tracer, save_replay

_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def traced(llm: Any, watched: Any, says: list[Any], **how: Any) -> Tracer:
    """Serve the says, the last one traced."""
    for requests in says[:-1]:
        serve(llm, watched, requests)
    tracer = Tracer(llm, **how)
    with tracer.tracing():
        serve(llm, watched, says[-1])
    return tracer


@contextmanager
def planted(llm: Any, seed: int, weights: pathlib.Path, keys: list[Key]) -> Iterator[tuple[dict[str, Any], Any]]:
    """One fault at a random layer, drawn from `seed`: what it is, and the tracer's plant for it. Undone at the end."""
    draw = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    model: Any = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
    layers = llm.llm_engine.vllm_config.model_config.hf_config.num_hidden_layers
    layer = draw.randrange(layers)
    truth: dict[str, Any] = {"seed": seed, "kind": kind, "layer": layer}
    known = facts(llm)

    def shows(module: str) -> dict[str, Any]:
        # On a GPU what a module is made of depends on more than the arm: there any of its operators counts.
        shown = () if known["device_name"] else operators_of(known["arm"], kind, module)
        operator, call = next((one for one in shown if (module, *one) in keys), (None, None))
        if shown and operator is None:
            raise SystemExit(
                f"{module}: ran none of {', '.join(name for name, _ in shown)}, in which a fault would show"
            )
        return {"module": module, "operator": operator, "call": call}

    if kind == "weight":
        with _flipped_weight(model, weights, layer, draw) as (module, what):
            yield {**truth, **shows(module), "what": what}, None
    elif kind == "epsilon":
        norms = [
            (name, module)
            for name, module in model.named_modules()
            if f".layers.{layer}." in name and hasattr(module, "variance_epsilon")
        ]
        name, norm = draw.choice(norms)
        before = norm.variance_epsilon
        norm.variance_epsilon = 1000 * before
        try:
            yield {**truth, **shows(name), "what": f"epsilon {before} is {1000 * before}"}, None
        finally:
            norm.variance_epsilon = before
    else:
        module, operator, call = draw.choice([k for k in keys if f".layers.{layer}." in k[0] and k[1] != OUTPUT])
        truth |= {"module": module, "operator": operator, "call": call}
        yield {**truth, "what": "the last bit of one output"}, _one_ulp((module, operator, call), draw)


def _one_ulp(target: Key, draw: random.Random) -> Callable[[Key, list[torch.Tensor]], None]:
    """Flips the last bit of one element of the target's first output, at its first call."""
    done = False

    def plant(key: Key, outputs: list[torch.Tensor]) -> None:
        nonlocal done
        if key != target or done:
            return
        done = True
        bits = outputs[0].view(_INTEGER[outputs[0].element_size()])
        at = tuple(draw.randrange(n) for n in bits.shape)
        bits[at] ^= 1

    return plant


@contextmanager
def _flipped_weight(model: Any, folder: pathlib.Path, layer: int, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Load a layer's weight with one bit flipped into the running engine, as a weight sync would, and put it back."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = file.keys()
        name = draw.choice(sorted(n for n in names if f".layers.{layer}." in n))
        original = file.get_tensor(name)
    faulty = original.clone()
    flat = faulty.view(-1).view(_INTEGER[faulty.element_size()])
    while True:
        at, bit = draw.randrange(flat.numel()), draw.randrange(8 * faulty.element_size() - 1)
        flat[at] ^= 1 << bit
        if torch.isfinite(faulty.view(-1)[at]):
            break
        flat[at] ^= 1 << bit
    owner = name.removesuffix(".weight")
    for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
        stem, _, last = owner.rpartition(".")
        owner = f"{stem}.{fused}" if last in parts else owner
    model.load_weights([(name, faulty)])
    try:
        yield owner, f"bit {bit} of element {at} of {name}"
    finally:
        model.load_weights([(name, original)])


def run(job: pathlib.Path) -> None:
    """Run one job in this process; its results appear beside it."""
    task = json.loads(job.read_text())
    llm, watched = start(task["engine"], task.get("threads", 0))
    folder, says = job.parent, task["says"]

    def write(name: str, tracer: Tracer, **more: Any) -> None:
        (folder / f"{name}.trace.json").write_text(json.dumps({**tracer.document(), **more}))

    capture = task.get("capture")
    how = {"capture": (tuple(capture["key"]), capture["request"], capture["position"])} if capture else {}
    first = traced(llm, watched, says, **how)
    if capture:
        if first.captured is None:
            raise SystemExit(f"{capture['key']}: was not called again")
        try:
            save_replay(folder / "replay", first.captured, tuple(capture["key"]))
        except ReplayError as error:
            (folder / "no-replay.txt").write_text(f"{error}\n")
        return
    write("reference", first, facts=facts(llm))
    for seed in task.get("seeds", []):
        began = time.monotonic()
        write(f"unchanged-{seed}", traced(llm, watched, says))
        with planted(llm, seed, pathlib.Path(task["engine"]["model"]), list(first.keys)) as (truth, plant):
            tracer = traced(llm, watched, says, plant=plant)
            write(f"planted-{seed}", tracer, truth=truth, seconds=time.monotonic() - began)


def main() -> None:
    """``python -m samebits.probe.localise JOB``"""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("job", type=pathlib.Path)
    code = 1
    try:
        run(parser.parse_args().job)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
