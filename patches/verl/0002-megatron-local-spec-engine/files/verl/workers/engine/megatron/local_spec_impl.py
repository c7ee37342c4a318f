"""The Megatron engine for a device without Transformer Engine: Megatron Core's local layer spec, DDP and optimizer.

Registered for ``device="cpu"``. It differs from the CUDA engine in what builds the model and in who knows the
Hugging Face names; forward, loss, schedule, optimizer and checkpoints are inherited.
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from verl.utils.torch_dtypes import PrecisionType

from ..base import EngineRegistry
from .hf_names import DenseDecoderNames
from .transformer_impl import MegatronEngineWithLMHead

_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
_UNSUPPORTED_SWITCHES = (
    "use_remove_padding",
    "use_fused_kernels",
    "use_distributed_optimizer",
    "param_offload",
    "optimizer_offload",
    "dynamic_context_parallel",
)
# What of a model's config changes the arithmetic, and the only value that the code below computes.
_PLAIN_QWEN3 = {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}


class RightPaddedGPTModel(GPTModel):
    """GPTModel for right-padded batches: the causal mask alone hides the padding.

    verl passes a padding mask of shape (batch, sequence); the local attention would read it as a full score mask.
    """

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, attention_mask: Any = None, **kwargs: Any):
        return super().forward(input_ids=input_ids, position_ids=position_ids, attention_mask=None, **kwargs)


@EngineRegistry.register(model_type="language_model", backend="megatron", device="cpu")
class MegatronLocalSpecEngine(MegatronEngineWithLMHead):
    """Dense decoders on one rank; see the module docstring.

    Raises:
        NotImplementedError: at construction, for a layout or a model that this engine has no rows for.
    """

    def _init_device_mesh(self) -> None:
        engine, hf = self.engine_config, self.model_config.hf_config
        sizes = {name: engine[name] for name in _SIZES} | {"data_parallel_size": torch.distributed.get_world_size()}
        wrong = [f"{name}={size}" for name, size in sizes.items() if size != 1]
        wrong += [f"{name}=True" for name in _UNSUPPORTED_SWITCHES if engine[name]]
        model = {name: getattr(hf, name, plain) for name, plain in _PLAIN_QWEN3.items()}
        wrong += [f"{name}={value!r}" for name, value in model.items() if value != _PLAIN_QWEN3[name]]
        rope = getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {}
        if rope.get("rope_type", "default") != "default":
            wrong.append(f"rope_type={rope['rope_type']!r}")
        if wrong:
            raise NotImplementedError(
                "the local-spec Megatron engine runs a plain dense Qwen3 on one rank, on padded batches; it has no rows "
                f"for {', '.join(wrong)}: set sizes to 1 and switches to False, or use the engine with a bridge"
            )
        super()._init_device_mesh()
        # The local attention forks Megatron's random-number tracker, also at dropout 0. The inherited seeding skips it
        # on a platform that counts no device.
        tensor_parallel.model_parallel_cuda_manual_seed(engine.seed)

    def _build_tf_config(self) -> None:
        hf = self.model_config.hf_config
        self.is_value_model = False
        self.share_embeddings_and_output_weights = hf.tie_word_embeddings
        self.param_dtype = self.dtype = PrecisionType.to_dtype(self.engine_config.dtype)
        self.tf_config = TransformerConfig(
            num_layers=hf.num_hidden_layers,
            hidden_size=hf.hidden_size,
            ffn_hidden_size=hf.intermediate_size,
            num_attention_heads=hf.num_attention_heads,
            num_query_groups=hf.num_key_value_heads,
            kv_channels=hf.head_dim,
            layernorm_epsilon=hf.rms_norm_eps,
            normalization="RMSNorm",
            qk_layernorm=True,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=self.param_dtype,
            bf16=self.param_dtype == torch.bfloat16,
            use_cpu_initialization=True,
            # Every fusion below needs a CUDA kernel or a compiler run at the first step.
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
        )
        # The names below are read by the inherited export and checkpoint code.
        self.bridge = DenseDecoderNames(hf)
        self.provider = None
        self.vanilla_bridge = True
        self.peft_cls = None

    def _build_megatron_module(self) -> list[torch.nn.Module]:
        from verl.models.mcore.config_converter import get_hf_rope_theta
        from verl.utils.megatron_utils import get_model

        hf = self.model_config.hf_config

        def build(pre_process: bool = True, post_process: bool = True) -> GPTModel:
            return RightPaddedGPTModel(
                config=self.tf_config,
                transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
                vocab_size=hf.vocab_size,
                max_sequence_length=hf.max_position_embeddings,
                pre_process=pre_process,
                post_process=post_process,
                position_embedding_type="rope",
                rotary_base=get_hf_rope_theta(hf),
                share_embeddings_and_output_weights=hf.tie_word_embeddings,
            )

        module = get_model(
            build,
            wrap_with_ddp=not self.engine_config.forward_only,
            use_distributed_optimizer=False,
            transformer_config=self.tf_config,
            override_ddp_config=self._resolve_override_ddp_config(),
        )
        self.bridge.load_weights(module, self.model_config.local_path)
        return module

    # The parameters live where they compute. The inherited methods would first bring them back from the host.

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        return None

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        return self.bridge.export_weights(self.module), None

    def save_checkpoint(self, *where: Any, **options: Any) -> None:
        # The manager's parameters stand in the order of the inherited method's.
        self.checkpoint_mananager.save_checkpoint(*where, **options)
        torch.distributed.barrier()
