"""Transformer Engine's own Python code on a machine without a card: torch does here what its compiled part does.

`install(tree)` makes `transformer_engine.pytorch` importable from the unpacked Python sources in `tree`, over a
stand-in for the extension `transformer_engine_torch` that knows the kernels the tests reach: quantization by current,
delayed and block scaling (E4M3 and E5M2; 1x128 and 128x128), the products, RMSNorm, GELU and the update of delayed
scales. A product is FP32 over dequantized operands. It asks for the data that the card's kernel would ask for: a layout
that reads an operand by columns fails where only row-wise data was kept.

It changes torch for the whole process ("cuda" means the CPU), so it is for a process of its own (te_cases.py).
"""

import enum
import importlib.machinery
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
BLOCK = 128
DTYPES = {
    "kByte": torch.uint8,
    "kInt32": torch.int32,
    "kFloat32": torch.float32,
    "kFloat16": torch.float16,
    "kBFloat16": torch.bfloat16,
    "kFloat8E4M3": torch.float8_e4m3fn,
    "kFloat8E5M2": torch.float8_e5m2,
    "kFloat4E2M1": None,
}
calls: list[str] = []
"""What the extension was asked for, in order: the name, and "columnwise" and such where it matters."""


class _Anything:
    """Stands for what is imported and never used: a decorator, a base class, a constant."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _Anything()

    def __mro_entries__(self, bases: tuple[type, ...]) -> tuple[type, ...]:
        return ()


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """The factory, making on the CPU what it is asked for on "cuda"; a function mode would not reach the backward."""

    def make(*args: Any, **kwargs: Any) -> Any:
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def install(tree: Path) -> None:
    """Make `transformer_engine.pytorch` importable from `tree`, once a process."""
    package = _package(tree, "transformer_engine", __version__="2.20.2")
    package.common = _package(  # type: ignore[attr-defined]
        tree,
        "transformer_engine.common",
        load_framework_extension=lambda name: None,
        decode_cudnn_version=lambda version: (9, 0, 0),
        get_te_core_package_info=lambda: (True, "", ""),
    )
    for name in ("onnx", "onnxscript"):
        stand_in = _module(name, is_package=True)
        stand_in.__getattr__ = lambda attribute: getattr(_Anything(), attribute)  # type: ignore[method-assign]
    _extension()
    torch.set_num_threads(1)  # small tensors, and other processes beside this one
    properties = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=2**33)
    of_cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda *device: torch.get_rng_state(),
        "set_rng_state": lambda state, *device: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
    }
    for name, function in of_cuda.items():
        setattr(torch.cuda, name, function)
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, lambda *args: 0)
    torch.Tensor.is_cuda = True
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    for name in ("arange", "empty", "empty_like", "full", "ones", "rand", "randn", "tensor", "zeros", "zeros_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _module(name: str, is_package: bool = False) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=is_package)
    if is_package:
        module.__path__ = []
    sys.modules[name] = module
    return module


def _package(tree: Path, name: str, **attributes: Any) -> types.ModuleType:
    """A package with the modules of `tree` but without its __init__, which loads libraries of the card."""
    module = _module(name, is_package=True)
    module.__path__ = [str(tree / name.replace(".", "/"))]
    vars(module).update(attributes)
    return module


def _extension() -> None:
    tex = _module("transformer_engine_torch")
    kernels = (quantize, split_quantize, bgrad_quantize, dequantize, generic_gemm, te_general_grouped_gemm)
    kernels += (rmsnorm_fwd, rmsnorm_bwd, gelu, dgelu, dbias_dgelu, fused_amax_and_scale_update_after_reduction)  # type: ignore[assignment]
    for kernel in kernels:
        setattr(tex, kernel.__name__, kernel)
    vars(tex).update(
        DType=enum.IntEnum("DType", {name: number for number, name in enumerate(DTYPES)}),
        FP8FwdTensors=enum.IntEnum(
            "FP8FwdTensors",
            [f"GEMM{n}_{kind}" for n in (1, 2, 3) for kind in ("INPUT", "WEIGHT", "OUTPUT")],
            start=0,
        ),
        FP8BwdTensors=enum.IntEnum(
            "FP8BwdTensors", [f"GRAD_{kind}{n}" for n in (1, 2, 3) for kind in ("OUTPUT", "INPUT")], start=0
        ),
        NVTE_Fused_Attn_Backend=enum.IntEnum(
            "NVTE_Fused_Attn_Backend", {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
        ),
        get_cublasLt_version=lambda: 130200,  # before the grouped-tensor kernels: the products are split
        get_num_cublas_streams=lambda: 1,
    )
    numbers = iter(range(10**6))

    class Constants(type):
        def __getattr__(cls, name: str) -> int:
            if name.startswith("__"):
                raise AttributeError(name)
            return next(numbers)

    def missing(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            value: Any = Constants(name, (), {})
        else:

            def value(*args: Any, **kwargs: Any) -> None:
                raise NotImplementedError(f"the stand-in has no kernel {name}")

        setattr(tex, name, value)
        return value

    for name in ("layernorm_fwd", "layernorm_bwd"):  # named in tables beside the norm that the tests use
        missing(name)
    tex.__getattr__ = missing  # type: ignore[method-assign]


# Quantization


def _fp8(quantizer: Any) -> torch.dtype:
    return {7 - 2: torch.float8_e4m3fn, 8 - 2: torch.float8_e5m2}[int(quantizer.dtype)]


def _cast(values: torch.Tensor, scale: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    return (values * scale).clamp(-FP8_MAX[kind], FP8_MAX[kind]).to(kind).view(torch.uint8)


def _scale(amax: torch.Tensor, kind: torch.dtype, most: torch.dtype) -> torch.Tensor:
    """The largest value ÷ amax, rounded once (torch's number / tensor is rounded twice), or the most of a dtype."""
    scale = torch.full_like(amax, FP8_MAX[kind]) / amax
    scale = torch.where(scale.isinf(), torch.finfo(most).max, scale)
    return torch.where(amax > 0, scale, torch.ones_like(amax))


def _block_scales(amax: torch.Tensor, kind: torch.dtype, power_of_two: bool) -> torch.Tensor:
    scale = _scale(amax, kind, torch.bfloat16)
    return torch.exp2(torch.floor(torch.log2(scale))) if power_of_two else scale


def _by_blocks(values: torch.Tensor, quantizer: Any, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and inverse scales of a matrix along its rows: 1x128 blocks with the scales transposed, or 128x128."""
    rows, columns = values.shape
    tall = BLOCK if quantizer.block_scaling_dim == 2 else 1
    padded = torch.nn.functional.pad(values, (0, -columns % BLOCK, 0, -rows % tall))
    tiles = padded.view(padded.shape[0] // tall, tall, padded.shape[1] // BLOCK, BLOCK)
    scale = _block_scales(tiles.abs().amax((1, 3)), kind, quantizer.force_pow_2_scales)
    data = _cast(tiles, scale[:, None, :, None], kind).view(padded.shape)[:rows, :columns].contiguous()
    inverse = 1 / scale
    inverse = inverse if tall == BLOCK else inverse.T
    return data, torch.nn.functional.pad(inverse, (0, -inverse.shape[1] % 4)).contiguous()


def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    from transformer_engine.pytorch.tensor import (
        Float8BlockQuantizer,
        Float8BlockwiseQTensor,
        Float8CurrentScalingQuantizer,
        Float8Tensor,
    )
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    usage = [side for side in ("rowwise", "columnwise") if getattr(quantizer, f"{side}_usage")]
    calls.append(f"quantize {'+'.join(usage)}")
    kind, values = _fp8(quantizer), tensor.detach().float()
    matrix = values.reshape(-1, values.shape[-1])
    common: dict[str, Any] = {"fp8_dtype": quantizer.dtype, "quantizer": quantizer, "fake_dtype": tensor.dtype}
    if not quantizer.internal:
        common |= {"shape": tensor.shape, "dtype": tensor.dtype, "requires_grad": False, "device": tensor.device}
        del common["fake_dtype"]
    if isinstance(quantizer, Float8BlockQuantizer):
        rows = _by_blocks(matrix, quantizer, kind) if "rowwise" in usage else (None, None)
        columns = _by_blocks(matrix.T.contiguous(), quantizer, kind) if "columnwise" in usage else (None, None)
        block = Float8BlockwiseQTensorStorage if quantizer.internal else Float8BlockwiseQTensor
        return block(
            rowwise_data=None if rows[0] is None else rows[0].view(tensor.shape),
            rowwise_scale_inv=rows[1],
            columnwise_data=columns[0],
            columnwise_scale_inv=columns[1],
            is_2D_scaled=quantizer.block_scaling_dim == 2,
            **common,
        )
    amax = values.abs().amax() if values.numel() else values.new_zeros(())
    if isinstance(quantizer, Float8CurrentScalingQuantizer):
        scale = _scale(amax, kind, torch.float32)
    else:
        scale = quantizer.scale.clone()
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax.reshape(quantizer.amax.shape)))
    data = _cast(values, scale, kind)
    per_tensor = Float8TensorStorage if quantizer.internal else Float8Tensor
    return per_tensor(
        data=data if "rowwise" in usage else None,
        data_transpose=data.view(matrix.shape).T.contiguous() if "columnwise" in usage else None,
        fp8_scale_inv=(1 / scale).reshape(1),
        **common,
    )


def dequantize(tensor: Any, dtype: Any) -> torch.Tensor:
    return tensor.dequantize(dtype=list(DTYPES.values())[int(dtype)])


def split_quantize(tensor: torch.Tensor, splits: list[int], quantizers: list[Any], **kwargs: Any) -> list[Any]:
    return [quantize(part, quantizer) for part, quantizer in zip(tensor.split(splits), quantizers, strict=True)]


def bgrad_quantize(tensor: torch.Tensor, quantizer: Any) -> tuple[torch.Tensor, Any]:
    return tensor.reshape(-1, tensor.shape[-1]).sum(0), quantize(tensor, quantizer)


# Products


def _operand(tensor: Any, by_columns: bool) -> torch.Tensor:
    """A matrix in FP32 with the values that a product reads it by."""
    if isinstance(tensor, torch.Tensor) and not hasattr(tensor, "_fp8_dtype"):
        return tensor.detach().reshape(-1, tensor.shape[-1]).float()
    block = hasattr(tensor, "_is_2D_scaled")
    needed = (
        ("_columnwise_data" if by_columns else "_rowwise_data") if block else ("_transpose" if by_columns else "_data")
    )
    if getattr(tensor, needed) is None:
        raise RuntimeError(f"a product reads a {type(tensor).__name__} by {needed}, which was not kept")
    metadata = tensor.get_metadata() | {"fake_dtype": torch.float32}
    metadata |= (
        {"rowwise_data": None, "rowwise_scale_inv": None}
        if block and by_columns
        else {"data": None}
        if by_columns
        else {}
    )
    storage = next(kind for kind in type(tensor).__mro__ if kind.__name__.endswith("Storage"))
    for extra in ("shape", "dtype", "requires_grad"):
        metadata.pop(extra, None)
    result = storage(**metadata).dequantize(dtype=torch.float32)
    return result.reshape(-1, result.shape[-1])


def _product(a: Any, transa: bool, b: Any, transb: bool) -> torch.Tensor:
    calls.append(f"gemm {'T' if transa else 'N'}{'T' if transb else 'N'} {_kind(a)} {_kind(b)}")
    if _kind(a) != _kind(b):
        raise RuntimeError(f"no product of {_kind(a)} and {_kind(b)} operands")
    left, right = _operand(b, by_columns=transb), _operand(a, by_columns=not transa)
    return (left.T if transb else left) @ (right.T if transa else right)


def _kind(tensor: Any) -> str:
    return "quantized" if hasattr(tensor, "_fp8_dtype") else str(tensor.dtype).removeprefix("torch.")


def generic_gemm(
    a: Any,
    transa: bool,
    b: Any,
    transb: bool,
    out: Any,
    quantizer: Any,
    out_dtype: Any,
    bias: Any,
    *rest: Any,
    **kwargs: Any,
) -> tuple[Any, ...]:
    _, _, _, grad, _, _, accumulate, _ = rest
    result = _product(a, transa, b, transb) * kwargs.get("alpha", 1.0)
    bias_grad = None
    if bias is not None and grad:
        bias_grad = _operand(b, by_columns=False).sum(0).to(bias.dtype)
    elif bias is not None:
        result = result + bias.detach().float()
    if not transb:
        result = result.reshape(*b.size()[:-1], result.shape[-1])
    dtype = list(DTYPES.values())[int(out_dtype)] if out is None else out.dtype
    if out is None:
        out = result.to(dtype)
    else:
        before = out.float() * (kwargs.get("beta") or 1.0) if accumulate else torch.zeros(())
        out.copy_(result.view(out.shape) + before)
    return (out if quantizer is None else quantize(out, quantizer)), bias_grad, None, kwargs.get("extra_output")


def te_general_grouped_gemm(
    a: list[Any], transa: bool, b: list[Any], transb: bool, out: list[torch.Tensor], out_dtype: Any, splits: Any,
    bias: list[torch.Tensor], bias_dtype: Any, single: bool, gelu_input: Any, grad: bool, *rest: Any,
) -> list[torch.Tensor]:  # fmt: skip
    accumulate = rest[2]
    outs = list(out[0].split(splits)) if single else out
    for n, (one, two, into) in enumerate(zip(a, b, outs, strict=True)):
        result = _product(one, transa, two, transb) if two.size(0) else torch.zeros(into.shape)
        with_bias = bias[n].numel() > 0
        if with_bias and grad:
            bias[n].copy_(_operand(two, by_columns=False).sum(0))
        elif with_bias:
            result = result + bias[n].detach().float()
        into.copy_(result + into.float() if accumulate else result)
    return bias


# Norm, activation, delayed scales


def rmsnorm_fwd(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: Any, quantizer: Any, dtype: Any, margin: int, zero: bool
) -> tuple[Any, None, torch.Tensor]:
    rsigma = torch.rsqrt(x.float().pow(2).mean(-1) + eps)
    y = (x.float() * rsigma[:, None] * (weight.float() + zero)).to(x.dtype)
    return (y if quantizer is None else quantize(y, quantizer)), None, rsigma


def rmsnorm_bwd(
    dy: torch.Tensor, x: torch.Tensor, rsigma: torch.Tensor, weight: torch.Tensor, margin: int, zero: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    normed = x.float() * rsigma[:, None]
    scaled = dy.float() * (weight.float() + zero)
    dx = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * rsigma[:, None]
    return dx.to(dy.dtype), (dy.float() * normed).sum(0).to(weight.dtype)


def gelu(x: torch.Tensor, quantizer: Any) -> Any:
    y = torch.nn.functional.gelu(x.float(), approximate="tanh").to(x.dtype)
    return y if quantizer is None else quantize(y, quantizer)


def dgelu(dy: torch.Tensor, x: torch.Tensor, quantizer: Any) -> Any:
    with torch.enable_grad():
        leaf = x.detach().float().requires_grad_()
        (dx,) = torch.autograd.grad(torch.nn.functional.gelu(leaf, approximate="tanh"), leaf, dy.float())
    dx = dx.to(dy.dtype)
    return dx if quantizer is None else quantize(dx, quantizer)


def dbias_dgelu(dy: torch.Tensor, x: torch.Tensor, quantizer: Any) -> tuple[torch.Tensor, Any]:
    dx = dgelu(dy, x, None)
    return dx.sum(0), quantize(dx, quantizer)


def fused_amax_and_scale_update_after_reduction(
    amax: torch.Tensor,
    histories: list[torch.Tensor],
    scales: list[torch.Tensor],
    algorithm: str,
    dtype: Any,
    margin: float,
) -> None:
    """One update of each history: newest first out, a zero row for the next step; the scale from the largest of it."""
    calls.append("amax update")
    for history, scale, newest in zip(histories, scales, amax.split([h.shape[1] for h in histories]), strict=True):
        history[0] = newest
        largest = history.amax(0)
        history.copy_(torch.roll(history, -1, 0))
        history[0] = 0
        limit = FP8_MAX[list(DTYPES.values())[int(dtype)]]  # type: ignore[index]
        scale.copy_(torch.where(largest > 0, limit / largest / math.pow(2, margin), scale))
