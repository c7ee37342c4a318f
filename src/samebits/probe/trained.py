"""A small Megatron Core model of the aligned layer spec in training on this process's CPU, and what its backward did.

Its own DistributedDataParallel and optimizer take the steps. `recording` keeps, of each call of an operator, its
inputs, the cotangents that came to its outputs and the gradients that it gave: problems of layer 1, with their answers.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from samebits.judge import modules, updates
from samebits.judge.modules import EPSILON, MODULES
from samebits.judge.updates import AdamW
from samebits.judge.vjp import Bridge, Candidate, Outputs, Problem, Tensors, visible_with_surrogate

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that there is no Transformer Engine and no Apex
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_aligned_layer_specs import get_gpt_aligned_block_spec
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.aligned import functions
    from megatron.core.transformer.module import Float16Module
    from megatron.core.utils import get_model_config

# The operators that are recorded, and the names of their tensors and constants by `samebits.judge.modules`.
OPERATORS: dict[str, tuple[str, ...]] = {
    "linear": ("x", "weight"),
    "rms_norm": ("x", "weight", "epsilon"),
    "rotary_embedding": ("query", "key", "positions", "table"),
    "silu_and_mul": ("x",),
    "attention": ("query", "key", "value", "scale"),
    "selected_log_prob": ("logits", "index"),
}
ADAM = AdamW(learning_rate=1e-3, beta1=0.9, beta2=0.95, epsilon=1e-8, clip=1.0)
WEIGHT_DECAY = 0.01


@dataclasses.dataclass(frozen=True)
class Shape:
    """A small dense Qwen3 and its batches: micro batches of [batch, length] tokens. aligned: its layer spec, else the
    local one."""

    dtype: torch.dtype = torch.bfloat16
    tied: bool = False
    aligned: bool = True
    recompute: Literal["full", "selective"] | None = None
    layers: int = 2
    hidden: int = 128
    ffn: int = 160
    heads: int = 2
    groups: int = 1
    head: int = 64
    vocabulary: int = 97
    length: int = 24
    batch: int = 2
    micro_batches: int = 2


@dataclasses.dataclass(frozen=True)
class Batch:
    """tokens, labels: int64 [micro batches, B, S]. weights: FP32 like them, a label's share of the loss, in all one."""

    tokens: Tensor
    labels: Tensor
    weights: Tensor


@contextmanager
def one_rank() -> Iterator[None]:
    """Megatron's process groups of this process alone."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


class Trainer:
    """A model, Megatron's DDP around it and its optimizer. `batch`: of the next step, random tokens at first."""

    def __init__(self, shape: Shape, seed: int = 5):
        self.shape = shape
        torch.manual_seed(seed)
        bf16 = shape.dtype is torch.bfloat16
        self.config = TransformerConfig(
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            ffn_hidden_size=shape.ffn,
            num_attention_heads=shape.heads,
            num_query_groups=shape.groups,
            kv_channels=shape.head,
            qk_layernorm=True,
            normalization="RMSNorm",
            layernorm_epsilon=EPSILON,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=shape.dtype,
            bf16=bf16,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            apply_rope_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            recompute_granularity=shape.recompute,
            recompute_method="uniform" if shape.recompute == "full" else None,
            recompute_num_layers=1 if shape.recompute == "full" else None,
            use_cpu_initialization=True,
        )
        spec: Any = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
        if shape.aligned:
            spec = get_gpt_aligned_block_spec(self.config)
        self.model = GPTModel(
            self.config,
            spec,
            shape.vocabulary,
            512,
            position_embedding_type="rope",
            rotary_base=int(modules.BASE),
            share_embeddings_and_output_weights=shape.tied,
        )
        with torch.no_grad():  # the same of either spec; gains of one would hide a gain that is missing or there twice
            for name, parameter in sorted(self.model.named_parameters()):
                drawn = torch.randn(parameter.shape)
                parameter.copy_(1 + 0.1 * drawn if "layernorm" in name else 0.026 * drawn)
        wrapped = Float16Module(self.config, self.model) if bf16 else self.model
        self.ddp = DistributedDataParallel(
            self.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False), wrapped
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=ADAM.learning_rate,
                adam_beta1=ADAM.beta1,
                adam_beta2=ADAM.beta2,
                adam_eps=ADAM.epsilon,
                weight_decay=WEIGHT_DECAY,
                clip_grad=ADAM.clip,
                bf16=bf16,
                params_dtype=shape.dtype,
            ),
            [self.ddp],
        )
        get_model_config(self.ddp).finalize_model_grads_func = finalize_model_grads
        size = (shape.micro_batches, shape.batch, shape.length + 1)
        drawn = torch.randint(0, shape.vocabulary, size, generator=torch.Generator().manual_seed(seed + 1))
        labels = drawn[..., 1:].contiguous()
        self.batch = Batch(drawn[..., :-1].contiguous(), labels, torch.full(labels.shape, 1.0 / labels.numel()))

    def log_probs(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """tokens and labels int64 [B, S] -> FP32 log-probabilities [B, S]."""
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        if self.shape.aligned:
            logits = self.ddp(input_ids=tokens, position_ids=positions, attention_mask=None)
            return functions.selected_log_prob(logits, labels)
        return -self.ddp(input_ids=tokens, position_ids=positions, attention_mask=None, labels=labels)

    def backward(self) -> float:
        """The gradients of the mean loss over all micro batches, added up in the FP32 `main_grad`; that loss."""
        total = 0.0
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        batch = self.batch
        for i, (tokens, labels, weights) in enumerate(zip(batch.tokens, batch.labels, batch.weights, strict=True)):
            with torch.enable_grad():
                loss = -(self.log_probs(tokens, labels) * weights).sum()
            total += loss.item()
            if i + 1 < len(batch.tokens):
                with self.ddp.no_sync():
                    loss.backward()
            else:
                loss.backward()
        finalize_model_grads([self.ddp])
        return total

    def step(self) -> dict[str, Tensor | None]:
        """One step of Megatron's optimizer: the gradients that Adam took."""

        def whole() -> None:
            updated, _, _ = self.optimizer.step()
            assert updated, "the optimizer refused the step"

        return updates.taken(self.adam, self.mains, whole)

    def gradients(self) -> Tensors:
        """What the backward added up in FP32, before clipping."""
        grads: dict[str, Any] = dict(self.model.named_parameters())
        return {name: p.main_grad.clone() for name, p in grads.items()}

    @property
    def adam(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])[0].optimizer

    @property
    def mains(self) -> Tensors:
        """The FP32 main of each parameter; an FP32 parameter is its own."""
        found: dict[str, Any] = dict(self.model.named_parameters())
        return {name: p if p.dtype == torch.float32 else p.main_param for name, p in found.items()}

    def problem(self, case: str) -> Problem:
        """The whole model as one problem: the gradients of all its parameters by the mean loss of all micro batches."""
        shape = self.shape
        batch = self.batch
        tokens, labels, weights = (t.flatten(0, 1) for t in (batch.tokens, batch.labels, batch.weights))
        constants = {
            "tokens": tokens,
            "labels": labels,
            "table": modules.rope_table(tokens.shape[1], shape.head, shape.dtype),
            "layers": shape.layers,
            "heads": shape.heads,
            "groups": shape.groups,
            "epsilon": EPSILON,
        }
        inputs = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        reduction = max(labels.numel(), shape.vocabulary, 2 * shape.ffn, shape.hidden)
        name = "model, tied" if shape.tied else "model"
        return Problem(
            name, case, shape.dtype, inputs, constants, "recorded", (-weights,), modules.model, reduction, visible()
        )


def visible() -> dict[str, Callable[..., Outputs]]:
    """The forwards of the aligned functions, by the names that the surrogates of composites use."""

    def rotate(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        return functions.rotary_embedding(x, x, positions, table)[0]

    names = ("linear", "rms_norm", "silu_and_mul", "attention")
    return {**{name: getattr(functions, name) for name in names}, "rotate": rotate, "add": torch.add}


@dataclasses.dataclass
class Call:
    """One call of an operator in a module of the model: what went in, what came back to its outputs, what it gave."""

    module: str
    operator: str
    inputs: Tensors
    constants: dict[str, Any]
    cotangents: list[Tensor | None]
    gradients: dict[str, Tensor | None]

    @property
    def problem(self) -> Problem:
        """The call as a problem of layer 1; the backward must have run. ValueError if it came to no output."""
        came = tuple(one for one in self.cotangents if one is not None)
        if len(came) != len(self.cotangents):
            raise ValueError(f"{self.module}: {self.operator}: the backward did not reach its outputs")
        sizes = [size for t in self.inputs.values() for size in (t.shape[-1], t.numel() // t.shape[-1])]
        dtype = next(iter(self.inputs.values())).dtype
        return Problem(
            self.operator, self.module, dtype, self.inputs, self.constants, "recorded", came,
            MODULES[self.operator].surrogate, max(sizes),
        )  # fmt: skip


Plant = Callable[[str, str], Candidate | None]


@contextmanager
def recording(model: torch.nn.Module, plant: Plant | None = None) -> Iterator[list[Call]]:
    """Keeps every call of an operator under `model` and after it, under the name "loss".

    plant: for a module's name and an operator, what its backward shall be instead, or None; the forward's bits stay.
    """
    calls: list[Call] = []
    stack, handles = ["loss"], []
    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: stack.append(name)))
            handles.append(module.register_forward_hook(lambda *_: stack.pop() and None))

    def wrap(operator: str, original: Callable[..., Outputs]) -> Callable[..., Outputs]:
        def call(*given: Any) -> Outputs:
            if not torch.is_grad_enabled():
                return original(*given)
            # A view of each input, so that its gradient is of this use alone.
            used = [t.view_as(t) if isinstance(t, Tensor) and t.requires_grad else t for t in given]
            inputs, constants = _named(operator, used)
            outs = original(*used)
            if plant and (wrong := plant(stack[-1], operator)):
                outs = _with_backward(outs, wrong(inputs, constants))
            flat = outs if isinstance(outs, tuple) else (outs,)
            saved = {n: t.detach().clone() for n, t in inputs.items()}
            made = Call(stack[-1], operator, saved, constants, [None] * len(flat), dict.fromkeys(inputs))
            for i, out in enumerate(flat):
                out.register_hook(lambda grad, i=i: made.cotangents.__setitem__(i, grad.detach().clone()))
            for n, t in inputs.items():
                t.register_hook(lambda grad, n=n: made.gradients.__setitem__(n, grad.detach().clone()))
            calls.append(made)
            return outs

        return call

    try:
        with _replaced(wrap):
            yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def substituted() -> Iterator[None]:
    """Every operator's backward is its surrogate's, in FP64; the forwards' bits stay: seed 000's gradient reference."""

    def wrap(operator: str, original: Callable[..., Outputs]) -> Callable[..., Outputs]:
        def call(*given: Any) -> Outputs:
            with torch.no_grad():
                outs = original(*given)
            if not torch.is_grad_enabled():
                return outs
            inputs, constants = _named(operator, given)
            flat = outs if isinstance(outs, tuple) else (outs,)
            wide = {n: t.double() for n, t in inputs.items()}
            values = MODULES[operator].surrogate(wide, constants, Bridge(flat[0].dtype, {}))
            values = values if isinstance(values, tuple) else (values,)
            shown = tuple(
                visible_with_surrogate(out, value.to(out.dtype)) for out, value in zip(flat, values, strict=True)
            )
            return shown if isinstance(outs, tuple) else shown[0]

        return call

    with _replaced(wrap):
        yield


@contextmanager
def _replaced(wrap: Callable[[str, Callable[..., Outputs]], Callable[..., Outputs]]) -> Iterator[None]:
    """Every operator of the aligned layers is what `wrap` makes of its name and itself."""
    originals = {name: getattr(functions, name) for name in OPERATORS}
    try:
        for name, original in originals.items():
            setattr(functions, name, wrap(name, original))
        yield
    finally:
        for name, original in originals.items():
            setattr(functions, name, original)


def _named(operator: str, given: Sequence[Any]) -> tuple[Tensors, dict[str, Any]]:
    """An operator's arguments by the names of `samebits.judge.modules`: what takes a gradient, and the rest."""
    named = dict(zip(OPERATORS[operator], given, strict=True))
    inputs = {n: t for n, t in named.items() if isinstance(t, Tensor) and t.requires_grad}
    return inputs, {"prefix": 0, **{n: t for n, t in named.items() if n not in inputs}}


def _with_backward(outs: Outputs, wrong: Outputs) -> Outputs:
    if isinstance(outs, tuple):
        assert isinstance(wrong, tuple)
        return tuple(visible_with_surrogate(o.detach(), w) for o, w in zip(outs, wrong, strict=True))
    assert isinstance(wrong, Tensor)
    return visible_with_surrogate(outs.detach(), wrong.view(outs.shape))
