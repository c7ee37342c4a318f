"""A fresh engine on the weights of a sync: does the engine that was synced say the same, bit for bit?

For each sync capsule of a run that kept its exported weights, an engine is started on them, asked the capsule's own
probes one by one, and what it said and holds becomes a ``fresh`` capsule.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

from samebits.evidence import capsule

WORKER_EXTENSION = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"


def engine_arguments(rollout: dict[str, Any]) -> dict[str, Any]:
    """vLLM's arguments as verl's rollout passes them, from the resolved ``actor_rollout_ref.rollout`` of the run."""
    same = ("dtype", "enforce_eager", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "logprobs_mode")
    return {
        **{name: rollout[name] for name in same},
        "worker_extension_cls": WORKER_EXTENSION,
        "enable_chunked_prefill": rollout["enable_chunked_prefill"],
        "enable_prefix_caching": rollout["enable_prefix_caching"],
        "gpu_memory_utilization": rollout["gpu_memory_utilization"],
        "tensor_parallel_size": rollout["tensor_model_parallel_size"],
        "seed": rollout["seed"],
        **rollout["engine_kwargs"]["vllm"],
    }


def probe_fresh_engine(run: pathlib.Path, sync: int, arguments: dict[str, Any]) -> None:
    """Writes ``RUN/capsules/fresh-NNNN`` for one sync.

    Raises:
        CapsuleError: the sync capsule is damaged, or the fresh one exists already.
    """
    import vllm

    synced = capsule.read_capsule(run / "capsules" / f"sync-{sync:04d}")
    tokens, prompt_lengths = synced.tensors["probe_tokens"].read(), synced.tensors["probe_prompt_length"].read()
    lengths = synced.tensors["probe_length"].read()
    engine = vllm.LLM(
        str(run / "weights" / synced.meta["weights"]),
        # The same worker process, threads and reading of weights as under verl.
        distributed_executor_backend="mp",
        disable_log_stats=True,
        **arguments,
    )
    said, log_probs = np.zeros_like(tokens), np.zeros(tokens.shape, np.float32)
    for row, (length, prompt_length) in enumerate(zip(lengths, prompt_lengths, strict=True)):
        greedy = vllm.SamplingParams(
            temperature=0.0, max_tokens=int(length - prompt_length), logprobs=0, ignore_eos=True
        )
        prompt = tokens[row, :prompt_length].tolist()
        answer = engine.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False)[0].outputs[0]
        said[row, :length] = [*prompt, *answer.token_ids]
        log_probs[row, prompt_length:length] = [
            at[token].logprob for at, token in zip(answer.logprobs, answer.token_ids, strict=True)
        ]
    with tempfile.TemporaryDirectory() as folder:
        table = pathlib.Path(folder) / "loaded.json"
        engine.collective_rpc("write_resident_weights", kwargs={"path": str(table)})
        resident = json.loads(table.read_text())
    meta = {
        "schema": capsule.SCHEMA,
        "kind": "fresh",
        "sync": sync,
        "weights": synced.meta["weights"],
        "execution": synced.meta["execution"],
        "contract": resident["contract"],
        "loaded": resident["tensors"],
    }
    tensors = {
        "probe_tokens": said,
        "probe_length": lengths,
        "probe_prompt_length": prompt_lengths,
        "probe_log_probs": log_probs,
    }
    capsule.write_capsule(run / "capsules" / f"fresh-{sync:04d}", meta, tensors)
    # Shuts the engine's processes down before the next one starts.
    del engine


def main() -> None:
    """``python -m samebits.probe.fresh RUN SYNC…``: an engine a sync, side by side, each in processes of its own."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("run", type=pathlib.Path)
    parser.add_argument("syncs", type=int, nargs="+")
    asked = parser.parse_args()
    rollout = json.loads((asked.run / "config.json").read_text())["actor_rollout_ref"]["rollout"]
    if len(asked.syncs) > 1:
        # Most of an engine's start is one thread's work.
        command = [sys.executable, "-m", "samebits.probe.fresh", str(asked.run)]
        children = [subprocess.Popen([*command, str(sync)]) for sync in asked.syncs]
        sys.exit(max(abs(child.wait()) for child in children))
    probe_fresh_engine(asked.run, asked.syncs[0], engine_arguments(rollout))
    os._exit(0)


if __name__ == "__main__":
    main()
