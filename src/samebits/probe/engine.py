"""Engines in child processes that write down what they said: `python -m samebits.probe.engine JOB...`.

vLLM is imported once; each job then runs in a process of its own, forked before any engine exists. A job is a JSON
file with the engine's arguments and its says (sets of requests); beside it appears what was said: every token and the
bits of its logprob, and counts from the scheduler that show how the requests were served.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from samebits.recipe import arms

from . import generated

SCHEMA = "samebits.said/1"
SUFFIX = ".said.json"


class Watched:
    """Counts of the scheduler's decisions: what shows that a cell of the matrix took place."""

    def __init__(self, schedule: Callable[[], Any]) -> None:
        self._schedule = schedule
        self.reset()

    def reset(self) -> None:
        self.steps = self.together = self.largest_step = self.preempted = self.mixed_steps = 0
        self._parts: dict[str, int] = {}

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        made = self._schedule(*arguments, **named)
        sizes = made.num_scheduled_tokens
        self.steps += bool(sizes)
        self.together = max(self.together, len(sizes))
        self.largest_step = max(self.largest_step, sum(sizes.values()))
        self.preempted += len(made.preempted_req_ids or ())
        prefilled = [name for name, size in sizes.items() if size > 1]
        self.mixed_steps += 0 < len(prefilled) < len(sizes)
        for name in prefilled:
            self._parts[name] = self._parts.get(name, 0) + 1
        return made

    def facts(self) -> dict[str, int]:
        return {
            "steps": self.steps,
            "together": self.together,
            "largest_step": self.largest_step,
            "preempted": self.preempted,
            "mixed_steps": self.mixed_steps,
            "chunked": sum(parts > 1 for parts in self._parts.values()),
        }


def bits(logprobs: list[float]) -> list[int]:
    """The bits of fp32 logprobs, which vLLM hands out as Python floats. ValueError if one is no fp32 value."""
    exact = np.array(logprobs, np.float64)
    rounded = exact.astype(np.float32)
    if not np.array_equal(rounded.astype(np.float64), exact, equal_nan=True):
        raise ValueError("a logprob is not an fp32 value")
    return rounded.view(np.uint32).tolist()


def said(output: Any, with_prompt: bool) -> dict[str, Any]:
    """What one request said: all its tokens, and bits of the logprobs of tokens[start:]; prompt: its length."""
    answer = output.outputs[0]
    prompt = list(output.prompt_token_ids)
    values = [at[token].logprob for at, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    start = len(prompt)
    if with_prompt:
        start = 1
        pairs = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        values = [at[token].logprob for at, token in pairs] + values
    return {"tokens": [*prompt, *answer.token_ids], "prompt": len(prompt), "start": start, "bits": bits(values)}


def serve(llm: Any, watched: Watched, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Serve requests, each entering after `after` steps of the engine (0: at the start); all at once for equal ones."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    watched.reset()
    waiting = sorted(requests, key=lambda r: r.get("after", 0))
    asked = {r["id"]: r for r in requests}
    outputs: dict[str, Any] = {}
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and (waiting[0].get("after", 0) <= step or not engine.has_unfinished_requests()):
            one = waiting.pop(0)
            parameters = SamplingParams(
                temperature=1.0,
                seed=one["seed"],
                max_tokens=one["answer"],
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                prompt_logprobs=0 if one.get("prompt_logprobs") else None,
                allowed_token_ids=one.get("allowed"),
            )
            engine.add_request(one["id"], {"prompt_token_ids": one["prompt"]}, parameters)
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = output
        step += 1
    cached = sum(output.num_cached_tokens or 0 for output in outputs.values())
    return {
        "facts": {**watched.facts(), "cached_tokens": cached},
        "requests": {name: said(outputs[name], bool(one.get("prompt_logprobs"))) for name, one in asked.items()},
    }


def start(arguments: dict[str, Any], threads: int) -> tuple[Any, Watched]:
    """An engine in this process, and the watch on its scheduler."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    if arguments.get("enforce_eager"):
        import torch._dynamo

        torch._dynamo.config.disable = True  # else the sampler's helpers are compiled, which takes longer than all else
    from vllm import LLM

    llm = LLM(skip_tokenizer_init=True, disable_log_stats=True, seed=0, **arguments)
    core: Any = llm.llm_engine.engine_core
    scheduler = core.engine_core.scheduler
    scheduler.schedule = watched = Watched(scheduler.schedule)
    return llm, watched


def process() -> str:
    """This process and no other one of this machine: its number, and when it started, in ticks since boot."""
    fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return f"{os.getpid()}-{fields[19]}"  # starttime is field 22; the third is the first behind the name


def facts(llm: Any, code: Sequence[str] = ()) -> dict[str, Any]:
    """How an engine ran: what tells two of them apart. code: what was generated for it."""
    import torch

    mode = llm.llm_engine.vllm_config.compilation_config.mode
    compiled = int(mode) if mode is not None else 0
    if compiled:
        import torch._dynamo

        compiled = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    device = llm.llm_engine.vllm_config.device_config.device_type
    return {
        "process": process(),
        "threads": torch.get_num_threads(),
        "compiled": compiled,
        "foreign": sorted({found for graph in code for found in generated.foreign_code(graph)}),
        "dtype": str(llm.llm_engine.vllm_config.model_config.dtype).removeprefix("torch."),
        "arm": int(os.environ.get("VLLM_BATCH_INVARIANT", "0")),
        "contract": arms.loaded_contract(),
        "device_name": torch.cuda.get_device_name() if device == "cuda" else None,
    }


def run(job: pathlib.Path) -> None:
    """Run one job in this process and write what was said beside it, in one step."""
    task = json.loads(job.read_text())
    with tempfile.TemporaryDirectory() as folder:
        compiles = not task["engine"].get("enforce_eager")
        document = _serve(task, generated.collect(pathlib.Path(folder)) if compiles else [])
    temporary = job.with_suffix(".part")
    temporary.write_text(json.dumps(document))
    temporary.rename(job.with_name(job.name.removesuffix(".job.json") + SUFFIX))


def _serve(task: dict[str, Any], code: list[str]) -> dict[str, Any]:
    """Make the engine of a job and ask it all. code: what is generated for it, and grows as it is."""
    began = time.monotonic()
    llm, watched = start(task["engine"], task.get("threads", 0))
    ready = time.monotonic()
    says = {}
    seconds = {"start": round(ready - began, 1)}
    for name, requests in task["says"].items():
        before = time.monotonic()
        says[name] = serve(llm, watched, requests)
        seconds[name] = round(time.monotonic() - before, 1)
    return {"schema": SCHEMA, "engine": task["name"], "facts": facts(llm, code), "seconds": seconds, "says": says}


def main() -> None:
    """``python -m samebits.probe.engine JOB...``: one process a job, one after another; the first failure ends it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("jobs", type=pathlib.Path, nargs="+")
    jobs = parser.parse_args().jobs
    import vllm.entrypoints.llm
    import vllm.v1.engine.core  # noqa: F401

    for job in jobs:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run(job)
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # an engine's threads and exit handlers have nothing more to do
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(f"{job.name}: ended with {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
