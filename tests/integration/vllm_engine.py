"""One vLLM engine on the CPU, in a process of its own: `python vllm_engine.py JOB`, JOB a folder with job.json.

job.json: {"engine": arguments of LLM, "steps": [...]}. Each step adds a result to JOB/results.json:
{"generate": true}, {"load": weights file, "buckets": n, "process": bool} or {"read": file to write};
{"serve": [requests], "together": bool}, {"score": step}: what that step served, as prompts; {"operators": [batches]}:
what each was served and the ATen operators that did it, from embedding to sampled token; {"code": true}: the code that
the compiler generated for the model; or {"preemptions": true}: how often a request was set back.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers import utils
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.v1.sample.sampler import Sampler

import vllm
from samebits.probe import generated
from vllm import LLM, SamplingParams

PROMPT_LENGTHS = (3, 9, 17, 33, 40, 61)
RESPONSE = 12


def generate(llm: LLM) -> list[dict[str, Any]]:
    """Six prompts at once, then one alone: sampled tokens, their logprobs and the prompt's."""
    random = torch.Generator().manual_seed(11)
    prompts: Any = [{"prompt_token_ids": torch.randint(0, 64, (n,), generator=random).tolist()} for n in PROMPT_LENGTHS]
    sampling = SamplingParams(
        max_tokens=RESPONSE,
        temperature=1.0,
        seed=5,
        logprobs=0,
        prompt_logprobs=0,
        ignore_eos=True,
        detokenize=False,
    )
    outputs = []
    for batch in (prompts, prompts[:1]):
        requests: Any = llm.generate(batch, sampling, use_tqdm=False)
        for request in requests:
            one = request.outputs[0]
            sampled = [step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)]
            pairs = zip(request.prompt_token_ids[1:], request.prompt_logprobs[1:], strict=True)
            prompt = [step[token].logprob for token, step in pairs]
            outputs.append({"tokens": list(one.token_ids), "logprobs": sampled, "prompt_logprobs": prompt})
    return outputs


def serve(llm: LLM, requests: list[dict[str, Any]], together: bool) -> list[dict[str, Any]]:
    """Tokens, their logprobs and, where asked for, the prompt's."""
    prompts: Any = [{"prompt_token_ids": request["prompt"]} for request in requests]
    sampling = [
        SamplingParams(
            max_tokens=request.get("max_tokens", RESPONSE),
            temperature=request.get("temperature", 1.0),
            top_k=request.get("top_k", 0),
            top_p=request.get("top_p", 1.0),
            seed=request.get("seed"),
            logprobs=0,
            prompt_logprobs=0 if request.get("prompt_logprobs") else None,
            ignore_eos=True,
            detokenize=False,
        )
        for request in requests
    ]
    batches = [(prompts, sampling)] if together else [([p], [s]) for p, s in zip(prompts, sampling, strict=True)]
    served = []
    for batch in batches:
        done: Any = llm.generate(*batch, use_tqdm=False)
        for request in done:
            one = request.outputs[0]
            result = {
                "prompt": list(request.prompt_token_ids),
                "tokens": list(one.token_ids),
                "logprobs": [step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)],
            }
            if request.prompt_logprobs:
                pairs = zip(request.prompt_token_ids[1:], request.prompt_logprobs[1:], strict=True)
                result["prompt_logprobs"] = [step[token].logprob for token, step in pairs]
            served.append(result)
    return served


def score(llm: LLM, served: list[dict[str, Any]]) -> list[list[float]]:
    """The logprobs of the tokens that were served, computed as those of a prompt."""
    requests = [{"prompt": s["prompt"] + s["tokens"], "max_tokens": 1, "prompt_logprobs": True} for s in served]
    scored = serve(llm, requests, together=True)
    return [new["prompt_logprobs"][-len(old["tokens"]) :] for new, old in zip(scored, served, strict=True)]


def operators(llm: LLM, batches: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A batch: {"served", "model", "sampler"}: names of all operators that run, nested ones too.

    "model" is a sorted set: model, output layer and logprobs of a prompt. "sampler" is a list a call, in the order in
    which they began.
    """
    found: dict[str, list[list[str]]] = {"model": [], "sampler": []}
    running: list[str] = []

    def watched(part: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if running:  # a sampler computes logprobs too; one profile at a time
                return function(*args, **kwargs)
            running.append(part)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                result = function(*args, **kwargs)
            running.clear()
            events = sorted(profile.events(), key=lambda event: event.time_range.start)
            found[part].append([event.name for event in events if "::" in event.name])
            return result

        return run

    def watch(worker: Any) -> None:
        model = worker.model_runner.model
        model.forward, model.compute_logits = watched("model", model.forward), watched("model", model.compute_logits)
        sampler: Any = Sampler
        sampler.compute_logprobs = staticmethod(watched("model", Sampler.compute_logprobs))
        sampler.forward = watched("sampler", Sampler.forward)

    llm.collective_rpc(watch)
    results = []
    for batch in batches:
        served = serve(llm, batch, together=True)
        model = sorted({name for names in found["model"] for name in names})
        results.append({"served": served, "model": model, "sampler": list(found["sampler"])})
        for calls in found.values():
            calls.clear()
    return results


def load(worker: Any, file: str, buckets: int, process: bool) -> None:
    """What verl does in a weight sync: `load_weights` a bucket, each in memory that the next one reuses."""
    runner = worker.model_runner
    weights = list(reversed(load_file(file).items()))
    for n in range(buckets):
        bucket = weights[n::buckets]  # parts of a fused weight come in different buckets
        runner.model.load_weights(bucket)
        for _, tensor in bucket:
            tensor.fill_(float("nan"))
    if process:
        process_weights_after_loading(runner.model, runner.model_config, worker.device)


def read(worker: Any, file: str) -> None:
    """Write every resident parameter under its name in vLLM."""
    parameters = worker.model_runner.model.named_parameters()
    save_file({name: parameter.detach().clone().contiguous() for name, parameter in parameters}, file)


def main(job: pathlib.Path) -> None:
    task = json.loads((job / "job.json").read_text())
    settings = {
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": False,
        "seed": 0,
        **task["engine"],
    }
    code: list[str] = []
    if any("code" in step for step in task["steps"]):
        code = generated.collect(job / "inductor")
    llm = LLM(**settings)
    results: list[Any] = []
    for step in task["steps"]:
        if "generate" in step:
            results.append(generate(llm))
        elif "serve" in step:
            results.append(serve(llm, step["serve"], step["together"]))
        elif "score" in step:
            results.append(score(llm, results[step["score"]]))
        elif "operators" in step:
            results.append(operators(llm, step["operators"]))
        elif "code" in step:
            results.append(code)
        elif "preemptions" in step:
            results.append(sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"))
        elif "read" in step:
            llm.collective_rpc(read, args=(step["read"],))
            results.append(None)
        else:
            try:
                llm.collective_rpc(load, args=(step["load"], step["buckets"], step["process"]))
                results.append("")
            except Exception as error:
                results.append(f"{type(error).__name__}: {error}")
    origin = {
        "vllm": vllm.__file__,
        "patched": hasattr(utils, "keeps_cpu_weight"),
        "batch_invariant": hasattr(torch.ops.batch_invariant, "linear"),
    }
    (job / "results.json").write_text(json.dumps({"origin": origin, "results": results}))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
