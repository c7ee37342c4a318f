"""NeMo-RL#4018: after a weight sync the engine answers from keys and values that the old weights left in its cache.

There the prefix cache outlived every sync, so that a request which shared a prefix with an earlier one was answered by
weights up to seventeen updates old, and the mismatch grew from step to step. Here a real engine takes new weights: what
it says with its cache kept is not what a fresh engine says, with its cache reset it is. Its sibling is the judge: the
fixed prompts of a run are asked after every sync, so a stale cache answers them as before.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import BOUNDS, make_run, rewrite
from safetensors.torch import load_file, save_file

from samebits.evidence.capsule import read_capsule
from samebits.judge import judge_run
from samebits.recipe import arms, model

SCRIPT = """
import json, os, sys
from safetensors.torch import load_file
from vllm import LLM, SamplingParams

first, second = sys.argv[1:]
prompts = [{"prompt_token_ids": [(7 * i + j) % 64 for j in range(300)]} for i in range(2)]
greedy = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0, ignore_eos=True, detokenize=False)


def engine(folder):
    return LLM(
        folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=512, max_num_seqs=4,
        enable_prefix_caching=True, seed=0, additional_config={"cpu_keep_weights": True},
    )


def say(llm):
    answers = [request.outputs[0] for request in llm.generate(prompts, greedy, use_tqdm=False)]
    return [[step[token].logprob for token, step in zip(a.token_ids, a.logprobs, strict=True)] for a in answers]


def load(worker, file):
    worker.model_runner.model.load_weights(load_file(file).items())


synced = engine(first)
said = {"before": say(synced)}
synced.collective_rpc(load, args=(os.path.join(second, "model.safetensors"),))
said["kept"] = say(synced)
assert synced.reset_prefix_cache()
said["reset"] = say(synced)
said["fresh"] = say(engine(second))
print(json.dumps(said))
"""


def test_a_cache_that_outlives_the_sync_answers_for_the_old_weights(tmp_path: Path) -> None:
    model.write_model(tmp_path / "first", 0, model.config(1, 256))
    model.write_model(tmp_path / "second", 0, model.config(1, 256))
    file = tmp_path / "second" / "model.safetensors"
    save_file({name: tensor * 1.25 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    environment = {**arms.environment(1, os.environ), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "first"), str(tmp_path / "second")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    assert all(np.isfinite(values).all() for values in said.values())
    assert said["kept"] != said["fresh"], "the cache was not used: the test did not test"
    assert said["reset"] == said["fresh"] != said["before"]


@pytest.mark.parametrize("sync", [1, 2])
def test_a_run_whose_engine_answers_as_before_its_sync_fails(tmp_path: Path, sync: int) -> None:
    run = make_run(tmp_path / "run", 1)
    before = read_capsule(run / "capsules" / f"sync-{sync - 1:04d}").tensors["probe_log_probs"].read()

    def stale(meta: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["probe_log_probs"][:] = before

    rewrite(run, f"sync-{sync:04d}", stale)
    document = judge_run(run, "zero", BOUNDS)
    assert document["verdict"] == "fail"
    assert [r["where"] for r in document["reasons"]] == [f"sync theta{sync}"]
    assert "12 of 12 probe logprobs differ from a fresh engine's" in document["reasons"][0]["what"]
