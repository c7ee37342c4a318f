"""verl's engine and vLLM's in one process on a card: do they say the same? `python aligned_on_cuda.py OUT`, a minute.

VLLM_BATCH_INVARIANT says which arm. What vLLM sampled is scored by the trainer's layers, with and without gradients;
at 1 each logprob must be vLLM's, bit for bit, at 0 they must be near. Then one backward: every parameter has a finite
gradient.
OUT/quick.json keeps the figures. It needs no Ray, so it finds most faults of an installation first.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from types import SimpleNamespace

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VERL_ENGINE_VENDOR": "aligned",
}
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")

import torch
from transformers import AutoConfig

from samebits.recipe import inputs, model, task
from vllm import LLM, SamplingParams

NEAR = 0.1  # of two bf16 forwards by different kernels
BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"quick: {time.monotonic() - BEGAN:.0f}s {text}", flush=True)


def sampled(folder: pathlib.Path) -> list[tuple[list[int], list[int], list[float]]]:
    """(prompt, response, logprobs) of sixteen requests served together by vLLM."""
    engine = LLM(
        str(folder),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        gpu_memory_utilization=0.2,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=False,
    )
    words = model.tokenizer()
    questions = [question for question, _ in task.examples(16, 5)]
    prompts = [
        list(words.apply_chat_template(inputs._messages(q), add_generation_prompt=True)["input_ids"]) for q in questions
    ]
    asked = [SamplingParams(temperature=1.0, max_tokens=24 + n, logprobs=0, seed=n, ignore_eos=True) for n in range(16)]
    answers = engine.generate([{"prompt_token_ids": p} for p in prompts], asked, use_tqdm=False)
    said = []
    for prompt, answer in zip(prompts, answers, strict=True):
        one = answer.outputs[0]
        log_probs = [at[token].logprob for at, token in zip(one.logprobs, one.token_ids, strict=True)]
        said.append((prompt, list(one.token_ids), log_probs))
    return said


def main(out: pathlib.Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    arm = int(os.environ.get("VLLM_BATCH_INVARIANT", "0"))
    folder = out / "model"
    model.write_model(folder, 0, model.config(2, 1024, 128))
    rows = sampled(folder)
    say(f"vLLM sampled {sum(len(r) for _, r, _ in rows)} tokens")

    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.megatron.local_spec_impl import MegatronLocalSpecEngine

    assert EngineRegistry.get_engine_cls("language_model", "megatron") is MegatronLocalSpecEngine
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl", rank=0, world_size=1, store=torch.distributed.HashStore())
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    engine = object.__new__(MegatronLocalSpecEngine)
    engine.model_config = SimpleNamespace(hf_config=AutoConfig.from_pretrained(folder), local_path=str(folder))
    engine.engine_config = SimpleNamespace(
        dtype="bfloat16", forward_only=True, override_ddp_config={}, entropy_from_logits_with_chunking=False
    )
    engine.optimizer_config = None
    engine._build_tf_config()
    assert engine.is_aligned == bool(arm)
    engine.module = engine._build_megatron_module()
    say("the trainer's model is built and loaded")
    names = dict(engine.bridge.export_weights(engine.module))
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(p + r) for p, r, _ in rows], batch_first=True).cuda()
    positions = torch.arange(tokens.shape[1], device="cuda").expand_as(tokens)
    figures: dict[str, object] = {"arm": arm, "device": torch.cuda.get_device_name(), "tensors": len(names)}
    if arm:
        from verl.utils.log_prob_record import contract_name

        figures["contract"] = contract_name()
    wrong = []
    for path in ("recompute", "actor"):
        with torch.set_grad_enabled(path == "actor"):
            logits = engine.module[0](input_ids=tokens, position_ids=positions)
            scored = engine._lm_head_logits_processor(
                logits,
                tokens.roll(-1, dims=1),
                torch.ones(tokens.shape, device="cuda"),
                calculate_sum_pi_squared=False,
                calculate_entropy=path == "recompute",
                distillation_use_topk=False,
                distillation_only=False,
                logits_processor_func=None,
                batch=None,
                data_format="bshd",
            )["log_probs"]
        differ, compared, largest = 0, 0, 0.0
        for row, (prompt, response, log_probs) in enumerate(rows):
            ours = scored[row, len(prompt) - 1 : len(prompt) - 1 + len(response)].detach().float().cpu()
            theirs = torch.tensor(log_probs, dtype=torch.float32)
            assert ours.isfinite().all() and theirs.isfinite().all()
            differ += int((ours.view(torch.int32) != theirs.view(torch.int32)).sum())
            compared += len(response)
            largest = max(largest, float((ours - theirs).abs().max()))
        figures[path] = {"differ": differ, "compared": compared, "largest": largest}
        say(f"{path}: {differ} of {compared} logprobs differ, largest difference {largest:g}")
        if compared == 0 or (differ if arm else largest > NEAR):
            wrong.append(path)
    scored.sum().backward()
    without = [
        name
        for name, parameter in engine.module[0].named_parameters()
        if parameter.grad is None or not parameter.grad.isfinite().all() or not parameter.grad.any()
    ]
    figures["parameters without a finite gradient"] = without
    say(f"backward: {len(without)} parameters without a finite gradient")
    (out / "quick.json").write_text(json.dumps(figures, indent=1) + "\n")
    if wrong or without:
        sys.exit(f"wrong: {', '.join([*wrong, *without])}")
    say("right")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
