"""A small, valid run, made of random numbers, that a test can then damage.

`make_run` writes what a run of three trainer steps leaves; `rewrite` changes one capsule and seals it again, as
a writer with a bug (or a liar) would.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from samebits.evidence import eventlog, provenance
from samebits.evidence.capsule import read_capsule, write_capsule

BOUNDS = {"qwen3-4x1024": {"max_abs": 0.25, "calibrated": "a unit test"}}
CONTRACT = {0: None, 1: "a contract"}
GROUPS, SAMPLES, PROMPT, RESPONSE = 4, 4, 9, 160
Change = Callable[[dict[str, Any], dict[str, Any]], None]


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def execution(arm: int = 0) -> dict[str, Any]:
    return {
        "schema": provenance.SCHEMA,
        "git_commit": "0123456789abcdef0123456789abcdef01234567",
        "git_dirty": False,
        "lock": {"name": "cpu.txt", "sha256": sha("lock")},
        "wheels": {
            "vllm-0.26.0+cpu.samebits.1-cp38-abi3-manylinux_2_35_x86_64.whl": sha("vllm"),
            "megatron_core-0.19.2+samebits.1-py3-none-any.whl": sha("megatron"),
            "verl-0.9.1+samebits.1-py3-none-any.whl": sha("verl"),
        },
        "versions": {"torch": "2.11.0", "vllm": "0.26.0+cpu.samebits.1", "verl": "0.9.1+samebits.1"},
        "python": "3.12.1",
        "device": "cpu",
        "device_name": "A processor",
        "instruction_set": ["avx2", "avx512_bf16", "avx512f"],
        "contract": CONTRACT[arm],
        "kernels": {"torch_cpu_capability": "AVX512", "torch_onednn": "v3.10.2"},
        "threads": 2,
        "runner": "v1",
        "switches": {"VLLM_BATCH_INVARIANT": str(arm)},
        "config_sha256": sha("config"),
        "arm": arm,
        "model": {"name": "qwen3-4x1024", "seed": 7, "tokenizer_sha256": sha("tokenizer"), "layers": 4, "hidden": 1024},
        "command": ["samebits", "run", "rl", "--arm", str(arm), "--steps", "3", "--out", "RUN"],
    }


def step(k: int, arm: int, rng: np.random.Generator, rows: int = SAMPLES) -> tuple[dict[str, Any], dict[str, Any]]:
    """(meta, tensors) of step k: a quarter of the logprobs differ at arm 0, none at arm 1."""
    n = GROUPS * rows
    length = rng.integers(3, RESPONSE + 1, n)
    length[0] = RESPONSE
    valid = np.arange(RESPONSE) < length[:, None]
    rollout = np.where(valid, -rng.exponential(1.0, (n, RESPONSE)), 0).astype(np.float32)
    noise = np.ldexp(1.0, rng.integers(-20, -4, (n, RESPONSE))) * (rng.random((n, RESPONSE)) < 0.25) * (arm == 0)
    other = np.where(valid, rollout - noise, 0).astype(np.float32)
    reward = (rng.random(n) < 0.5).astype(np.float32)
    group = np.repeat(np.arange(GROUPS), rows)
    reward[::rows], reward[1::rows] = 0, 1
    advantage = reward - np.array([reward[group == g].mean() for g in group], np.float32)
    tensors = {
        "prompts": rng.integers(0, 30, (n, PROMPT)),
        "prompt_length": np.full(n, PROMPT),
        "responses": rng.integers(0, 30, (n, RESPONSE)),
        "valid": valid,
        "rollout": rollout,
        "recompute": other,
        "actor": other.copy(),
        "advantages": np.where(valid, advantage[:, None], 0).astype(np.float32),
        "reward": reward,
        "group": group,
        "seed": rng.permutation(1000)[:n],
        "order": rng.permutation(n),
    }
    update = {
        "from": f"theta{k - 1}",
        "to": f"theta{k}",
        "grad_norm": 0.37 + k / 10,
        "parameters": 1000,
        "changed_parameters": 998,
        "masters": 1000,
        "changed_masters": 240,
        "update_rms": 1e-5,
        "learning_rate": 1e-5,
    }
    meta = {
        "schema": "samebits.capsule/1",
        "kind": "step",
        "step": k,
        "weights": f"theta{k - 1}",
        "bypass": False,
        "execution": execution(arm),
        "update": update,
    }
    return meta, tensors


def sync(kind: str, k: int, arm: int) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(100 + k)
    weights = {
        f"model.layers.{i}.weight": {"dtype": "bfloat16", "shape": [8, 4], "sha256": sha(f"{k} {i}")} for i in range(3)
    }
    meta = {
        "schema": "samebits.capsule/1",
        "kind": kind,
        "sync": k,
        "weights": f"theta{k}",
        "execution": execution(arm),
    }
    if kind == "sync":
        meta |= {"contracts": {"trainer": CONTRACT[arm], "rollout": CONTRACT[arm]}, "exported": weights}
    else:
        meta["contract"] = CONTRACT[arm]
    meta["loaded"] = dict(weights)
    begin, end = np.array([2, 3, 4]), np.array([8, 7, 6])
    position = np.arange(8)
    response = (position >= begin[:, None]) & (position < end[:, None])
    tensors = {
        "probe_tokens": rng.integers(0, 30, (3, 8)),
        "probe_length": end,
        "probe_prompt_length": begin,
        "probe_log_probs": np.where(response, -rng.exponential(1.0, (3, 8)), 0).astype(np.float32),
    }
    return meta, tensors


def make_run(run: Path, arm: int = 0, rows: int = SAMPLES, steps: int = 3) -> Path:
    """Write a run that passes: claim observe at arm 0, zero at arm 1."""
    rng = np.random.default_rng(arm)
    provenance.write(run / "execution.json", execution(arm))
    (run / "config.json").write_text("config")
    eventlog.append(run / "events.jsonl", "start", arm=arm)
    (run / "capsules").mkdir()
    for k in range(steps):
        for kind in ("sync", "fresh"):
            write_capsule(run / f"capsules/{kind}-{k:04d}", *sync(kind, k, arm))
        write_capsule(run / f"capsules/step-{k + 1:04d}", *step(k + 1, arm, rng, rows))
    for event in ("trained", "probed"):
        eventlog.append(run / "events.jsonl", event)
    return run


def rewrite(run: Path, name: str, change: Change, to: str | None = None) -> None:
    """Let `change(meta, tensors)` edit capsule `name` and seal it again, as `to` if given."""
    folder = run / "capsules" / name
    capsule = read_capsule(folder)
    tensors = {key: tensor.read().copy() for key, tensor in capsule.tensors.items()}
    meta = capsule.meta
    change(meta, tensors)
    shutil.rmtree(folder)
    write_capsule(run / "capsules" / (to or name), meta, tensors)


def reseal(folder: Path) -> None:
    """Make SHA256SUMS fit whatever lies in the folder now."""
    files = sorted(p for p in folder.iterdir() if p.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in files]
    (folder / "SHA256SUMS").write_text("".join(lines))


def half_true(run: Path) -> None:
    """Put a byte that is neither 0 nor 1 into the valid mask of step 1."""
    folder = run / "capsules/step-0001"
    valid = load_file(folder / "tensors.safetensors")["valid"].tobytes()
    content = (folder / "tensors.safetensors").read_bytes()
    assert content.count(valid) == 1
    (folder / "tensors.safetensors").write_bytes(content.replace(valid, b"\x02" + valid[1:]))
    reseal(folder)
