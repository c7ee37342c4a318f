"""Megatron Core's fp8_backward_mode over Transformer Engine's own Python code, on the CPU; see te_cases.py.

    python megatron_te_cases.py TREE [CASE ...]
TREE: Transformer Engine's unpacked Python sources, patched or not. Megatron Core is the installed one.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import te_cases
import torch
from te_cases import BF16, IN, OUT, ROWS, SPLITS, environment, operands, product, refused, same, values
from te_on_cpu import rmsnorm_bwd, rmsnorm_fwd

# isort: split
from megatron.core import fp8_utils, parallel_state
from megatron.core.extensions import transformer_engine as mcore_te
from megatron.core.fp4_utils import get_fp4_recipe
from megatron.core.quantization import backward_mode
from megatron.core.quantization.quant_config import QuantizationConfig
from megatron.core.tensor_parallel import random
from megatron.core.transformer import TransformerConfig
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

te_cases.CASES.clear()
case = te_cases.case
MODES = {"default": None, "unquant": "high_precision", "dequant": "dequantized"}
FP8_RECIPES = {
    "tensorwise": recipes.Float8CurrentScaling,
    "blockwise": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
}


def config(**changes: Any) -> TransformerConfig:
    plain: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": IN,
        "ffn_hidden_size": OUT,
        "num_attention_heads": 4,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "params_dtype": BF16,
        "bf16": True,
        "fp8": "e4m3",
        "fp8_recipe": "tensorwise",
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "perform_initialization": True,
    }
    return TransformerConfig(**(plain | changes))


@case
def recipe_of_a_config() -> None:
    for mode, override in MODES.items():
        for name, kind in FP8_RECIPES.items():
            recipe = fp8_utils.get_fp8_recipe(config(fp8_recipe=name, fp8_backward_mode=mode))
            assert type(recipe) is kind and recipe.backward_override == override
        custom = config(fp8_recipe="custom", fp8_quantizer_factory="te_cases.values", fp8_backward_mode=mode)
        assert fp8_utils.get_fp8_recipe(custom).backward_override == override
        recipe = get_fp4_recipe(config(fp8=None, fp4="e2m1", fp8_backward_mode=mode))
        assert recipe.nvfp4() and recipe.backward_override == override
        with fp8_utils.get_fp8_context(config(fp8_backward_mode=mode)):
            assert FP8GlobalStateManager.get_fp8_recipe().backward_override == override
    assert fp8_utils.get_fp8_recipe(config(fp8_recipe="delayed")).delayed()
    assert fp8_utils.get_fp8_recipe(config(fp8_recipe="delayed", fp8_backward_mode="default")).backward_override is None
    assert "FP8 recipe" in fp8_utils.get_fp8_recipe.__doc__


@case
def resolution() -> None:
    resolved: list[tuple[dict[str, str], str | None]] = [
        ({}, None),
        ({"BACKWARD_MODE": ""}, None),
        ({"BACKWARD_MODE": "unquant"}, "unquant"),
        ({"BACKWARD_OVERRIDE": "dequantized"}, "dequant"),
        ({"BACKWARD_MODE": "dequant", "BACKWARD_OVERRIDE": "dequantized"}, "dequant"),
    ]
    for variables, expected in resolved:
        with environment(**variables):
            assert config().fp8_backward_mode == expected
            assert config(fp8=None, fp4="e2m1").fp8_backward_mode == expected
            assert config(fp8=None).fp8_backward_mode is None, "a BF16 model in the same environment"
            for mode, override in MODES.items():
                explicit = config(fp8_backward_mode=mode)
                assert explicit.fp8_backward_mode == mode
                assert fp8_utils.get_fp8_recipe(explicit).backward_override == override
    wrong: list[tuple[dict[str, str], str]] = [
        ({"BACKWARD_MODE": "high_precision"}, "NVTE_BACKWARD_MODE=high_precision"),
        ({"BACKWARD_OVERRIDE": "unquant"}, "high_precision or dequantized"),
        ({"BACKWARD_MODE": "default", "BACKWARD_OVERRIDE": "dequantized"}, "contradicts"),
        ({"KEEP_BACKWARD_UNQUANTIZED": "1"}, "NVTE_BACKWARD_MODE=unquant"),
    ]
    for variables, said in wrong:
        with environment(**variables):
            refused(config, said, "default, unquant, dequant")
            config(fp8=None)
    refused(partial(config, fp8_backward_mode="high_precision"), "default, unquant, dequant")
    refused(partial(config, fp8=None, fp8_backward_mode="unquant"), "--fp8-format")


@case
def combinations() -> None:
    refusals: list[tuple[dict[str, Any], str, str]] = [
        ({"fp8_recipe": "delayed"}, "delayed", "--fp8-recipe tensorwise"),
        ({"fp8_dot_product_attention": True}, "FP8 attention", "turn fp8_dot_product_attention"),
        ({"fp8_multi_head_attention": True}, "FP8 attention", "fp8_multi_head_attention off"),
        ({"use_transformer_engine_op_fuser": True}, "use_transformer_engine_op_fuser", "turn it off"),
        ({"use_kitchen": True}, "use_kitchen", "turn it off"),
    ]
    for changes, what, remedy in refusals:
        for mode in ("unquant", "dequant"):
            refused(partial(config, fp8_backward_mode=mode, **changes), "--fp8-backward-mode", mode, what, remedy)
        config(fp8_backward_mode="default", **changes)
    for changes, flag in (({"fp8_param": True}, "fp8"), ({"fp8": None, "fp4": "e2m1", "fp4_param": True}, "fp4")):
        refused(partial(config, fp8_backward_mode="unquant", **changes), f"--{flag}-param-gather", "dequant")
        config(fp8_backward_mode="dequant", **changes)
    for mode in ("unquant", "dequant"):
        module = SimpleNamespace(config=config(fp8_backward_mode=mode))
        fused = (mcore_te.TEFusedMLP.forward, mcore_te.TEFusedMLPWithGroupedLinear.forward)
        for forward in fused:
            refused(partial(forward, module, None), "SimpleNamespace", mode, "unfused")


@case
def older_releases() -> None:
    older: Any = SimpleNamespace(delayed=lambda: False)
    for mode in ("unquant", "dequant"):
        refused(partial(backward_mode.set_backward_mode, older, mode), "2.15", "2.20.2", mode)
        delayed = recipes.DelayedScaling(backward_override=None)
        refused(partial(backward_mode.set_backward_mode, delayed, mode), "delayed scaling", mode)
    for nothing in (None, "default"):
        assert backward_mode.set_backward_mode(older, nothing) is older and not hasattr(older, "backward_override")


def per_module(**changes: Any) -> QuantizationConfig:
    keys = {"fp8_quantization_recipe": "blockwise", "override_nonquantized_autocast": True} | changes
    layer = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": keys}
    return QuantizationConfig(config=layer, match_input=None, config_key="here")


@case
def recipes_per_module() -> None:
    parse = mcore_te.TEQuantizationRecipe.parse_from_config
    refused(partial(parse, {"backward_mode": "none"}), "default, unquant, dequant")
    refused(partial(parse, {"backward_mode": "unquant", "fp8_param": True}), "fp8_param", "dequant")
    for own, inherited, expected in (
        (None, "unquant", "unquant"),
        ("dequant", "unquant", "dequant"),
        (None, None, None),
    ):
        module = column(config(fp8_backward_mode=inherited))
        module.finish_init(per_module(**({} if own is None else {"backward_mode": own})))
        with mcore_te._get_fp8_autocast_for_quant_params(module.te_quant_params, training=True):
            recipe = FP8GlobalStateManager.get_fp8_recipe()
            assert type(recipe) is recipes.Float8BlockScaling
            assert recipe.backward_override == MODES[expected or "default"]
        module.finish_init(None)
    refused(partial(column(config(fp8_backward_mode="unquant")).finish_init, per_module(fp8_param=True)), "fp8_param")
    module, x = column(config(fp8=None)), values(ROWS, IN)
    module.finish_init(per_module(backward_mode="unquant"))
    _, dy, dx = step(module, x, config(fp8=None))
    same(dx, product(dy, module.weight), "dX of a module whose own recipe says unquant, in a BF16 model")


def column(settings: TransformerConfig, kind: Any = None) -> Any:
    return (kind or mcore_te.TEColumnParallelLinear)(
        IN, OUT, config=settings, init_method=torch.nn.init.xavier_normal_, gather_output=False, bias=False,
        skip_bias_add=False, is_expert=False,
    )  # fmt: skip


def row(settings: TransformerConfig) -> Any:
    return mcore_te.TERowParallelLinear(
        IN, OUT, config=settings, init_method=torch.nn.init.xavier_normal_, input_is_parallel=True, bias=False,
        skip_bias_add=False, is_expert=False,
    )  # fmt: skip


def step(module: Any, x: torch.Tensor, settings: TransformerConfig, *arguments: Any) -> tuple[torch.Tensor, ...]:
    module.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    with fp8_utils.get_fp8_context(settings):
        y = module(x, *arguments)[0]
    dy = values(*y.shape, seed=9)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), dy, x.grad


@case
def linears() -> None:
    for name in ("tensorwise", "blockwise"):
        for make in (column, row, partial(column, kind=mcore_te.TELayerNormColumnParallelLinear)):
            module, x = make(config(fp8_recipe=name)), values(ROWS, IN)
            forward = step(module, x, config(fp8_recipe=name))[0]
            normed, gain = x, getattr(module, "layer_norm_weight", None)
            if gain is not None:
                normed, _, rsigma = rmsnorm_fwd(x, gain, module.eps, None, None, None, 0, False)
            for mode in ("unquant", "dequant"):
                y, dy, dx = step(module, x, config(fp8_recipe=name, fp8_backward_mode=mode))
                same(y, forward, (make, name, mode, "the forward of the default mode"))
                xs, w = operands(normed, module.weight, FP8_RECIPES[name], MODES[mode] or "")
                same(module.weight.grad, product(dy.T, xs), (make, name, mode, "dW"))
                into = product(dy, w)
                if gain is not None:
                    into = rmsnorm_bwd(into, x, rsigma, gain, 0, False)[0]
                same(dx, into, (make, name, mode, "dX"))


@case
def grouped_linear() -> None:
    x, splits = values(ROWS, IN), torch.tensor(SPLITS)
    for name in ("tensorwise", "blockwise"):
        settings = config(fp8_recipe=name, num_moe_experts=3)
        module = mcore_te.TEGroupedLinear(
            3, IN, OUT, parallel_mode=None, config=settings, init_method=torch.nn.init.xavier_normal_, bias=False,
            skip_bias_add=False, is_expert=True,
        )  # fmt: skip
        forward = step(module, x, settings, splits)[0]
        for mode in ("unquant", "dequant"):
            y, dy, dx = step(module, x, config(fp8_recipe=name, fp8_backward_mode=mode), splits)
            same(y, forward, (name, mode))
            for n in (0, 2):
                part = slice(sum(SPLITS[:n]), sum(SPLITS[: n + 1]))
                weight = getattr(module, f"weight{n}")
                xs, w = operands(x[part], weight, FP8_RECIPES[name], MODES[mode] or "")
                same(dx[part], product(dy[part], w), (name, mode, n, "dX"))
                same(weight.grad, product(dy[part].T, xs), (name, mode, n, "dW"))


@case
def argument() -> None:
    """--fp8-backward-mode, as the training scripts make their arguments from the config's fields."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    fields = {name for name in TransformerConfig.__dataclass_fields__ if name != "fp8_backward_mode"}
    parser = argparse.ArgumentParser(exit_on_error=False)
    ArgumentGroupFactory(TransformerConfig, exclude=sorted(fields)).build_group(parser, "here")
    for mode in MODES:
        assert parser.parse_args(["--fp8-backward-mode", mode]).fp8_backward_mode == mode
    assert parser.parse_args([]).fp8_backward_mode is None
    assert "unquantized activation and weight" in " ".join(parser.format_help().split())
    refused(partial(parser.parse_args, ["--fp8-backward-mode", "x"]), "dequant", kind=argparse.ArgumentError)


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "localhost", "RANK": "0", "WORLD_SIZE": "1"}
    store = Path(tempfile.mkdtemp()) / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    random.model_parallel_cuda_manual_seed(1)
    te_cases.main()
