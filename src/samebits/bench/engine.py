"""One vLLM engine that is timed: ``python -m samebits.bench.engine JOB``, the arm is its environment's.

JOB: {"engine": arguments of LLM, "cases": [{"prompt", "answer", "requests"}], "said": draw weights and answer first}.
With "tree" vllm must be the one in that folder; with "said" and not "patched", as released. Without "said" the engine
runs in this process, which says the contract that it computes by.
A case counts the tokens that it generated; one with a single token an answer, those of its prompts. Its name is
"prompt,answer,requests".
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from samebits.recipe import arms
from samebits.sources.pins import ROOT

from .turns import Served, Workload, serve

# (prompt, answer) of the fixed requests: lengths on both sides of tiles and of vLLM's graph sizes; some decode alone in
# the end.
FIXED = ((7, 24), (64, 24), (131, 16), (515, 16))


def draw_weights(model: Any) -> int:
    """Fill every parameter from a generator seeded by its name: matrices of std 0.7 / sqrt(K), gains around 1.

    So a checkpoint need not travel, and every engine of these sizes has the same weights, whatever made it.
    """
    import zlib

    import torch

    drawn = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator(device=parameter.device).manual_seed(zlib.crc32(name.encode()))
            values = torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=parameter.dtype)
            if parameter.dim() == 1:
                parameter.copy_(1.0 + 0.1 * values if "norm" in name else 0.1 * values)
            else:
                scale = 1.0 if "embed" in name else 0.7 / parameter.shape[-1] ** 0.5
                parameter.copy_(values * scale)
            drawn += 1
    return drawn


def _make(job: dict[str, Any]) -> Served:

    import vllm

    if job.get("said") and not job["patched"]:
        refuse_patched(pathlib.Path(vllm.__file__).parents[1], vllm.__version__)
    tree = job.get("tree")  # a folder on PYTHONPATH that lacks a file of the package is passed over without a word
    if tree and not pathlib.Path(vllm.__file__).is_relative_to(tree):
        raise SystemExit(
            f"vllm was imported from {pathlib.Path(vllm.__file__).parent}, not from {tree}: lay the tree anew"
        )
    engine = vllm.LLM(**job["engine"])
    facts: dict[str, Any] = {"vllm": vllm.__version__}
    vocabulary = engine.llm_engine.model_config.get_vocab_size()

    def prompts(requests: int, length: int) -> list[dict[str, Any]]:
        limit = min(vocabulary, 50_021)
        return [
            {"prompt_token_ids": [(7919 * n + 31 * i * i + 7 * i) % (limit - 3) + 3 for i in range(length)]}
            for n in range(requests)
        ]

    if job.get("said"):
        engine.apply_model(draw_weights)
        facts["said"] = _say(engine, prompts)
        facts["card"] = card()
        facts["admitted"] = _admitted()
    else:
        facts["contract"] = arms.loaded_contract()

    def workload(prompt: int, answer: int, requests: int) -> Workload:
        greedy = vllm.SamplingParams(
            temperature=0.0, max_tokens=answer, min_tokens=answer, ignore_eos=True, detokenize=False
        )
        asked = prompts(requests, prompt)

        def generate() -> int:
            outputs = engine.generate(asked, greedy, use_tqdm=False)
            tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            assert tokens == requests * answer, f"{tokens} tokens came, {requests * answer} were asked for"
            return tokens if answer > 1 else requests * prompt

        return generate

    @contextmanager
    def awake() -> Iterator[None]:
        engine.wake_up()
        yield
        engine.sleep(level=1)  # the weights wait in the machine's memory, the cache is given back

    workloads = {f"{c['prompt']},{c['answer']},{c['requests']}": workload(**c) for c in job["cases"]}
    if not job["engine"].get("enable_sleep_mode"):
        return Served(workloads, facts)
    engine.sleep(level=1)
    return Served(workloads, facts, awake)


def refuse_patched(site: pathlib.Path, version: str) -> None:
    """SystemExit unless the files that our series changes lie in `site` as the release of this version has them."""
    known = json.loads((ROOT / "manifests" / "patched" / f"vllm-{version}.json").read_text())
    for name, hashes in known["files"].items():
        file = site / name
        found = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
        if found != hashes["before"]:
            raise SystemExit(
                f"vllm {version} in {site} is not the release: {name} differs; give the arm its own @FOLDER"
            )


def card() -> dict[str, str]:
    """The GPU of this process, and what stands between it and a kernel."""
    import torch

    return {
        "name": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "driver": pathlib.Path("/sys/module/nvidia/version").read_text().strip(),
    }


def _say(engine: Any, prompts: Any) -> dict[str, Any]:
    """What the engine answers to the fixed requests, seeded: tokens and bits, of all together and of each alone.

    Those that come together share steps with what came in time, which differs from run to run; alone nothing does."""
    import vllm
    from samebits.probe.engine import bits

    asked, how = [], []
    for n, (length, answer) in enumerate(FIXED):
        asked += prompts(n + 1, length)[n:]
        how.append(
            vllm.SamplingParams(
                temperature=1.0,
                seed=n,
                max_tokens=answer,
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                prompt_logprobs=0,
            )
        )

    def read(outputs: Iterable[Any]) -> dict[str, list[int]]:
        tokens: list[int] = []
        values: list[float] = []
        for output in outputs:
            answer = output.outputs[0]
            tokens += answer.token_ids
            pairs = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
            values += [at[token].logprob for at, token in pairs]
            values += [at[token].logprob for at, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        return {"tokens": tokens, "bits": bits(values)}

    alone = [
        engine.generate([one], [parameters], use_tqdm=False)[0] for one, parameters in zip(asked, how, strict=True)
    ]
    return {"together": read(engine.generate(asked, how, use_tqdm=False)), "alone": read(alone)}


def _admitted() -> dict[str, Any]:
    """The plans that vLLM's admission of linears left in this process's cache folder: "NxK" to the plan."""
    root = pathlib.Path(os.environ["VLLM_CACHE_ROOT"]) / "batch_invariant"
    return {file.stem: json.loads(file.read_text())["plan"] for file in sorted(root.glob("*/*.json"))}


if __name__ == "__main__":
    serve(_make)
