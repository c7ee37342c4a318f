"""The backward mode of quantized linear layers: what dgrad and wgrad are computed from, by name.

| mode    | forward   | dgrad and wgrad                                               | Transformer Engine's recipe         |
|---------|-----------|---------------------------------------------------------------|-------------------------------------|
| default | quantized | quantized, as the recipe says                                 | backward_override=None              |
| unquant | quantized | high precision, of the unquantized activation and weight      | backward_override="high_precision"  |
| dequant | quantized | high precision, of the quantized values that the forward used | backward_override="dequantized"     |

TransformerConfig.fp8_backward_mode says it, for FP8 and FP4; where it says nothing, NVTE_BACKWARD_MODE does, and then
Transformer Engine's own NVTE_BACKWARD_OVERRIDE. A module's quantization recipe may say another. The forward and the
mechanism of the backward are Transformer Engine's, from 2.15 on.
"""

import os
from typing import Any, Optional

from megatron.core.utils import get_te_version

OVERRIDES = {"default": None, "unquant": "high_precision", "dequant": "dequantized"}
SETTINGS = "fp8_backward_mode (--fp8-backward-mode, NVTE_BACKWARD_MODE)"
ALLOWED = f"Allowed are {', '.join(OVERRIDES)}"


def mode_from_environment() -> Optional[str]:
    """The mode that the variables name, None if they are unset or empty.

    Raises ValueError for an unknown value, a contradiction, and the variable's first name.
    """
    names = ("NVTE_KEEP_BACKWARD_UNQUANTIZED", "NVTE_BACKWARD_MODE", "NVTE_BACKWARD_OVERRIDE")
    former, mode, override = (os.environ.get(name, "") for name in names)
    by_override = {value: key for key, value in OVERRIDES.items() if value}
    if former:
        raise ValueError(
            f"NVTE_KEEP_BACKWARD_UNQUANTIZED={former} means nothing: its successor is NVTE_BACKWARD_MODE=unquant."
            f" {ALLOWED}."
        )
    if mode and mode not in OVERRIDES:
        raise ValueError(f"NVTE_BACKWARD_MODE={mode} is unknown. {ALLOWED}.")
    if override and override not in by_override:
        raise ValueError(
            f"NVTE_BACKWARD_OVERRIDE={override} is unknown; it takes {' or '.join(by_override)}. {ALLOWED} for"
            " NVTE_BACKWARD_MODE."
        )
    if mode and override and mode != by_override[override]:
        raise ValueError(
            f"NVTE_BACKWARD_MODE={mode} contradicts NVTE_BACKWARD_OVERRIDE={override}. Unset the second. {ALLOWED}."
        )
    return mode or by_override.get(override)


def resolve_backward_mode(config: Any) -> None:
    """Settle `config.fp8_backward_mode` of a TransformerConfig, and refuse what cannot keep it.

    Without quantization the environment is not asked. Raises ValueError, which names setting and remedy.
    """
    quantized = config.fp8 or config.fp4 or config.quant_recipe is not None
    if config.fp8_backward_mode is None and quantized:
        config.fp8_backward_mode = mode_from_environment()
    mode = config.fp8_backward_mode
    if mode is None:
        return
    if mode not in OVERRIDES:
        raise ValueError(f"fp8_backward_mode={mode!r} is unknown. {ALLOWED}.")
    if not quantized:
        raise ValueError(
            f"fp8_backward_mode={mode!r} needs a quantized forward: set fp8 (--fp8-format), fp4 (--fp4-format) or a"
            " quantization recipe, or leave it out."
        )
    if mode == "default":
        return
    param = "fp8_param" if config.fp8 else "fp4_param"
    refusals = [
        (
            config.fp8 and config.fp8_recipe == "delayed",
            "fp8_recipe='delayed' has no backward in high precision",
            "use --fp8-recipe tensorwise, blockwise or mxfp8",
        ),
        (
            mode == "unquant" and (config.fp8_param or config.fp4_param),
            f"{param} keeps no unquantized weight",
            f"turn {param} (--{param[:3]}-param-gather) off, or use dequant",
        ),
        (
            config.fp8_dot_product_attention or config.fp8_multi_head_attention,
            "FP8 attention quantizes its backward",
            "turn fp8_dot_product_attention and fp8_multi_head_attention off",
        ),
        (
            config.use_transformer_engine_op_fuser,
            "use_transformer_engine_op_fuser runs operations that quantize gradients",
            "turn it off",
        ),
        (config.use_kitchen, "use_kitchen's layers do not know the mode", "turn it off"),
    ]
    for holds, what, remedy in refusals:
        if holds:
            raise ValueError(f"{SETTINGS} is {mode}, but {what}. Remedy: {remedy}, or use default.")


def set_backward_mode(recipe: Any, mode: Optional[str]) -> Any:
    """Give a Transformer Engine recipe the mode; returns the recipe. None leaves it as it is.

    Raises ValueError where the mode cannot be kept: by an older release, or by delayed scaling.
    """
    if mode is None or recipe is None:
        return recipe
    if mode not in OVERRIDES:
        raise ValueError(f"The backward mode {mode!r} is unknown. {ALLOWED}.")
    if not hasattr(recipe, "backward_override"):
        if mode != "default":
            raise ValueError(
                f"{SETTINGS} is {mode}, which needs Transformer Engine 2.15 or later, and {get_te_version()} is"
                " installed. Remedy: install a later one, or use default."
            )
        return recipe
    if mode != "default" and recipe.delayed():
        raise ValueError(
            f"{SETTINGS} is {mode}, and delayed scaling has no backward in high precision. Remedy: use another"
            " recipe, or default."
        )
    recipe.backward_override = OVERRIDES[mode]
    return recipe


def with_backward_mode(make_recipe: Any) -> Any:
    """A function of a TransformerConfig that gives its recipe, with the config's mode in it."""

    def make(config: Any) -> Any:
        return set_backward_mode(make_recipe(config), config.fp8_backward_mode)

    make.__doc__ = make_recipe.__doc__
    return make


def check_module_recipe(recipe: Any) -> None:
    """Raise ValueError if a module's quantization recipe cannot keep its `backward_mode`."""
    if recipe.backward_mode not in (None, *OVERRIDES):
        raise ValueError(
            f"backward_mode={recipe.backward_mode!r} of a module's quantization recipe is unknown. {ALLOWED}."
        )
    if recipe.backward_mode == "unquant" and (recipe.fp8_param or recipe.fp4_param):
        raise ValueError(
            "The backward mode of a module's quantization recipe is unquant, but its fp8_param or fp4_param keeps no"
            " unquantized weight. Remedy: turn it off, or set backward_mode: dequant."
        )


def inherit_backward_mode(params: Any, config: Any) -> None:
    """Let a module's quantization recipes that name no mode take the config's. Raises ValueError if one cannot."""
    for recipe in (params.training_recipe, params.evaluation_recipe):
        if recipe is not None and recipe.backward_mode is None:
            recipe.backward_mode = getattr(config, "fp8_backward_mode", None)
            check_module_recipe(recipe)


def refuse_fused_operations(module: Any) -> None:
    """Raise ValueError: Transformer Engine's fused operations quantize gradients in every mode."""
    raise ValueError(
        f"{SETTINGS} is {module.config.fp8_backward_mode}, but {type(module).__name__} runs fused operations that"
        " quantize gradients. Remedy: use the unfused module, or default."
    )
