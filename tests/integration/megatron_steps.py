"""Takes two training steps with Megatron Core's own classes on a CPU and saves what they computed.

    python megatron_steps.py OUT PACKAGES [--shims | --aligned]
OUT: folder for one `<case>.pt` a case. PACKAGES: the folder from which `megatron` has to come. With --shims an
unpatched Megatron Core runs: torch itself is told, for this process alone, to answer as if the CPU were a CUDA device.
With --aligned the aligned layer spec runs, in cases of its own, else the local one.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch

LAYERS, HIDDEN, FFN, HEADS, GROUPS, HEAD_DIM, VOCAB, SEQ, ROPE_BASE, EPS = 2, 256, 512, 4, 2, 64, 64, 32, 10000, 1e-6
MICRO_BATCHES, MICRO_BATCH, LEARNING_RATE, CLIP, SEED = 2, 3, 1e-3, 1.0, 1234


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train; the fields say how it departs from bf16 with the plain mixed-precision optimizer."""

    dtype: torch.dtype = torch.bfloat16
    distributed_optimizer: bool = False
    per_token_loss: bool = False
    count_zeros: bool = False
    recompute: Literal["full", "selective"] | None = None
    dropout: float = 0.0
    sharded_checkpoint: bool = False
    aligned: bool = False
    tied: bool = False


CASES = {
    "bf16": Case(),
    "bf16-distributed": Case(distributed_optimizer=True),
    "bf16-per-token": Case(per_token_loss=True, count_zeros=True),
    "fp32": Case(dtype=torch.float32),
    "fp32-distributed": Case(dtype=torch.float32, distributed_optimizer=True),
}
# No pair under shims: dropout draws from the tracker of random states, which is off there; recomputation runs inside of
# autograd and a sharded checkpoint in processes of its own, where torch's function modes do not reach.
PATCHED_CASES = {
    "bf16-recompute": Case(recompute="full"),
    "bf16-sharded-checkpoint": Case(sharded_checkpoint=True),
    "bf16-dropout": Case(dropout=0.1),
    "bf16-dropout-recompute": Case(dropout=0.1, recompute="full"),
}

ALIGNED_CASES = {
    "bf16": Case(aligned=True),
    "bf16-tied": Case(aligned=True, tied=True),
    "bf16-distributed": Case(aligned=True, distributed_optimizer=True),
    "bf16-recompute": Case(aligned=True, recompute="full"),
    "bf16-recompute-attention": Case(aligned=True, recompute="selective"),
    "bf16-sharded-checkpoint": Case(aligned=True, sharded_checkpoint=True),
    "fp32": Case(dtype=torch.float32, aligned=True),
    "fp32-tied": Case(dtype=torch.float32, aligned=True, tied=True),
}


class _CpuAnswersAsCuda(torch.overrides.TorchFunctionMode):
    """Moves every tensor that is asked for on "cuda" to the CPU and reports CUDA's names for tensor types."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        out = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(out, str):
            return out.replace("torch.", "torch.cuda.", 1)
        return out


def _multiply_by_columns() -> None:
    """Multiplies gradients [S, B, N] by BF16 weights as the patch does where oneDNN cannot: the bits depend on that."""
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    product = torch.Tensor.matmul

    def matmul(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        by_columns = one.dim() == 3 and two.dim() == 2 and two.dtype == torch.bfloat16
        return product(one, two.t().contiguous().t() if by_columns else two)

    torch.Tensor.matmul = matmul  # type: ignore[assignment,method-assign]


def batches() -> list[dict[str, torch.Tensor]]:
    """The micro batches of every step, tokens and labels int64 [MICRO_BATCH, SEQ]: the same ones, so the loss falls."""
    generator = torch.Generator().manual_seed(7)
    out = []
    for _ in range(MICRO_BATCHES):
        tokens = torch.randint(0, VOCAB, (MICRO_BATCH, SEQ + 1), generator=generator)
        out.append({"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()})
    return out


def _build(case: Case, shims: bool) -> tuple[Any, Any, Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module
    from megatron.core.utils import get_model_config

    if shims:
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    else:
        model_parallel_cuda_manual_seed(SEED, force_reset_rng=True)
    torch.manual_seed(SEED)
    bf16 = case.dtype is torch.bfloat16
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=HEAD_DIM,
        qk_layernorm=True,
        normalization="RMSNorm",
        layernorm_epsilon=EPS,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=case.dropout,
        attention_dropout=case.dropout,
        params_dtype=case.dtype,
        bf16=bf16,
        pipeline_dtype=case.dtype,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        calculate_per_token_loss=case.per_token_loss,
        recompute_granularity=case.recompute,
        recompute_method="uniform" if case.recompute == "full" else None,
        recompute_num_layers=1 if case.recompute == "full" else None,
        use_cpu_initialization=True,
    )
    spec: Any
    if case.aligned:
        from megatron.core.models.gpt.gpt_aligned_layer_specs import get_gpt_aligned_block_spec

        spec = get_gpt_aligned_block_spec(config)
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    model = GPTModel(
        config,
        spec,
        VOCAB,
        SEQ,
        position_embedding_type="rope",
        rotary_base=ROPE_BASE,
        share_embeddings_and_output_weights=case.tied,
    )
    with torch.no_grad():  # gains that start at one would hide a missing or doubled gain
        for name, parameter in model.named_parameters():
            if "layernorm" in name:
                parameter.add_(torch.randn(parameter.shape).to(parameter.dtype) * 0.1)
    wrapped = Float16Module(config, model) if bf16 else model
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=case.distributed_optimizer,
            overlap_grad_reduce=False,
            check_for_nan_in_grad=True,
        ),
        wrapped,
    )
    ddp.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            weight_decay=0.01,
            clip_grad=CLIP,
            bf16=bf16,
            params_dtype=case.dtype,
            use_distributed_optimizer=case.distributed_optimizer,
            log_num_zeros_in_grad=case.count_zeros,
        ),
        [ddp],
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=LEARNING_RATE,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=10,
        lr_decay_style="constant",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=10,
        wd_incr_style="constant",
    )
    training = get_model_config(ddp)
    training.grad_scale_func = optimizer.scale_loss
    training.finalize_model_grads_func = finalize_model_grads
    training.no_sync_func = ddp.no_sync
    return ddp, optimizer, scheduler


def _forward_step(case: Case, iterator: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(iterator)
    positions = torch.arange(SEQ).expand_as(batch["tokens"])
    forward = partial(model, input_ids=batch["tokens"], position_ids=positions, attention_mask=None)
    if case.aligned:
        from megatron.core.transformer.aligned.functions import selected_log_prob

        losses = -selected_log_prob(forward(), batch["labels"])
    else:
        losses = forward(labels=batch["labels"])

    def loss_func(output: torch.Tensor) -> tuple[Any, ...]:
        output = output.float()
        report = {"loss": output.detach().mean()}
        if case.per_token_loss:
            return output.sum(), torch.tensor(output.numel(), dtype=torch.int), report
        return output.mean(), report

    return losses, loss_func


def _train_step(case: Case, ddp: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    start = time.perf_counter()
    run = partial(
        get_forward_backward_func(),
        forward_step_func=partial(_forward_step, case),
        model=[ddp],
        num_microbatches=MICRO_BATCHES,
        seq_length=SEQ,
        micro_batch_size=MICRO_BATCH,
    )
    reports = run(data_iterator=iter(batches()), forward_only=False)
    gradients = {name: parameter.main_grad.clone() for name, parameter in ddp.module.named_parameters()}
    updated, grad_norm, zeros = optimizer.step()
    assert updated, "the optimizer refused the step"
    scheduler.step(1)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        after = run(data_iterator=iter(batches()), forward_only=True)
    return {
        "loss": torch.stack([report["loss"] for report in reports]).mean().item(),
        "loss_after": torch.stack([report["loss"] for report in after]).mean().item(),
        "grad_norm": float(grad_norm),
        "zeros": zeros,
        "seconds": seconds,
        "gradients": gradients,
        "parameters": {name: parameter.detach().clone() for name, parameter in ddp.module.named_parameters()},
        "mains": _mains(ddp),
    }


def _mains(ddp: Any) -> dict[str, torch.Tensor]:
    """FP32 main copy of each parameter; at one rank a distributed optimizer's shard is the whole, flat."""
    return {
        name: getattr(parameter, "main_param", parameter).detach().reshape(parameter.shape).clone()
        for name, parameter in ddp.module.named_parameters()
    }


def _sharded(ddp: Any, optimizer: Any, is_loading: bool) -> tuple[Any, Any, Any]:
    from megatron.core import dist_checkpointing
    from megatron.core.utils import unwrap_model

    model = unwrap_model(ddp)
    state = {"model": model.sharded_state_dict()}
    state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=is_loading)
    return dist_checkpointing, model, state


def _save(case: Case, folder: str, ddp: Any, optimizer: Any, scheduler: Any) -> None:
    if case.sharded_checkpoint:
        dist_checkpointing, _, state = _sharded(ddp, optimizer, is_loading=False)
        os.mkdir(f"{folder}/sharded")
        dist_checkpointing.save(state, f"{folder}/sharded")
    else:
        torch.save([ddp.state_dict(), optimizer.state_dict()], f"{folder}/state.pt")
    torch.save(scheduler.state_dict(), f"{folder}/scheduler.pt")


def _load(case: Case, folder: str, ddp: Any, optimizer: Any, scheduler: Any) -> None:
    if case.sharded_checkpoint:
        dist_checkpointing, model, state = _sharded(ddp, optimizer, is_loading=True)
        state = dist_checkpointing.load(state, f"{folder}/sharded")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    else:
        model_state, optimizer_state = torch.load(f"{folder}/state.pt", weights_only=False)
        ddp.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
    scheduler.load_state_dict(torch.load(f"{folder}/scheduler.pt", weights_only=False))


def run_case(case: Case, shims: bool) -> dict[str, Any]:
    """Two steps, and the second one again from the state saved after the first by a new model and optimizer."""
    ddp, optimizer, scheduler = _build(case, shims)
    out: dict[str, Any] = {"case": dataclasses.asdict(case)}
    out["initial"] = {name: parameter.detach().clone() for name, parameter in ddp.module.named_parameters()}
    out["initial_mains"] = _mains(ddp)
    out["optimizer"] = type(getattr(optimizer, "chained_optimizers", [optimizer])[0]).__name__
    out["steps"] = [_train_step(case, ddp, optimizer, scheduler)]
    with tempfile.TemporaryDirectory() as folder:
        resumes = not case.dropout and not case.distributed_optimizer  # see the message of the patch
        if resumes:
            _save(case, folder, ddp, optimizer, scheduler)
        out["steps"].append(_train_step(case, ddp, optimizer, scheduler))
        if resumes:
            resumed = _build(case, shims)
            _load(case, folder, *resumed)
            out["resumed"] = _train_step(case, *resumed)
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("packages", type=pathlib.Path)
    parser.add_argument("--shims", action="store_true")
    parser.add_argument("--aligned", action="store_true")
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        sys.exit("megatron_steps: this check is of a machine without CUDA; hide the devices by CUDA_VISIBLE_DEVICES=''")
    if arguments.shims:
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
        torch.cuda.current_stream = lambda device=None: None  # type: ignore[assignment,return-value]
        torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
        torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
        _CpuAnswersAsCuda().__enter__()
        _multiply_by_columns()
    import megatron.core
    from megatron.core import parallel_state

    origin = pathlib.Path(megatron.core.__file__).resolve()
    if not origin.is_relative_to(arguments.packages.resolve()):
        sys.exit(f"megatron_steps: megatron.core came from {origin}, not from {arguments.packages}")
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    parallel_state.initialize_model_parallel()
    arguments.out.mkdir(parents=True, exist_ok=True)
    cases = ALIGNED_CASES if arguments.aligned else CASES if arguments.shims else CASES | PATCHED_CASES
    for name, case in cases.items():
        torch.save(run_case(case, arguments.shims), arguments.out / f"{name}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
