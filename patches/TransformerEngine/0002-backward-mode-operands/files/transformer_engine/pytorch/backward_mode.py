"""What a module may keep for a backward in high precision (see transformer_engine.common.recipe.backward_mode)."""

from collections.abc import Iterable
from typing import Any

from .quantized_tensor import QuantizedTensorStorage
from .tensor.storage.identity_tensor_storage import IdentityTensorStorage


def require_unquantized(module: str, inputs: Iterable[Any], weights: Iterable[Any]) -> None:
    """For the mode unquant: raise ValueError if an operand exists only as its quantized values.

    Dequantizing it would give the gradients of the mode dequant under the name of unquant.
    """
    if any(map(_is_rounded, weights)):
        raise ValueError(
            f"{module}: backward_override='high_precision' (NVTE_BACKWARD_MODE=unquant) needs the unquantized weight,"
            " and this parameter holds quantized values only. Construct the module outside of quantized_model_init,"
            " or use 'dequantized' (dequant)."
        )
    if any(map(_is_rounded, inputs)):
        raise ValueError(
            f"{module}: backward_override='high_precision' (NVTE_BACKWARD_MODE=unquant) needs the unquantized input,"
            " and this input is quantized already. Quantize in this module only, or use 'dequantized' (dequant)."
        )


def require_rowwise(module: str, *operands: Any) -> None:
    """For the mode dequant: raise RuntimeError unless each quantized operand still holds its row-wise values.

    The forward multiplies row-wise values. The column-wise ones are quantized on their own in most formats, and
    dequantize() takes them without a word where the row-wise ones are gone.
    """
    for tensor in operands:
        if isinstance(tensor, QuantizedTensorStorage) and not tensor.get_usages()["rowwise"]:
            raise RuntimeError(
                f"{module}: backward_override='dequantized' (NVTE_BACKWARD_MODE=dequant) needs the values that the"
                f" forward used, and a {type(tensor).__name__} holds no row-wise data. Keep its row-wise usage."
            )


def refuse_grouped_op(override: str | None) -> None:
    """Raise NotImplementedError in a mode other than the default one: ops.GroupedLinear has no other backward."""
    if override is not None:
        raise NotImplementedError(
            "ops.GroupedLinear, alone or in the fused grouped MLP: its backward is quantized in every mode, and the"
            f" recipe has backward_override={override!r}, its own or by NVTE_BACKWARD_MODE. Use te.GroupedLinear,"
            " which has the modes, or backward_override=None."
        )


def _is_rounded(tensor: Any) -> bool:
    """Whether a tensor holds quantized values only; an identity "quantization" keeps what it was given."""
    return isinstance(tensor, QuantizedTensorStorage) and not isinstance(tensor, IdentityTensorStorage)
