"""What counts as arithmetic in generated code: a positive control of each kind, and moves that are none."""

import pytest

from samebits.probe.generated import foreign_code, foreign_operators

KERNEL = """
@triton.jit
def triton_poi_fused_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    tmp0 = tl.load(in_ptr0 + (xindex), None).to(tl.float32)
    {body}
    tl.store(out_ptr0 + (xindex), tmp0, None)
''', device_str='cuda')
"""

CPP = """
cpp_fused_clone_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''
    auto tmp0 = at::vec::Vectorized<float>::loadu(in_ptr0, 16);
    {body}
''')
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# Topologically Sorted Source Nodes: [x], Original ATen: [aten.rsqrt, aten.clone]", ["aten::rsqrt"]),
        ("    extern_kernels.mm(buf0, buf1, out=buf2)", ["extern_kernels.mm"]),
        ("    buf1 = torch.ops.vllm.fused_add_rms_norm.default(buf0)", ["vllm::fused_add_rms_norm"]),
        ("    buf1 = torch.ops.batch_invariant.rms_norm.default(buf0, arg1, 1e-06)", []),
        ("    buf1 = torch.ops.vllm.unified_attention_with_output.default(buf0)", []),
        (KERNEL.format(body="tmp1 = libdevice.rsqrt(tmp0)"), ["libdevice.rsqrt"]),
        (KERNEL.format(body="tmp2 = tmp0 * tmp1"), ["tmp0 * tmp1"]),
        (KERNEL.format(body="tmp1 = tmp0.to(tl.bfloat16)"), [".to(tl.bfloat16)"]),
        (KERNEL.format(body="tmp1 = tl.sum(tmp0, 1)[:, None]"), ["tl.sum"]),
        (KERNEL.format(body=""), []),
        (CPP.format(body="auto tmp2 = at::vec::Vectorized<float>(tmp1);"), []),
        (
            CPP.format(body="auto tmp2 = at::vec::Vectorized<float>(static_cast<float>(0.5));"),
            ["Vectorized<float>(", "static_cast<float>("],
        ),
        (CPP.format(body="auto tmp2 = at::vec::convert<at::BFloat16>(tmp1);"), ["convert<at::BFloat16>("]),
        ("# Original ATen: [aten.embedding, aten.slice]" + KERNEL.format(body="tmp2 = tmp0 + tmp1"), []),  # an index
    ],
)
def test_arithmetic_is_found_and_moves_are_not(text: str, found: list[str]) -> None:
    assert foreign_code(text) == found


def test_an_operator_that_is_not_among_the_contracts_is_foreign() -> None:
    assert foreign_operators(["batch_invariant::linear.default", "aten::view"], {"linear"}) == []
    assert foreign_operators(["batch_invariant::linear", "vllm::all_reduce"], set()) == [
        "batch_invariant::linear",
        "vllm::all_reduce",
    ]
