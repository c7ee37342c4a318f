"""The aligned layer spec: a dense Qwen3 whose forward is the serving engine's, bit for bit.

`GPTModel(config, get_gpt_aligned_block_spec(config), ...)` differs from the local spec in the modules alone; the names of
parameters and their checkpoints are the same. What has no row in the contract of the operators is refused here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.transformer.aligned.functions import load_operators
from megatron.core.transformer.aligned.modules import (
    AlignedColumnParallelLinear,
    AlignedCoreAttention,
    AlignedMLP,
    AlignedRMSNorm,
    AlignedRowParallelLinear,
    AlignedSelfAttention,
)
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

# What the contract has rows for, by the device that its name begins with.
ROWS = {
    "batch-invariant-cpu": ((64, 128), (torch.bfloat16, torch.float32)),
    "batch-invariant-cuda": ((128,), (torch.bfloat16,)),
}

# Each field of the config that changes what is computed, and the only value that is computed here. A field that a version
# does not have cannot be set in it.
PLAIN: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "sequence_parallel": False,
    "num_moe_experts": None,
    "mtp_num_layers": None,
    "multi_latent_attention": False,
    "experimental_attention_variant": None,
    "enable_hyper_connections": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "qk_layernorm": True,
    "qk_l2_norm": False,
    "qk_clip": False,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "fp32_residual_connection": False,
    "apply_residual_connection_post_layernorm": False,
    "attention_output_gate": False,
    "head_wise_attn_gate": False,
    "apply_query_key_layer_scaling": False,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "window_size": None,
    "rotary_interleaved": False,
    "rotary_base_per_layer": None,
    "no_rope_freq": None,
    "use_mup": False,
    "fp8": None,
    "fp4": None,
    "cpu_offloading": False,
    "fine_grained_activation_offloading": False,
    "defer_embedding_wgrad_compute": False,
    "gradient_accumulation_fusion": False,
    "cross_entropy_loss_fusion": False,
    "batch_invariant_mode": False,
}


def _refuse(wrong: list[str]) -> None:
    if wrong:
        raise NotImplementedError(
            "the aligned layer spec computes a plain dense Qwen3 on one rank; it has no row for "
            f"{', '.join(wrong)}: change that, or use another layer spec"
        )


@dataclass
class AlignedBlockSubmodules(TransformerBlockSubmodules):
    """The spec of a block, which also names the output layer of the model around it."""

    def output_layer(self, model: Any) -> type[AlignedColumnParallelLinear]:
        """The class of the output layer of a `GPTModel` whose embeddings are made.

        Raises:
            NotImplementedError: a model that is more than this block, or with another RoPE.
        """
        wrong = []
        if model.position_embedding_type != "rope":
            wrong.append(f"position_embedding_type={model.position_embedding_type!r}")
        elif model.rotary_pos_emb.seq_len_interpolation_factor is not None:
            wrong.append(f"seq_len_interpolation_factor={model.rotary_pos_emb.seq_len_interpolation_factor}")
        if model.rotary_percent != 1.0:
            wrong.append(f"rotary_percent={model.rotary_percent}")
        if model.rotary_scaling:
            wrong.append("rope_scaling=True")
        if model.mtp_block_spec is not None:
            wrong.append("a multi-token prediction block")
        if not model.pre_process:
            wrong.append("pre_process=False")
        _refuse(wrong)
        return AlignedColumnParallelLinear


def get_gpt_aligned_block_spec(config: TransformerConfig) -> AlignedBlockSubmodules:
    """The spec for `GPTModel`'s `transformer_layer_spec`.

    Raises:
        NotImplementedError: a config with something that has no row here; all of it is named.
        RuntimeError: the operators are missing.
    """
    wrong = []
    for name, plain in PLAIN.items():
        value = getattr(config, name, plain)
        if value != plain:
            wrong.append(f"{name}={getattr(value, '__name__', value)!r}")
    contract = load_operators()
    sizes, dtypes = next(rows for device, rows in ROWS.items() if contract.startswith(device))
    if config.kv_channels not in sizes:
        wrong.append(f"kv_channels={config.kv_channels}")
    if config.params_dtype not in dtypes:
        wrong.append(f"params_dtype={config.params_dtype}")
    _refuse(wrong)
    layer = replace(
        get_gpt_layer_local_submodules(qk_layernorm=True, normalization="RMSNorm"),
        input_layernorm=AlignedRMSNorm,
        pre_mlp_layernorm=AlignedRMSNorm,
        self_attention=ModuleSpec(
            module=AlignedSelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=AlignedColumnParallelLinear,
                core_attention=AlignedCoreAttention,
                linear_proj=AlignedRowParallelLinear,
                q_layernorm=AlignedRMSNorm,
                k_layernorm=AlignedRMSNorm,
            ),
        ),
        mlp=partial(
            AlignedMLP.as_mlp_submodule,
            submodules=MLPSubmodules(linear_fc1=AlignedColumnParallelLinear, linear_fc2=AlignedRowParallelLinear),
        ),
    )
    layers = [ModuleSpec(module=TransformerLayer, submodules=layer)] * config.num_layers
    return AlignedBlockSubmodules(layer_specs=layers, layer_norm=AlignedRMSNorm)
