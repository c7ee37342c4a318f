"""The Megatron engine without a bridge: the model is built here from one of Megatron Core's layer specs.

Registered for ``device="cpu"``, and for ``device="cuda"`` under a name of its own: ``VERL_ENGINE_VENDOR=aligned`` asks for
it, otherwise CUDA keeps the engine with a bridge. It differs from that one in what builds the model and in who knows the
Hugging Face names; forward, loss, schedule, optimizer and checkpoints are inherited. With ``VLLM_BATCH_INVARIANT=1``,
the switch of the rollout's operators, layers and logprobs are computed by those operators: the aligned layer spec. With 0
the layers are the local spec's on a CPU and Transformer Engine's on CUDA.
"""

import os
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig

from verl.utils.device import get_device_name
from verl.utils.megatron_utils import unwrap_model
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


def _is_batch_invariant() -> bool:
    """Whether the rollout runs its batch-invariant operators; the environment is read as vLLM reads it."""
    return bool(int(os.environ.get("VLLM_BATCH_INVARIANT", "0")))


class RightPaddedGPTModel(GPTModel):
    """GPTModel for right-padded batches: the causal mask alone hides the padding.

    verl passes a padding mask of shape (batch, sequence); the local attention would read it as a full score mask.
    """

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, attention_mask: Any = None, **kwargs: Any):
        return super().forward(input_ids=input_ids, position_ids=position_ids, attention_mask=None, **kwargs)


@EngineRegistry.register(model_type="language_model", backend="megatron", device="cuda", vendor="aligned")
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
        if get_device_name() == "cpu":
            # The local attention forks Megatron's random-number tracker, also at dropout 0. The inherited seeding skips
            # it on a platform that counts no device.
            tensor_parallel.model_parallel_cuda_manual_seed(engine.seed)

    def _build_tf_config(self) -> None:
        hf = self.model_config.hf_config
        self.is_aligned = _is_batch_invariant()
        on_cpu = get_device_name() == "cpu"
        # Kernels of CUDA or of a compiler. The aligned layers have none of these operators.
        fused = not on_cpu and not self.is_aligned
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
            # The RoPE angles too are made where the parameters are: the rollout makes its own on its device.
            use_cpu_initialization=on_cpu,
            masked_softmax_fusion=fused,
            bias_activation_fusion=fused,
            bias_dropout_fusion=fused,
            apply_rope_fusion=fused,
            # The output layer would need apex for it.
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
        )
        # The names below are read by the inherited export and checkpoint code.
        self.bridge = DenseDecoderNames(hf)
        self.provider = None
        self.vanilla_bridge = True
        self.peft_cls = None

    def _layer_spec(self) -> Any:
        if not self.is_aligned:
            if get_device_name() == "cpu":
                return get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
            return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
        try:
            from megatron.core.models.gpt.gpt_aligned_layer_specs import get_gpt_aligned_block_spec
        except ImportError as error:
            raise NotImplementedError(
                "VLLM_BATCH_INVARIANT=1, but this Megatron Core has no aligned layer spec: install one that has "
                "megatron.core.models.gpt.gpt_aligned_layer_specs, or set VLLM_BATCH_INVARIANT=0"
            ) from error
        return get_gpt_aligned_block_spec(self.tf_config)

    def _build_megatron_module(self) -> list[torch.nn.Module]:
        from verl.models.mcore.config_converter import get_hf_rope_theta
        from verl.utils.megatron_utils import get_model

        hf = self.model_config.hf_config

        def build(pre_process: bool = True, post_process: bool = True) -> GPTModel:
            return RightPaddedGPTModel(
                config=self.tf_config,
                transformer_layer_spec=self._layer_spec(),
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

    def _lm_head_logits_processor(
        self,
        logits: torch.Tensor,
        label: torch.Tensor,
        temperature: torch.Tensor,
        *,
        calculate_sum_pi_squared: bool,
        calculate_entropy: bool,
        distillation_use_topk: bool,
        distillation_only: bool,
        **others: Any,
    ) -> dict[str, torch.Tensor]:
        """Logprobs by the rollout's operator where the layers are; entropy and the rest as inherited.

        The rollout divides its logits by the temperature in FP32 and takes the log-softmax of that; so does this. The
        division is torch's on both sides: element by element, and rounded as IEEE says, whatever the shapes.
        """
        wanted = {
            "calculate_sum_pi_squared": calculate_sum_pi_squared,
            "calculate_entropy": calculate_entropy,
            "distillation_use_topk": distillation_use_topk,
        }
        if not self.is_aligned:
            wanted["distillation_only"] = distillation_only
            return super()._lm_head_logits_processor(logits, label, temperature, **wanted, **others)
        from megatron.core.transformer.aligned.functions import selected_log_prob

        outputs = {}
        if not distillation_only:
            # Where the temperature is 0 (greedy, or padding) the rollout does not divide.
            divisor = temperature.masked_fill(temperature <= 0, 1.0).unsqueeze(-1)
            scaled = logits.float()
            if not bool((divisor == 1).all()):  # a quotient by 1 is what was divided
                scaled = scaled / divisor.float()
            outputs["log_probs"] = selected_log_prob(scaled, label)
        if any(wanted.values()):
            # The inherited method changes logits and temperature in place. Told that this is distillation alone, it
            # leaves the logprobs out.
            outputs |= super()._lm_head_logits_processor(
                logits.clone(), label, temperature.clone(), distillation_only=True, **wanted, **others
            )
        return outputs

    @torch.no_grad()
    def rope_table(self) -> torch.Tensor | None:
        """The aligned layers' cosines beside sines (max_position_embeddings, head_dim); None for other layers.

        No operator computes it: each side makes its own with torch, so that it is theirs to compare.
        """
        if not self.is_aligned:
            return None
        from megatron.core.transformer.aligned.functions import cos_sin_table

        hf = self.model_config.hf_config
        angles = unwrap_model(self.module[0]).rotary_pos_emb(hf.max_position_embeddings)
        return cos_sin_table(angles[:, 0, 0, : hf.head_dim // 2], self.param_dtype)

    # The parameters live where they compute. The inherited methods would first bring them back from the host.

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        return None

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        return self.bridge.export_weights(self.module), None

    def save_checkpoint(self, *where: Any, **options: Any) -> None:
        # The manager's parameters stand in the order of the inherited method's.
        self.checkpoint_mananager.save_checkpoint(*where, **options)
        torch.distributed.barrier()
