"""The backward mode of a quantization recipe: which operands the gradients of a quantized linear layer come from.

| NVTE_BACKWARD_MODE | a recipe's backward_override | dgrad and wgrad                                                |
|--------------------|------------------------------|----------------------------------------------------------------|
| default            | None                         | quantized, as the recipe says                                  |
| unquant            | "high_precision"             | high precision, of the unquantized activation and weight       |
| dequant            | "dequantized"                | high precision, of the quantized values that the forward used  |

A recipe resolves its mode when it is constructed: an explicit argument, else NVTE_BACKWARD_MODE, else
NVTE_BACKWARD_OVERRIDE (which takes the names of the field). An empty variable is an unset one.
"""

import os
from typing import Any

MODES: dict[str, str | None] = {
    "default": None,
    "unquant": "high_precision",
    "dequant": "dequantized",
}


def check_backward_override(value: Any) -> None:
    """Raise ValueError unless `value` is one that a recipe's field `backward_override` may hold."""
    if value not in MODES.values():
        raise ValueError(
            f"A recipe's backward_override is {value!r}. Allowed are None, 'high_precision' and 'dequantized'."
        )


def backward_override_from_environment() -> str | None:
    """The `backward_override` of a recipe that is constructed without one, from the variables as they are now.

    Raises ValueError for an unknown value, for two variables that contradict each other, and for the variable's
    first name, NVTE_KEEP_BACKWARD_UNQUANTIZED.
    """
    names = ("NVTE_KEEP_BACKWARD_UNQUANTIZED", "NVTE_BACKWARD_MODE", "NVTE_BACKWARD_OVERRIDE")
    former, mode, override = (os.environ.get(name, "") for name in names)
    allowed = f"Allowed are NVTE_BACKWARD_MODE={'|'.join(MODES)}, or none of the variables."
    if former:
        raise ValueError(
            f"NVTE_KEEP_BACKWARD_UNQUANTIZED={former} means nothing. Its successor is NVTE_BACKWARD_MODE=unquant."
            f" {allowed}"
        )
    if mode and mode not in MODES:
        raise ValueError(f"NVTE_BACKWARD_MODE={mode} is unknown. {allowed}")
    if override and override not in MODES.values():
        raise ValueError(
            f"NVTE_BACKWARD_OVERRIDE={override} is unknown; it takes high_precision or dequantized. {allowed}"
        )
    if mode and override and MODES[mode] != override:
        raise ValueError(
            f"NVTE_BACKWARD_MODE={mode} contradicts NVTE_BACKWARD_OVERRIDE={override}. Unset the second. {allowed}"
        )
    return MODES[mode] if mode else override or None


def check_region(recipe: Any) -> None:
    """Raise ValueError if a region that quantizes with `recipe` cannot keep the recipe's backward mode.

    A region that does not quantize is not asked: the recipe in it is a placeholder.
    """
    check_quantizers(recipe, recipe.delayed())
    if recipe.backward_override is not None and (recipe.fp8_dpa or recipe.fp8_mha):
        raise ValueError(
            "FP8 attention quantizes its backward in every mode, and this recipe has"
            f" fp8_dpa={recipe.fp8_dpa}, fp8_mha={recipe.fp8_mha} and {_named(recipe)}. Turn off both, or construct it"
            " with backward_override=None."
        )


def check_quantizers(recipe: Any, with_delayed_scaling: bool) -> None:
    """Raise ValueError if a quantizer of `recipe` scales with delay and its mode is not the default one."""
    if recipe.backward_override is not None and with_delayed_scaling:
        raise ValueError(
            "Delayed scaling has no backward mode but the default one, and this"
            f" {type(recipe).__name__} has {_named(recipe)}. Use other scaling, or construct it with"
            " backward_override=None."
        )


def _named(recipe: Any) -> str:
    return f"backward_override={recipe.backward_override!r}, its own or by NVTE_BACKWARD_MODE"
