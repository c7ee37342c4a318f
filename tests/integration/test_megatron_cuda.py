"""The aligned layer spec's calls on CUDA, as far as a CPU can tell: stand-ins for the libraries, in other processes.

The stand-ins have the libraries' schemas; what they compute is torch's. Bits are compared where there is a card.
"""

import json
import subprocess
import sys

import pytest

STAND_INS = """
import json
import sys
import torch
from megatron.core.transformer.aligned import cuda

CALLS, WRONG = [], json.loads(sys.argv[1])
ours = torch.library.Library("batch_invariant", "FRAGMENT")
ours.define("cublaslt_gemm(Tensor x, Tensor weight) -> Tensor")
ours.define("reference_gemm(Tensor x, Tensor weight, Tensor? bias=None, bool fp32=False) -> Tensor")

def product(x, weight):  # row by row, so that a row's bits are its own
    return torch.stack([(row.float() * weight.float()).sum(-1) for row in x]).to(torch.bfloat16)

def cublaslt(x, weight):
    CALLS.append(["cublaslt", x.shape[0]])
    if WRONG == "none":
        raise RuntimeError("cuBLASLt has no kernel")
    out = product(x, weight)
    if x.shape[0] == WRONG:
        out.view(torch.int16)[-1, -1] ^= 1
    return out

def reference(x, weight, bias=None, fp32=False):
    CALLS.append(["reference", x.shape[0]])
    return product(x, weight)

ours.impl("cublaslt_gemm", cublaslt, "CPU")
ours.impl("reference_gemm", reference, "CPU")
"""

LINEAR = (
    STAND_INS
    + """
served = {}
for m in (1, 64, 65, 100, 128, 129, 200):
    x, weight = torch.randn(1, m, 24).bfloat16(), torch.randn(16, 24).bfloat16()
    out = cuda.linear(x, weight)
    assert out.shape == (1, m, 16) and torch.equal(out[0], product(x[0], weight))
    served[m] = CALLS[-1][0]
    assert CALLS[-1][1] == m
tried = len(CALLS)
cuda.linear(torch.randn(128, 24).bfloat16(), torch.randn(16, 24).bfloat16())
assert len(CALLS) == tried + 1, "a range is tried once"
print(json.dumps(served))
"""
)

# The schema is that of the library in vLLM's wheel for GPUs.
ATTENTION = (
    STAND_INS
    + """
names = "q k v k_new v_new q_v out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k max_seqlen_q "
names += "max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale "
names += "v_descale softmax_scale is_causal window_size_left window_size_right softcap is_rotary_interleaved "
names += "scheduler_metadata num_splits pack_gqa sm_margin s_aux cp_world_size cp_rank cp_tot_seqused_k"
names = names.split()
kinds = ["Tensor", "Tensor", "Tensor", *["Tensor?"] * 9, "int?", "int?", *["Tensor?"] * 9]
kinds += ["float", "bool", "int", "int", "float", "bool", "Tensor?"]
kinds += ["int", "bool?", "int", "Tensor?", "int", "int", "Tensor?"]
theirs = torch.library.Library("_vllm_fa3_C", "DEF")
theirs.define(f"fwd({', '.join(f'{k} {n}' for k, n in zip(kinds, names, strict=True))}) -> Tensor[]")
GIVEN = {}

def fwd(*arguments):
    GIVEN.update(zip(names, arguments, strict=True))
    outs, sums = [], []
    starts = GIVEN["cu_seqlens_q"].tolist()
    for begin, end in zip(starts, starts[1:]):
        q, k, v = (GIVEN[n][begin:end].transpose(0, 1).double() for n in "qkv")
        k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], 0) for t in (k, v))
        scores = (q @ k.transpose(1, 2) * GIVEN["softmax_scale"]).masked_fill(
            torch.ones(end - begin, end - begin).triu(1).bool(), -torch.inf
        )
        outs.append((scores.softmax(-1) @ v).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    return [torch.cat(outs).to(GIVEN["q"].dtype), torch.cat(sums, 1).float(), torch.empty(0), torch.empty(0)]

theirs.impl("fwd", fwd, "CPU")
starts = torch.tensor([0, 5, 6, 17], dtype=torch.int32)
q, k, v = torch.randn(17, 8, 128), torch.randn(17, 2, 128), torch.randn(17, 2, 128)
out, lse = cuda.attention(q, k, v, starts, 11, 128**-0.5)
assert out.shape == q.shape and lse.shape == (17, 8) and lse.dtype == torch.float32
alone, alone_lse = cuda.attention(q[6:], k[6:], v[6:], torch.tensor([0, 11], dtype=torch.int32), 11, 128**-0.5)
assert torch.allclose(out[6:], alone) and torch.allclose(lse[6:], alone_lse)
first = (q[0] * k[0].repeat_interleave(4, 0)).sum(-1) * 128**-0.5  # a token alone: its LSE is its score
assert torch.allclose(lse[0], first, atol=1e-5) and torch.allclose(out[0], v[0].repeat_interleave(4, 0))
plain = {n: v for n, v in GIVEN.items() if v is not None and not isinstance(v, torch.Tensor)}
cuda.attention(q[:1], k[:1], v[:1], torch.tensor([0, 1], dtype=torch.int32), 1, 128**-0.5)
print(json.dumps({**plain, "of one token": GIVEN["max_seqlen_q"]}))
"""
)


def run(code: str, wrong: object = None) -> dict[str, object]:
    words = [sys.executable, "-c", code, json.dumps(wrong)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


@pytest.mark.parametrize(
    ("wrong", "from_65", "from_129"),
    [
        (None, "cublaslt", "cublaslt"),
        (128, "reference", "cublaslt"),  # the end of a range
        (65, "reference", "cublaslt"),  # its beginning
        (192, "cublaslt", "reference"),  # in the middle of the other
        ("none", "reference", "reference"),
    ],
)
def test_a_product_is_cublaslts_where_its_bits_are_the_references(wrong: object, from_65: str, from_129: str) -> None:
    want = {
        1: "reference",
        64: "reference",
        **dict.fromkeys((65, 100, 128), from_65),
        **dict.fromkeys((129, 200), from_129),
    }
    assert run(LINEAR, wrong) == {str(m): name for m, name in want.items()}


def test_flash_attention_is_called_as_the_engine_calls_it() -> None:
    """Causal, one split, no schedule, nothing else; never told of a longest query of one token: there it differs."""
    said = run(ATTENTION)
    assert said.pop("of one token") == 2
    assert said == {
        "max_seqlen_q": 11,
        "max_seqlen_k": 11,
        "softmax_scale": 128**-0.5,
        "is_causal": True,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "is_rotary_interleaved": True,
        "num_splits": 1,
        "sm_margin": 0,
        "cp_world_size": 1,
        "cp_rank": 0,
    }
