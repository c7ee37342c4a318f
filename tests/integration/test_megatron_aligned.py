"""The aligned layer spec: the forward is the operators', bit for bit; the backward is the model's, within rounding.

Forwards are compared with a plain forward that is written here as an engine runs it: one sequence at a time, over a
paged cache, with the residual added inside of the norm. Gradients are compared with FP64 autograd.
"""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernels import Kernels
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_aligned_layer_specs import PLAIN, get_gpt_aligned_block_spec
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.aligned import functions
from megatron.core.transformer.module import Float16Module
from megatron_reference import Result, assert_gradients_are_the_references, installed, run, same, unequal
from megatron_steps import ALIGNED_CASES

EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A small Qwen3."""

    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 64
    heads: int = 4
    groups: int = 2
    hidden: int = 192
    ffn: int = 320
    layers: int = 2
    vocabulary: int = 97
    rope_base: int = 10_000
    tied: bool = False

    def config(self, **changes: Any) -> TransformerConfig:
        plain: dict[str, Any] = {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "ffn_hidden_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_query_groups": self.groups,
            "kv_channels": self.head_dim,
            "qk_layernorm": True,
            "normalization": "RMSNorm",
            "layernorm_epsilon": EPS,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "params_dtype": self.dtype,
            "bf16": self.dtype is torch.bfloat16,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
            "apply_rope_fusion": False,
            "gradient_accumulation_fusion": False,
            "persist_layer_norm": False,
            "use_cpu_initialization": True,
        }
        return TransformerConfig(**plain | changes)

    def model(self, aligned: bool = True, **changes: Any) -> Any:
        """A `GPTModel` with weights of seed 5 and gains that are not one; wrapped as verl wraps it."""
        torch.manual_seed(5)
        config = self.config()
        spec: Any = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
        arguments: dict[str, Any] = {
            "config": config,
            "transformer_layer_spec": get_gpt_aligned_block_spec(config) if aligned else spec,
            "vocab_size": self.vocabulary,
            "max_sequence_length": 512,
            "position_embedding_type": "rope",
            "rotary_base": self.rope_base,
            "share_embeddings_and_output_weights": self.tied,
        }
        model = GPTModel(**arguments | changes)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                scale = 0.1 if "layernorm" in name else parameter.float().std()
                parameter.add_(torch.randn(parameter.shape).to(parameter.dtype) * scale)
        return Float16Module(config, model) if config.bf16 else model


GEOMETRIES = {
    "bf16": Geometry(),
    "fp32": Geometry(dtype=torch.float32),
    "bf16, tied": Geometry(tied=True),
    "bf16, head dim 128": Geometry(head_dim=128, heads=2, groups=1, rope_base=1_000_000),
    "fp32, head dim 128, no groups": Geometry(dtype=torch.float32, head_dim=128, heads=2, groups=2),
}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """tokens int64 [B, S] -> logits [B, S, V]."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model(input_ids=tokens, position_ids=positions, attention_mask=None)


def random_tokens(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, Geometry.vocabulary, shape, generator=torch.Generator().manual_seed(seed))


# --- the forward's bits


@torch.no_grad()
def engine_logits(model: Any, geometry: Geometry, tokens: torch.Tensor) -> torch.Tensor:
    """tokens int64 [S] -> logits [S, V], by the operators alone, as an engine that serves this one sequence."""
    operators, g = torch.ops.batch_invariant, geometry
    weights = {name.removeprefix("module."): p.detach() for name, p in model.named_parameters()}
    length, block = len(tokens), 16
    blocks = math.ceil(length / block)
    table = torch.arange(blocks, dtype=torch.int32).flip(0)  # a cache in no order
    slots = torch.arange(length)
    slots = table[slots // block].long() * block + slots % block
    frequencies = 1.0 / g.rope_base ** (torch.arange(0, g.head_dim, 2, dtype=torch.float) / g.head_dim)
    angles = torch.outer(torch.arange(512, dtype=torch.float), frequencies)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).to(g.dtype)

    x, residual = weights["embedding.word_embeddings.weight"][tokens], None
    for layer in range(g.layers):
        w = {k.removeprefix(f"decoder.layers.{layer}."): v for k, v in weights.items()}
        if residual is None:
            x, residual = operators.rms_norm(x, w["input_layernorm.weight"], EPS), x
        else:
            x, residual = operators.add_rms_norm(x, residual, w["input_layernorm.weight"], EPS)
        packed = w["self_attention.linear_qkv.weight"].view(g.groups, -1, g.head_dim, g.hidden)
        q, k, v = (part.reshape(-1, g.hidden) for part in packed.split([g.heads // g.groups, 1, 1], dim=1))
        q, k, v = (operators.linear(x, rows).view(length, -1, g.head_dim) for rows in (q, k, v))
        q = operators.rms_norm(q, w["self_attention.q_layernorm.weight"], EPS)
        k = operators.rms_norm(k, w["self_attention.k_layernorm.weight"], EPS)
        q, k = operators.rotary_embedding(torch.arange(length), q, k, g.head_dim, cos_sin)
        keys, values = torch.zeros(2, blocks, g.groups, block, g.head_dim, dtype=g.dtype)
        operators.reshape_and_cache(k, v, keys, values, slots)
        one = torch.tensor([length], dtype=torch.int32)
        starts = torch.tensor([0, length], dtype=torch.int32)
        context, _ = operators.attention(q, keys, values, table[None], starts, one, g.head_dim**-0.5)
        x = operators.linear(context.view(length, -1), w["self_attention.linear_proj.weight"])
        x, residual = operators.add_rms_norm(x, residual, w["pre_mlp_layernorm.weight"], EPS)
        x = operators.silu_and_mul(operators.linear(x, w["mlp.linear_fc1.weight"]))
        x = operators.linear(x, w["mlp.linear_fc2.weight"])
    x, _ = operators.add_rms_norm(x, residual, weights["decoder.final_layernorm.weight"], EPS)
    output = weights.get("output_layer.weight", weights["embedding.word_embeddings.weight"])
    return operators.linear(x, output)


@pytest.mark.parametrize("name", list(GEOMETRIES))
def test_the_forward_is_the_operators(name: str) -> None:
    """Every valid token of a right-padded batch, beside one sequence at a time."""
    geometry = GEOMETRIES[name]
    model, tokens, lengths = geometry.model(), random_tokens(4, 70), [70, 1, 33, 64]
    ours = logits_of(model, tokens)
    assert ours.requires_grad and ours.dtype == torch.float32
    for row, length in enumerate(lengths):
        engine = engine_logits(model, geometry, tokens[row, :length])
        assert engine.dtype == geometry.dtype
        assert same(ours[row, :length].detach(), engine.float()), f"sequence {row} of {length} tokens"
        labels = tokens[row, :length].roll(-1)
        log_probs = functions.selected_log_prob(ours[row, :length], labels).detach()
        assert same(log_probs, torch.ops.batch_invariant.log_softmax(engine).gather(1, labels[:, None])[:, 0])


@pytest.mark.parametrize("name", ["bf16", "fp32"])
def test_neighbours_and_padding_change_no_bit(name: str) -> None:
    model, tokens = GEOMETRIES[name].model(), random_tokens(5, 48)
    whole = logits_of(model, tokens).detach()
    for row in range(5):
        assert same(logits_of(model, tokens[row : row + 1]).detach()[0], whole[row]), f"row {row} alone"
    for micro_batch in (2, 3):
        parts = torch.cat([logits_of(model, part).detach() for part in tokens.split(micro_batch)])
        assert same(parts, whole), f"micro-batches of {micro_batch}"
    for longer in (49, 65, 130):
        padded = torch.cat((tokens, random_tokens(5, longer - 48, seed=longer)), dim=1)
        assert same(logits_of(model, padded).detach()[:, :48], whole), f"padded to {longer}"
    with torch.no_grad():
        assert same(logits_of(model, tokens), whole), "without gradients"
    changed = tokens.clone()
    changed[2, 20] = (changed[2, 20] + 1) % Geometry.vocabulary
    ours = logits_of(model, changed).detach()
    assert same(ours[:, :20], whole[:, :20]) and not torch.equal(ours[2, 20:], whole[2, 20:])


# Operators that move or convert numbers.
MOVES = {"_to_copy", "_unsafe_view", "cat", "clone", "detach", "embedding", "select", "slice"}
MOVES |= {"split_with_sizes", "transpose", "unsqueeze", "view"}
# What torch computes, and where: the residual's sum, which the engine's add_rms_norm rounds alike, and the RoPE table,
# which a test compares. Nothing else may add or multiply, and these may nowhere else.
BY_TORCH = {
    ("aten.add", "TransformerLayer"),
    ("aten.arange", "RotaryEmbedding"),
    ("aten.add", "RotaryEmbedding"),
    ("aten.mul", "RotaryEmbedding"),
    ("aten.cos", "AlignedSelfAttention"),
    ("aten.sin", "AlignedSelfAttention"),
}


@pytest.mark.parametrize("gradients", [True, False], ids=["training", "recomputing"])
@pytest.mark.parametrize("name", ["bf16", "bf16, tied"])
def test_no_other_kernel_computes(name: str, gradients: bool) -> None:
    geometry, tokens = GEOMETRIES[name], random_tokens(2, 20)
    model = geometry.model()
    with Kernels() as kernels, torch.set_grad_enabled(gradients):
        functions.selected_log_prob(logits_of(model, tokens), tokens)
    operators = {f"batch_invariant.{name}" for name in functions.OPERATORS if name != "contract"}
    seen = {one for one in kernels.seen if one[0].removeprefix("aten.") not in MOVES}
    assert {name for name, _ in seen} >= operators
    assert {one for one in seen if one[0] not in operators} == BY_TORCH
    assert kernels.seen.count(("aten.add", "TransformerLayer")) == 2 * geometry.layers


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("base", [10_000, 1_000_000, 5_000_000])
def test_the_rope_table_is_vllms(head_dim: int, base: int) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    model = Geometry(head_dim=head_dim, rope_base=base, layers=1).model()
    for dtype in (torch.bfloat16, torch.float32):
        with set_current_vllm_config(VllmConfig()):
            theirs = RotaryEmbedding(head_dim, head_dim, 4096, float(base), True, dtype).cos_sin_cache
        for length in (1, 7, 33, 4096):
            angles = model.module.rotary_pos_emb(length)[:, 0, 0, : head_dim // 2]
            ours = functions.cos_sin_table(angles, dtype)
            assert torch.equal(ours, theirs[:length]) and ours.dtype == theirs.dtype == dtype


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.1, 3.0])
def test_the_temperature_divides_as_ieee_says(temperature: float) -> None:
    """FP32 by FP32, rounded once: FP64 has more than twice the bits, so that rounding its quotient again is exact.

    As vLLM's sampler divides, in place, a row by its own, and as the trainer does, out of place and broadcast.
    """
    from vllm.v1.sample.sampler import Sampler

    logits = torch.randn(7, 1003, generator=torch.Generator().manual_seed(4)) * 20
    divisor = torch.linspace(temperature, temperature + 0.1, 7)
    exact = (logits.double() / divisor.double()[:, None]).float()
    assert same(Sampler.apply_temperature(logits.clone(), divisor, all_random=True), exact)
    assert same(logits.view(7, 17, 59).float() / divisor[:, None, None], exact.view(7, 17, 59))
    for row in range(7):
        alone = Sampler.apply_temperature(logits[row : row + 1].clone(), divisor[row : row + 1], all_random=True)
        assert same(alone[0], exact[row]), f"row {row} alone"


# --- gradients


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [S, B, H, D], k and v [S, B, KVH, D] -> [S, B, H * D]."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), v).flatten(2)


def rotated(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos_sin.to(q).unsqueeze(1).chunk(2, dim=-1)
    parts = [t.chunk(2, dim=-1) for t in (q, k)]
    turned = [torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1) for low, high in parts]
    return turned[0], turned[1]


ANGLES = torch.outer(torch.arange(33.0), torch.rand(32, generator=torch.Generator().manual_seed(1)))
LABELS = random_tokens(33)
Function = Callable[..., Any]
# Per function: shapes of its inputs, the function, and the same in plain PyTorch for any dtype.
FUNCTIONS: dict[str, tuple[list[tuple[int, ...]], Function, Function]] = {
    "linear": ([(33, 3, 80), (50, 80)], functions.linear, lambda x, w: x @ w.T),
    "rms_norm": (
        [(33, 3, 80), (80,)],
        lambda x, w: functions.rms_norm(x, w, EPS),
        lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * w,
    ),
    "rotary_embedding": (
        [(33, 4, 64), (33, 2, 64)],
        lambda q, k: functions.rotary_embedding(q, k, torch.arange(33), functions.cos_sin_table(ANGLES, q.dtype)),
        lambda q, k: rotated(q, k, torch.cat((ANGLES.cos(), ANGLES.sin()), dim=-1)),
    ),
    "silu_and_mul": (
        [(33, 3, 160)],
        functions.silu_and_mul,
        lambda x: torch.nn.functional.silu(x[..., :80]) * x[..., 80:],
    ),
    "attention": (
        [(33, 3, 4, 64), (33, 3, 2, 64), (33, 3, 2, 64)],
        lambda q, k, v: functions.attention(q, k, v, 64**-0.5),
        causal_attention,
    ),
    "attention, head dim 128": (
        [(33, 1, 2, 128), (33, 1, 2, 128), (33, 1, 2, 128)],
        lambda q, k, v: functions.attention(q, k, v, 128**-0.5),
        causal_attention,
    ),
    "selected_log_prob": (
        [(33, 97)],
        lambda x: functions.selected_log_prob(x, LABELS),
        lambda x: x.log_softmax(-1).gather(1, LABELS[:, None])[:, 0],
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_a_functions_gradients_are_autograds(name: str, dtype: torch.dtype) -> None:
    """Relative L2 error of at most 2u in bf16: a gradient is rounded once, what it is made of (table, out) once before.

    In fp32, sums of up to 99 terms round too: 32u.
    """
    shapes, function, plain = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(17)
    inputs = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    outs, expected = function(*inputs), plain(*wide)
    outs, expected = ([o] if isinstance(o, torch.Tensor) else list(o) for o in (outs, expected))
    weights = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in outs]
    ours = torch.autograd.grad(outs, inputs, weights)
    theirs = torch.autograd.grad(expected, wide, [w.double() for w in weights])
    tolerance = {torch.bfloat16: 2 * 2**-8, torch.float32: 32 * 2**-24}[dtype]
    for x, one, two in zip(inputs, ours, theirs, strict=True):
        error = ((one - two).norm() / two.norm()).item()
        print(f"{name} {dtype}: input {tuple(x.shape)}, relative error {error:.2e}, tolerance {tolerance:.2e}")
        assert one.dtype == dtype and error <= tolerance


def test_a_device_without_a_backward_is_named() -> None:
    tensors = [torch.empty(1, 2, 1, 64, device="meta") for _ in range(5)]
    with pytest.raises(NotImplementedError, match="none on meta"):
        functions._attention_gradients(*tensors, torch.empty(1, 2, 1, device="meta"), 1.0)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Two training steps of every case with Megatron's own DDP, schedule and optimizers."""
    return run(tmp_path_factory.mktemp("aligned"), installed(), "--aligned")


@pytest.mark.parametrize("name", ["bf16", "bf16-tied", "fp32", "fp32-tied"])
def test_gradients_are_those_of_an_independent_model(steps: dict[str, Result], name: str) -> None:
    assert_gradients_are_the_references(name, steps[name])


@pytest.mark.parametrize("name", list(ALIGNED_CASES))
def test_two_steps_train(steps: dict[str, Result], name: str) -> None:
    result = steps[name]
    losses = [step[key] for step in result["steps"] for key in ("loss", "loss_after")]
    print(f"{name}: {result['optimizer']}, losses {losses}")
    assert losses[1] < losses[0] and losses[3] < losses[2] and losses[3] < losses[1]
    mains = result["initial_mains"]
    for step in result["steps"]:
        for parameter, main in step["mains"].items():
            assert step["gradients"][parameter].any() and torch.isfinite(step["gradients"][parameter]).all()
            assert same(main.to(result["case"]["dtype"]), step["parameters"][parameter]), parameter
            assert not torch.equal(main, mains[parameter]), f"the FP32 main of {parameter} did not change"
        mains = step["mains"]


@pytest.mark.parametrize("name", ["bf16-recompute", "bf16-recompute-attention"])
def test_recomputation_changes_no_bit(steps: dict[str, Result], name: str) -> None:
    assert unequal(steps["bf16"]["steps"], steps[name]["steps"]) == []


@pytest.mark.parametrize("name", ["bf16", "bf16-tied", "bf16-sharded-checkpoint", "fp32"])
def test_a_step_after_loading_the_saved_state_is_the_step_without(steps: dict[str, Result], name: str) -> None:
    assert unequal(steps[name]["resumed"], steps[name]["steps"][1]) == []


def test_the_parameters_are_those_of_the_local_spec() -> None:
    """Names, shapes, dtypes and what Megatron wrote on them: a checkpoint of one loads into the other."""
    models = [Geometry().model(aligned) for aligned in (True, False)]
    ours, theirs = ({n: (p.shape, p.dtype, sorted(vars(p))) for n, p in m.named_parameters()} for m in models)
    assert ours == theirs
    models[0].load_state_dict(models[1].state_dict())


# --- refusals

WRONG: dict[str, Any] = {
    "num_moe_experts": 4,
    "mtp_num_layers": 1,
    "experimental_attention_variant": "dsa",
    "normalization": "LayerNorm",
    "activation_func": torch.nn.functional.gelu,
    "activation_func_clamp_value": 7.0,
    "softmax_scale": 0.5,
    "softmax_type": "learnable",
    "window_size": (16, 0),
    "rotary_base_per_layer": [1.0],
    "no_rope_freq": [1, 0],
    "fp8": "hybrid",
    "fp4": "e2m1",
}


@pytest.mark.parametrize("name", [*PLAIN, "kv_channels", "params_dtype"])
def test_what_has_no_row_is_refused_by_name(name: str) -> None:
    config = Geometry().config()
    plain = PLAIN.get(name)
    other = {"kv_channels": 96, "params_dtype": torch.float16}.get(name, WRONG.get(name))
    if other is None:
        other = not plain if isinstance(plain, bool) else plain + 1
    setattr(config, name, other)
    with pytest.raises(NotImplementedError, match=rf"no row for {name}=.*: change that, or use another layer spec"):
        get_gpt_aligned_block_spec(config)


def test_all_that_is_wrong_is_named_at_once() -> None:
    with pytest.raises(NotImplementedError, match=r"hidden_dropout=0\.1, .*add_qkv_bias=True"):
        get_gpt_aligned_block_spec(Geometry().config(hidden_dropout=0.1, add_qkv_bias=True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"position_embedding_type": "none"}, "position_embedding_type='none'"),
        ({"rotary_percent": 0.5}, r"rotary_percent=0\.5"),
        ({"rope_scaling": True}, "rope_scaling=True"),
        ({"seq_len_interpolation_factor": 2.0}, r"seq_len_interpolation_factor=2\.0"),
        ({"pre_process": False}, "pre_process=False"),
    ],
)
def test_a_model_with_another_rope_or_a_part_of_one_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(NotImplementedError, match=f"no row for {said}"):
        Geometry().model(**change)


def test_a_mask_is_refused() -> None:
    tokens = random_tokens(1, 4)
    with pytest.raises(ValueError, match=r"no place for attention_mask: .*right-padded"):
        Geometry().model()(tokens, torch.arange(4)[None], torch.ones(1, 1, 4, 4, dtype=torch.bool))


def in_a_fresh_interpreter(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


LOADED = """
import sys
from megatron.core.transformer.aligned.functions import load_operators
said = load_operators()
assert said == load_operators()
print("vllm" in sys.modules, said)
"""
MISSING = """
import sys
sys.modules["vllm"] = None
from megatron.core.transformer.aligned.functions import load_operators
try:
    load_operators()
except RuntimeError as error:
    print(error)
"""


def test_the_operators_are_loaded_without_importing_vllm() -> None:
    imported, contract = in_a_fresh_interpreter(LOADED).split(" ", 1)
    assert imported == "False" and contract == torch.ops.batch_invariant.contract()


def test_without_the_operators_the_remedy_is_named() -> None:
    said = in_a_fresh_interpreter(MISSING)
    assert "torch.ops.batch_invariant.attention, contract, linear" in said and "install a vLLM" in said


# --- speed


@pytest.mark.evidence
def test_a_step_takes_at_most_a_fifth_longer_than_with_the_local_spec() -> None:
    """Two layers, hidden 512, four sequences of 64; interleaved, the best processor time of forward and backward."""
    geometry = Geometry(hidden=512, ffn=1536, heads=8, groups=4)
    models = {name: geometry.model(name == "aligned") for name in ("aligned", "local")}
    tokens, best = random_tokens(4, 64), dict.fromkeys(models, math.inf)
    for _ in range(4):
        for name, model in models.items():
            start = time.process_time()
            logits = logits_of(model, tokens)
            if name == "aligned":
                log_probs = functions.selected_log_prob(logits, tokens)
            else:
                log_probs = logits.log_softmax(-1).gather(-1, tokens[..., None])
            log_probs.sum().backward()
            best[name] = min(best[name], time.process_time() - start)
    ratio = best["aligned"] / best["local"]
    print(f"aligned {best['aligned']:.3f} s, local {best['local']:.3f} s of processor time, ratio {ratio:.3f}")
    assert ratio <= 1.2
