# SPDX-License-Identifier: Apache-2.0
"""VLLM_BATCH_INVARIANT=1 on the CPU: loads the operators, shows them to torch.compile, refuses what has none.

Every floating-point operation from the embedding to the logprobs is one operator of `torch.ops.batch_invariant`, whose
bits for a row depend on that row alone, but for one: the sampler divides the logits by the request's temperature with
torch, in FP32, element by element and as IEEE rounds. A model or a setting that needs another operation is refused at
start, a request with a penalty, a bias or min-p when it comes. The table of cosines and sines is made once, by torch.

Masks (top-k, top-p, allowed and bad words, a grammar) compute no logit: they set some to minus infinity, and processed
logprobs are of what is left. Which ones top-p takes, and which token is drawn, torch decides, a row at a time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.model import LogprobsMode
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams

LIBRARY = Path(__file__).parents[2] / "batch_invariant_cpu.so"
CONTRACT = "batch-invariant-cpu-1"
DTYPES = (torch.bfloat16, torch.float32)
# Models whose own forward, between the layers, was read and tested to compute nothing.
ARCHITECTURES = ("Qwen3ForCausalLM",)
# What of a request changes its logits by arithmetic, and the value that leaves them as they are.
PLAIN_SAMPLING = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "logit_bias": None,
}

_shown_to_compile = False


def refuse(what: str, remedy: str) -> NoReturn:
    """Raise the error of everything that the contract has no operator for."""
    raise ValueError(
        f"VLLM_BATCH_INVARIANT=1 on a CPU: {what}. Remedy: {remedy}, or unset VLLM_BATCH_INVARIANT."
    )


def enable() -> None:
    """Load the library and register the operators' shapes with torch.compile. Harmless if done again.

    Raises:
        ValueError: the library is missing, does not load, or is of another contract.
    """
    # Graphs compiled ahead of time are found again by a key that does not hold the library.
    os.environ["VLLM_USE_AOT_COMPILE"] = "0"
    if not hasattr(torch.ops.batch_invariant, "linear"):
        if not LIBRARY.exists():
            refuse(f"there is no {LIBRARY}", "install the vLLM wheel that holds it")
        try:
            torch.ops.load_library(str(LIBRARY))
        except OSError as error:
            refuse(f"{LIBRARY} does not load ({error})", "use an x86-64 processor with AVX2 and FMA")
    name = torch.ops.batch_invariant.contract()
    if name.partition(" ")[0] != CONTRACT:
        refuse(f"{LIBRARY} is of the contract {name!r}, this vLLM of {CONTRACT!r}", "install vLLM's wheel anew")
    _show_to_compile()


def _show_to_compile() -> None:
    """Register the shapes and dtypes that the operators return: all that a compiler may know of them."""
    global _shown_to_compile
    if _shown_to_compile:
        return
    _shown_to_compile = True

    def like(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(x.shape)  # contiguous, whatever the strides of `x`

    @torch.library.register_fake("batch_invariant::linear")
    def _(x, weight, bias=None):
        return x.new_empty((*x.shape[:-1], weight.shape[0]))

    @torch.library.register_fake("batch_invariant::rms_norm")
    def _(x, weight, epsilon):
        return like(x)

    @torch.library.register_fake("batch_invariant::add_rms_norm")
    def _(x, residual, weight, epsilon):
        return like(x), like(x)

    @torch.library.register_fake("batch_invariant::rotary_embedding")
    def _(positions, query, key, head_size, cos_sin_cache):
        return like(query), like(key)

    @torch.library.register_fake("batch_invariant::silu_and_mul")
    def _(x):
        return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))

    @torch.library.register_fake("batch_invariant::log_softmax")
    def _(logits):
        return logits.new_empty(logits.shape, dtype=torch.float32)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What a layer calls in place of its packed weight: reads `weight` where it was loaded."""
    return torch.ops.batch_invariant.linear(x, weight, bias)


def sample(
    logits: torch.Tensor,
    generators: dict[int, torch.Generator],
    k: torch.Tensor | None,
    p: torch.Tensor | None,
    logprobs_mode: LogprobsMode,
    use_fp64_gumbel: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sampled token ids, and the processed logits or logprobs if `logprobs_mode` asks for them.

    The logprobs are taken before the softmax that the choice is made by, so nothing of the choice is in them. Top-k,
    top-p, softmax and the choice are torch's, row by row. A request with a seed draws from its own generator whatever is
    beside it; the default path draws from it only if every request of the batch has one.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch, random_sample

    if k is not None or p is not None:
        logits = apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)
    processed = None
    if logprobs_mode == "processed_logits":
        processed = logits
    elif logprobs_mode == "processed_logprobs":
        processed = torch.ops.batch_invariant.log_softmax(logits)
    probs = logits.softmax(dim=-1, dtype=torch.float32)
    return random_sample(probs, generators, use_fp64_gumbel), processed


def check_config(config: VllmConfig) -> None:
    """Refuse the settings that leave the contract.

    Raises:
        ValueError: names the setting and the remedy.
    """
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    if not LIBRARY.exists() and not hasattr(torch.ops.batch_invariant, "linear"):
        refuse(f"there is no {LIBRARY}", "install the vLLM wheel that holds it")
    ranks = {
        "tensor": parallel.tensor_parallel_size,
        "pipeline": parallel.pipeline_parallel_size,
        "prefill context": parallel.prefill_context_parallel_size,
        "decode context": parallel.decode_context_parallel_size,
    }
    for name, size in ranks.items():
        if size > 1:
            refuse(f"{name} parallelism of {size} is not in the contract", "use one rank")
    if config.lora_config is not None:
        refuse("LoRA has no operator in the contract", "merge the adapter into the weights")
    if config.speculative_config is not None:
        refuse("speculative decoding is not in the contract", "run without it")
    if config.kv_transfer_config is not None:
        refuse("the KV transfer writes another cache layout", "run without a KV connector")
    if config.use_v2_model_runner:
        refuse("model runner V2 takes its logprobs from another kernel", "set VLLM_USE_V2_MODEL_RUNNER=0")
    if model is None:
        return
    if model.runner_type != "generate":
        refuse(f"a {model.runner_type} model has no operators in the contract", "serve a generating model")
    if model.architecture not in ARCHITECTURES:
        refuse(f"{model.architecture} is not in the contract", f"serve one of {', '.join(ARCHITECTURES)}")
    if model.dtype not in DTYPES:
        refuse(f"{model.dtype} is not in the contract", "use --dtype bfloat16 or float32")
    if model.quantization is not None:
        refuse(f"{model.quantization} weights have no operator in the contract", "use a checkpoint in bfloat16")
    if model.logits_processors:
        refuse("logits processors of one's own are not in the contract", "serve without logits_processors")
    if model.head_dtype != model.dtype:
        refuse(f"an output layer in {model.head_dtype} is not in the contract", "leave head_dtype unset")
    if cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        refuse(f"a KV cache in {cache.cache_dtype} is not in the contract", "use --kv-cache-dtype auto")


def check_request(params: SamplingParams | PoolingParams) -> None:
    """Refuse a request whose logits the sampler would compute anew.

    Raises:
        ValueError: names the parameter, its value and the remedy.
    """
    for name, plain in PLAIN_SAMPLING.items():
        value = getattr(params, name, plain)
        if value != plain and value != {}:
            remedy = f"send the request with {name}={plain}, which a generation_config.json may set otherwise"
            refuse(f"{name}={value} has no operator in the contract", remedy)


def check_model(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Refuse a model that has a layer of which no operator of the contract is the whole arithmetic.

    Containers pass; a module that holds parameters, dispatches an operator or has no children must be one known here. To
    be called after the weights are processed, which is when a layer is given the product that it calls.

    Raises:
        ValueError: names the layer, its class and the remedy.
    """
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    within_rotary: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name.startswith(within_rotary):
            continue
        parameters = list(module.parameters(recurse=False))
        why = ""
        if isinstance(module, LinearBase):
            if type(module.quant_method) is not UnquantizedLinearMethod:
                why = f"its method is {type(module.quant_method).__name__}"
            elif getattr(module, "cpu_linear", None) is not linear:
                why = "the product that it was given is not the contract's"
        elif isinstance(module, VocabParallelEmbedding):
            if type(module.quant_method) is not UnquantizedEmbeddingMethod:
                why = f"its method is {type(module.quant_method).__name__}"
            elif getattr(module, "cpu_linear", None) is not linear:  # tied, it is the output layer
                why = "the product that it was given is not the contract's"
        elif type(module) is RMSNorm:
            if not module.has_weight or module.variance_size_override is not None:
                why = "only a weighted norm over the whole row has one"
        elif isinstance(module, RotaryEmbedding):
            within_rotary += (f"{name}.",)
            if not _is_plain_rotary(module):
                why = "only rotation of whole heads in halves has one"
        elif isinstance(module, LogitsProcessor):
            if module.scale != 1.0 or module.soft_cap is not None or module.logits_as_input:
                why = "logits are scaled or capped"
        elif type(module) not in (SiluAndMul, Attention):
            if isinstance(module, CustomOp) or parameters or not any(True for _ in module.children()):
                why = "no operator is its arithmetic"
        if why:
            refuse(
                f"layer {name!r}, a {type(module).__name__}, has no operator in the contract: {why}",
                "serve a dense model of the Qwen3 kind, unquantized",
            )
        for parameter in parameters:
            if parameter.dtype != dtype:
                refuse(
                    f"layer {name!r} holds a parameter in {parameter.dtype}, the model is in {dtype}", "use one dtype"
                )


def _is_plain_rotary(module: torch.nn.Module) -> bool:
    """Whether `module` differs from the plain rotary embedding by its table of cosines and sines at most."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    return (
        type(module).forward_native is RotaryEmbedding.forward_native
        and type(module).forward_cpu is RotaryEmbedding.forward_cpu
        and module.is_neox_style
        and module.rotary_dim == module.head_size
        and module.cos_sin_cache.shape[-1] == module.head_size
    )
