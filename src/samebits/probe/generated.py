"""What torch.compile generated for a model, and what of it computes outside of the contract.

At BI=1 a graph may call operators of the contract and move values; anything that rounds is foreign.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Collection

# ATen operators that only move values.
MOVES = frozenset({
    "_reshape_alias", "_to_copy", "_unsafe_view", "alias", "as_strided", "chunk", "clone", "contiguous", "copy_",
    "detach", "embedding", "empty", "empty_like", "empty_strided", "expand", "fill_", "flatten", "index_select",
    "lift_fresh", "narrow", "new_empty", "reshape", "resize_", "resolve_conj", "resolve_neg", "select", "slice",
    "split", "split_with_sizes", "squeeze", "t", "to", "transpose", "unsqueeze", "view", "view_as", "zero_",
    "zeros",
})  # fmt: skip
# vLLM's own: what runs inside them is the contract's.
VLLM = frozenset({"unified_attention_with_output", "unified_kv_cache_update"})


def foreign_operators(names: Collection[str], contract: Collection[str] | None = None) -> list[str]:
    """Those of `names`, as "space::name", that are neither of the contract nor move values.

    contract: the operators of it that may occur; None: any of `batch_invariant`."""
    found = []
    for full in names:
        space, _, name = full.partition("::")
        name = name.partition(".")[0]
        ours = space == "batch_invariant" and (contract is None or name in contract)
        if not (ours or (space == "aten" and name in MOVES) or (space == "vllm" and name in VLLM)):
            found.append(f"{space}::{name}")
    return found


def foreign_code(graph: str, contract: Collection[str] | None = None) -> list[str]:
    """What generated code computes outside of the contract: fused ATen operators, library calls, kernels' functions.

    graph: the Python source that Inductor wrote for one graph, with its C++ or Triton kernels in it."""
    fused = re.findall(r"Original ATen: \[(.*)\]", graph)
    names = [name.replace(".", "::", 1) for line in fused for name in line.split(", ") if name]
    calls = [f"{space}::{name}" for space, name in re.findall(r"= torch\.ops\.(\w+)\.(\w+)\.\w+\(", graph)]
    # A value that was loaded may be spread over a vector: that rounds nothing.
    cpp = "".join(re.findall(r"^cpp_fused\w* = .*?^'''\)", graph, flags=re.DOTALL | re.MULTILINE))
    in_cpp = re.findall(
        r"(?:convert|static_cast)<(?:float|double|at::BFloat16)[^(]*\((?!in_ptr)"
        r"|Vectorized<(?:float|double|at::BFloat16)[^(]*\((?!in_ptr|tmp\d+\))",
        cpp,
    )
    triton = "".join(re.findall(r"^@triton\.jit\n.*?^'''", graph, flags=re.DOTALL | re.MULTILINE))
    in_triton = re.findall(
        r"(?:libdevice|tl_math|triton_helpers)\.\w+|tl\.(?:sum|dot|exp|exp2|log|sqrt|rsqrt|sigmoid)\b"
        r"|\.to\(tl\.(?:bfloat16|float16|float8\w*)\)|tmp\d+ [*/] tmp\d+",
        triton,
    )
    return (
        foreign_operators(names, contract)
        + foreign_operators(calls, contract)
        + re.findall(r"extern_kernels\.\w+", graph)
        + [use for use in in_cpp if "::loadu" not in use]
        + in_triton
    )


def collect(folder: pathlib.Path) -> list[str]:
    """From now on, the source of each graph that is compiled in this process. folder: for what is compiled, new.

    Code from a cache is not generated, so there must be none."""
    from torch._inductor.graph import GraphLowering

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    os.environ["VLLM_DISABLE_COMPILE_CACHE"] = "1"
    code: list[str] = []
    GraphLowering.save_output_code = staticmethod(code.append)
    return code
