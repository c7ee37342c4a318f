"""One Megatron Core model that is timed: ``python -m samebits.bench.trainer JOB``, JOB {"layers": n, "hidden": n}.

Forward and backward of a GPTModel in bf16, configured as verl's engine for a device without Transformer Engine does it.
The arm is the environment's ``VLLM_BATCH_INVARIANT``: at 0 the local layer spec, at 1 the aligned one.
"""

import os
from typing import Any

from .turns import Served, serve

SEQUENCES, LENGTH = 4, 64
WORKLOAD = f"trainer step, {SEQUENCES} x {LENGTH} tokens"


def _make(job: dict[str, Any]) -> Served:
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    from samebits.recipe import arms
    from samebits.recipe.model import config as geometry

    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    hf = geometry(job["layers"], job["hidden"])
    config = TransformerConfig(
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
        params_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    aligned = os.environ["VLLM_BATCH_INVARIANT"] == "1"
    spec: Any = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    if aligned:
        from megatron.core.models.gpt.gpt_aligned_layer_specs import get_gpt_aligned_block_spec
        from megatron.core.transformer.aligned.functions import selected_log_prob

        spec = get_gpt_aligned_block_spec(config)
    model = GPTModel(
        config,
        spec,
        hf.vocab_size,
        hf.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=10_000,
        share_embeddings_and_output_weights=False,
    ).bfloat16()
    tokens = torch.randint(0, hf.vocab_size, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    inputs: dict[str, Any] = {
        "input_ids": tokens[:, :-1].contiguous(),
        "position_ids": torch.arange(LENGTH).expand(SEQUENCES, LENGTH),
        "attention_mask": None,
    }
    labels = tokens[:, 1:].contiguous()

    def step() -> int:
        model.zero_grad(set_to_none=True)
        if aligned:
            loss = -selected_log_prob(model(**inputs), labels).mean()
        else:
            loss = model(**inputs, labels=labels).float().mean()
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        return 1

    return Served({WORKLOAD: step}, {"torch": torch.__version__, "contract": arms.loaded_contract()})


if __name__ == "__main__":
    serve(_make)
