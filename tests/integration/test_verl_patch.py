"""What the verl patch adds, in parts: the cpu platform, Hugging Face names, capsules, seeds, refusals."""

import hashlib
import inspect
import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from samebits.evidence.capsule import read_capsule
from samebits.recipe import model as recipe_model

# verl chooses its platform when it is imported; the children of these tests choose for themselves.
os.environ["VERL_PLATFORM"] = "cpu"

from verl.plugin.platform import get_platform
from verl.trainer.ppo.v1 import trainer_sync_recorded
from verl.trainer.ppo.v1.trainer_sync_recorded import PPOTrainerSyncRecorded
from verl.utils import log_prob_record
from verl.workers.engine.megatron.hf_names import DenseDecoderNames, write_checkpoint
from verl.workers.engine.megatron.local_spec_impl import MegatronLocalSpecEngine

get_platform()
del os.environ["VERL_PLATFORM"]


def python(code: str, *arguments: str, **environment: str) -> str:
    """What a fresh interpreter prints last."""
    plain = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env={**plain, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


# --- the platform


def test_the_cpu_platform_is_chosen_by_name() -> None:
    platform = get_platform()
    assert (platform.device_name, platform.communication_backend_name()) == ("cpu", "gloo")
    assert torch.ones(1).to(platform.current_device()).device.type == "cpu"
    assert not platform.is_ipc_supported()


def test_the_cpu_platform_is_never_detected() -> None:
    """A CPU-only process of a GPU job keeps the CUDA platform."""
    code = "from verl.plugin.platform import get_platform; print(get_platform().device_name)"
    assert python(code) == "cuda"
    assert python(code, VERL_PLATFORM="cpu") == "cpu"


@pytest.mark.parametrize("function", ["initialize_global_process_group", "initialize_global_process_group_ray"])
def test_a_process_group_on_the_cpu_is_gloo(function: str) -> None:
    code = (
        f"from verl.utils.distributed import {function} as start; start(timeout_second=60); "
        "import torch; t = torch.ones(2); torch.distributed.all_reduce(t); print(t.tolist())"
    )
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    assert python(code, VERL_PLATFORM="cpu", **one) == "[1.0, 1.0]"


# --- names


@given(
    groups=st.integers(1, 4), per_group=st.integers(1, 4), head_dim=st.sampled_from([2, 4]), hidden=st.integers(1, 5)
)
def test_qkv_taken_apart_and_joined_is_the_same(groups: int, per_group: int, head_dim: int, hidden: int) -> None:
    config = recipe_model.config(1, 1024)
    config.num_key_value_heads, config.num_attention_heads, config.head_dim = groups, groups * per_group, head_dim
    names = DenseDecoderNames(config)
    fused = torch.randn(groups * (per_group + 2) * head_dim, hidden)
    q, k, v = names._split_qkv(fused)
    assert q.shape == (groups * per_group * head_dim, hidden) and k.shape == v.shape == (groups * head_dim, hidden)
    assert torch.equal(names._join_qkv([q, k, v]), fused)


def test_q_rows_stay_in_the_order_of_the_heads() -> None:
    """Two groups of two query heads, head_dim 1. Megatron: q0 q1 k0 v0 q2 q3 k1 v1."""
    config = recipe_model.config(1, 1024)
    config.num_key_value_heads, config.num_attention_heads, config.head_dim = 2, 4, 1
    fused = torch.tensor([0.0, 1, 10, 20, 2, 3, 11, 21]).view(8, 1)
    q, k, v = DenseDecoderNames(config)._split_qkv(fused)
    assert (q.flatten().tolist(), k.flatten().tolist(), v.flatten().tolist()) == ([0, 1, 2, 3], [10, 11], [20, 21])


class Parameters(torch.nn.Module):
    """A module with one parameter under a dotted Megatron name."""

    def __init__(self, name: str):
        super().__init__()
        *path, leaf = name.split(".")
        inner: torch.nn.Module = self
        for part in path:
            inner.add_module(part, torch.nn.Module())
            inner = inner.get_submodule(part)
        inner.register_parameter(leaf, torch.nn.Parameter(torch.zeros(4, 2)))


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: pathlib.Path) -> None:
    save_file({"other.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(KeyError, match=r"model\.norm\.weight is missing"):
        DenseDecoderNames(recipe_model.config(1, 1024)).load_weights(
            [Parameters("decoder.final_layernorm.weight")], str(tmp_path)
        )


def test_a_checkpoint_with_a_tensor_too_many_is_refused(tmp_path: pathlib.Path) -> None:
    save_file({"model.norm.weight": torch.ones(4, 2), "stray.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(KeyError, match=r"no parameter takes stray\.weight"):
        DenseDecoderNames(recipe_model.config(1, 1024)).load_weights(
            [Parameters("decoder.final_layernorm.weight")], str(tmp_path)
        )


def test_a_parameter_without_a_name_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"router.*has no Hugging Face name"):
        list(
            DenseDecoderNames(recipe_model.config(1, 1024)).export_weights(
                [Parameters("decoder.layers.0.router.weight")]
            )
        )


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm"),
        ("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm"),
        ("input_layernorm.weight", "input_layernorm"),
    ],
)
def test_a_norm_has_one_name_whichever_module_keeps_its_gain(name: str, theirs: str) -> None:
    """Transformer Engine keeps it with the linear layer behind the norm."""
    names = DenseDecoderNames(recipe_model.config(1, 1024))
    ((found, _),) = names.export_weights([Parameters(f"decoder.layers.0.{name}")])
    assert found == f"model.layers.0.{theirs}.weight"


def test_a_written_checkpoint_is_read_back(tmp_path: pathlib.Path) -> None:
    weights = {"a.weight": torch.randn(3, 2).bfloat16(), "b.weight": torch.randn(4).bfloat16()}
    write_checkpoint(weights.items(), tmp_path)
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == weights.keys() and all(torch.equal(read[name], weights[name]) for name in weights)


# --- capsules and seeds


def test_what_the_trainer_writes_is_a_capsule_to_the_judge(tmp_path: pathlib.Path) -> None:
    tensors = {
        "probe_tokens": torch.ones(1, 2, dtype=torch.int64),
        "probe_length": torch.tensor([2]),
        "probe_prompt_length": torch.tensor([1]),
        "probe_log_probs": torch.tensor([[0.0, -0.5]]),
    }
    table = {"w": log_prob_record.describe(torch.ones(2, 2).bfloat16())}
    from runs import execution

    sidecar = {"kind": "sync", "sync": 0, "weights": "theta0", "exported": table, "loaded": table}
    log_prob_record.write_capsule(tmp_path / "sync-0000", {**sidecar, "execution": execution()}, tensors)
    capsule = read_capsule(tmp_path / "sync-0000")
    assert capsule.tensors["probe_log_probs"].read().tolist() == [[0.0, -0.5]]
    with pytest.raises(FileExistsError, match="an output folder of its own"):
        log_prob_record.write_capsule(tmp_path / "sync-0000", sidecar, tensors)


def test_a_description_is_of_the_bytes() -> None:
    tensor = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    said = log_prob_record.describe(tensor)
    assert said == {
        "dtype": "bfloat16",
        "shape": [1, 2],
        "sha256": hashlib.sha256(bytes([0x80, 0x3F, 0x00, 0x40])).hexdigest(),
    }
    assert log_prob_record.describe(-torch.zeros(1))["sha256"] != log_prob_record.describe(torch.zeros(1))["sha256"]


@given(st.integers(0, 2**31), st.integers(1, 10**6), st.integers(0, 10**9), st.integers(0, 10**4))
def test_a_sampling_seed_is_a_seed(base: int, step: int, index: int, session: int) -> None:
    seed = log_prob_record.sampling_seed(base, step, index, session)
    assert 0 <= seed < 2**63
    assert seed == log_prob_record.sampling_seed(base, step, index, session)
    assert seed != log_prob_record.sampling_seed(base, step, index, session + 1)


class Rows(list[Any]):
    """What a field of the transfer queue gives: rows that can be unbound."""

    def unbind(self) -> list[Any]:
        return list(self)


def test_a_step_is_recorded_by_the_index_of_each_sample(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue returns rows in any order, the update takes them in another, and a filler row stands for no sample."""
    from runs import execution

    lengths, filler = {0: 3, 1: 2, 2: 4, 3: 2}, 1
    returned, taken = [2, 0, 3, 1], [3, 1, 0, 2]

    def rows(make: Callable[[int], Any]) -> Rows:
        return Rows(make(number) for number in returned)

    def log_probs(number: int, path: float) -> torch.Tensor:
        return -(number + path + torch.arange(lengths[number]) / 10).float()

    data: dict[str, Any] = {
        "prompts": rows(lambda n: torch.full((2,), n)),
        "responses": rows(lambda n: torch.full((lengths[n],), n)),
        "response_mask": rows(lambda n: torch.ones(lengths[n])),
        "rollout_log_probs": rows(lambda n: log_probs(n, 0.1)),
        "old_log_probs": rows(lambda n: log_probs(n, 0.2)),
        "advantages": rows(lambda n: torch.full((lengths[n],), float(n))),
        "rm_scores": rows(lambda n: torch.eye(1, lengths[n])[0] * n),
        "uid": rows(lambda n: f"prompt {n // 2}"),
        "extra_fields": rows(lambda n: {"sampling_seed": 100 + n}),
        "record_index": torch.tensor(returned),
    }
    monkeypatch.setattr(trainer_sync_recorded.tq, "kv_batch_get", lambda **_: data)
    trainer = object.__new__(PPOTrainerSyncRecorded)
    trainer._capsules, trainer._execution, trainer._bypass, trainer.global_steps = tmp_path, execution(), False, 1
    tags = [{"is_padding": number == filler} for number in range(4)]
    batch = SimpleNamespace(keys=[], partition_id="train", tags=tags)
    padded = [torch.nn.functional.pad(log_probs(n, 0.3), (0, 4 - lengths[n])) for n in taken]
    update = {"parameters": 4, "changed_parameters": 4, "masters": 4, "changed_masters": 1, "grad_norm": 1.0}
    update |= {"update_square_sum": 16.0, "learning_rate": 1e-4}
    seen = [(torch.tensor(taken[:2]), torch.stack(padded[:2])), (torch.tensor(taken[2:]), torch.stack(padded[2:]))]
    ranks: list[dict[str, Any]] = [{"log_probs": seen, "updates": [update]}]
    tensors = trainer._step_tensors(batch, ranks)
    trainer._record = {"dir": "kept"}
    trainer._record_step(tensors, ranks)
    trainer._verify = "observe"
    assert trainer._verify_step(tensors) == {
        "training/rollout_bits_compared": 9.0,
        "training/rollout_recompute_bits_differ": 9.0,
        "training/rollout_actor_bits_differ": 9.0,
    }
    trainer._verify = "strict"
    with pytest.raises(
        RuntimeError, match=r"step 1: 9 of 9 .* recompute differ; the first is of sample 0, token 0 \(id 2\)"
    ):
        trainer._verify_step(tensors)
    with pytest.raises(RuntimeError, match="took 1 of 3 samples; none may be skipped"):
        trainer._step_tensors(batch, [{"log_probs": seen[:1], "updates": [update]}])

    capsule = read_capsule(tmp_path / "step-0001")
    read = {name: tensor.read() for name, tensor in capsule.tensors.items()}
    kept = [n for n in returned if n != filler]
    assert read["prompts"][:, 0].tolist() == kept and read["seed"].tolist() == [100 + n for n in kept]
    assert read["valid"].sum(1).tolist() == [lengths[n] for n in kept]
    for name, path in (("rollout", 0.1), ("recompute", 0.2), ("actor", 0.3)):
        for row, number in enumerate(kept):
            assert read[name][row, : lengths[number]].tolist() == log_probs(number, path).tolist(), (name, number)
    assert [kept[place] for place in read["order"].tolist()] == [n for n in taken if n != filler]
    assert read["group"].tolist() == [0, 1, 0] and read["reward"].tolist() == [2.0, 0.0, 3.0]
    assert capsule.meta["update"]["update_rms"] == 2.0


# --- the comparison of each step


@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_a_bit_of_a_valid_token_is_found_where_it_is(rows: int, tokens: int, data: st.DataObject) -> None:
    """And nothing else is: no token that is not valid, and no value that is only written another way."""
    valid = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows * tokens, max_size=rows * tokens)))
    valid = valid.view(rows, tokens)
    rollout = -torch.rand(rows, tokens)
    if not valid.any():
        with pytest.raises(ValueError, match="nothing was compared"):
            log_prob_record.differing_bits(valid, rollout, rollout.clone())
        return
    assert not len(log_prob_record.differing_bits(valid, rollout, rollout.clone()))
    flipped = rollout.clone()
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, tokens - 1))
    flipped.view(torch.int32)[row, column] ^= 1
    found = log_prob_record.differing_bits(valid, rollout, flipped).tolist()
    assert found == ([[row, column]] if valid[row, column] else [])
    zeros = torch.zeros(rows, tokens)
    assert len(log_prob_record.differing_bits(valid, zeros, -zeros)) == int(valid.sum())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("side", [0, 1])
def test_a_logprob_that_is_no_number_is_no_comparison(value: float, side: int) -> None:
    valid, both = torch.tensor([[True, True]]), [-torch.ones(1, 2), -torch.ones(1, 2)]
    both[side][0, 1] = value
    with pytest.raises(ValueError, match="sample 0, token 1"):
        log_prob_record.differing_bits(valid, *both)
    log_prob_record.differing_bits(torch.tensor([[True, False]]), *both)
    with pytest.raises(ValueError, match="cannot be compared"):
        log_prob_record.differing_bits(valid, both[0], both[0].bfloat16())


def test_what_a_difference_is_must_be_said() -> None:
    with pytest.raises(ValueError, match=r"trainer\.verify=maybe: set it to observe or to strict"):
        PPOTrainerSyncRecorded(recorded_config(trainer__verify="maybe"))


# --- what a recorded run refuses


def recorded_config(**changes: object) -> object:
    config = OmegaConf.create(
        {
            "algorithm": {"rollout_correction": {"bypass_mode": False}},
            "actor_rollout_ref": {"actor": {"ppo_epochs": 1, "ppo_mini_batch_size": 16}},
            "data": {"train_batch_size": 16},
            "trainer": {},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value)
    return config


def test_bypass_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="would compare the rollout with itself: set bypass_mode=False"):
        PPOTrainerSyncRecorded(recorded_config(algorithm__rollout_correction__bypass_mode=True))


@pytest.mark.parametrize("change", [{"ppo_epochs": 2}, {"ppo_mini_batch_size": 8}])
def test_more_than_one_version_of_the_weights_a_step_is_refused(change: dict[str, int]) -> None:
    ((key, value),) = change.items()
    with pytest.raises(ValueError, match="one version of the weights a step"):
        PPOTrainerSyncRecorded(recorded_config(**{f"actor_rollout_ref__actor__{key}": value}))


REFUSED = {
    "tensor_model_parallel_size=2": {"tensor_model_parallel_size": 2},
    "pipeline_model_parallel_size=2": {"pipeline_model_parallel_size": 2},
    "context_parallel_size=2": {"context_parallel_size": 2},
    "expert_model_parallel_size=2": {"expert_model_parallel_size": 2},
    "use_remove_padding=True": {"use_remove_padding": True},
    "use_distributed_optimizer=True": {"use_distributed_optimizer": True},
    "param_offload=True": {"param_offload": True},
    "optimizer_offload=True": {"optimizer_offload": True},
    "model_type='llama'": {"hf.model_type": "llama"},
    "hidden_act='gelu'": {"hf.hidden_act": "gelu"},
    "attention_bias=True": {"hf.attention_bias": True},
    "use_sliding_window=True": {"hf.use_sliding_window": True},
    "rope_type='yarn'": {"hf.rope_parameters": {"rope_type": "yarn"}},
}

REFUSALS = """
import json, sys, torch
from verl.workers.config import McoreEngineConfig
from verl.workers.engine.megatron.local_spec_impl import MegatronLocalSpecEngine as Engine
from types import SimpleNamespace
torch.distributed.init_process_group("gloo")
plain = dict(sequence_parallel=False, use_distributed_optimizer=False, use_remove_padding=False)
said = {}
for name, change in json.loads(sys.argv[1]).items():
    hf = dict(model_type="qwen3", hidden_act="silu", attention_bias=False, use_sliding_window=False)
    hf |= {key[3:]: value for key, value in change.items() if key.startswith("hf.")}
    engine = object.__new__(Engine)
    engine.model_config = SimpleNamespace(hf_config=SimpleNamespace(**hf))
    own = {key: value for key, value in change.items() if not key.startswith("hf.")}
    engine.engine_config = McoreEngineConfig(**{**plain, **own})
    try:
        engine._init_device_mesh()
    except NotImplementedError as error:
        said[name] = str(error)
print(json.dumps(said))
"""


def test_what_the_engine_has_no_rows_for_is_refused_by_name() -> None:
    one = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    said = json.loads(python(REFUSALS, json.dumps(REFUSED), VERL_PLATFORM="cpu", **one))
    assert said.keys() == REFUSED.keys()
    assert all(name in text and "set sizes to 1" in text for name, text in said.items())


# --- the two arms


@pytest.fixture
def one_rank() -> Iterator[None]:
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def engine_of_a_small_model() -> MegatronLocalSpecEngine:
    engine = object.__new__(MegatronLocalSpecEngine)
    engine.model_config = SimpleNamespace(hf_config=recipe_model.config(2, 256))
    engine.engine_config = SimpleNamespace(dtype="bfloat16", entropy_from_logits_with_chunking=False)
    engine._build_tf_config()
    return engine


def log_probs_and_entropy(
    engine: MegatronLocalSpecEngine, logits: torch.Tensor, **asked: Any
) -> dict[str, torch.Tensor]:
    label = torch.arange(logits.shape[0] * logits.shape[1]).view(logits.shape[:2]) % logits.shape[2]
    options = {
        "temperature": torch.tensor([[1.0], [0.7], [0.0]]).repeat(1, logits.shape[1]),
        "calculate_sum_pi_squared": False,
        "calculate_entropy": False,
        "distillation_use_topk": False,
        "distillation_only": False,
        "logits_processor_func": None,
        "batch": None,
        "data_format": "bshd",
    }
    # The logits of a model are no leaf, and are worked on in place. A function of the entropy would be compiled.
    with torch.compiler.set_stance("force_eager"):
        return engine._lm_head_logits_processor(logits * 1, label, **options | asked)


@pytest.mark.usefixtures("one_rank")
def test_the_environment_alone_chooses_layers_and_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.aligned.modules import AlignedSelfAttention
    from megatron.core.transformer.attention import SelfAttention

    logits = (torch.randn(3, 5, 64) * 3).bfloat16().float().requires_grad_()
    said: dict[str | None, dict[str, Any]] = {}
    for value in (None, "0", "1"):
        monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
        if value is not None:
            monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
        engine = engine_of_a_small_model()
        spec = engine._layer_spec()
        layer = spec.layer_specs[0] if value == "1" else spec
        assert layer.submodules.self_attention.module is (AlignedSelfAttention if value == "1" else SelfAttention)
        said[value] = log_probs_and_entropy(engine, logits, calculate_entropy=True)
        said[value]["config"] = {k: v for k, v in vars(engine.tf_config).items() if "init_method" not in k}
    assert said[None]["config"] == said["0"]["config"] == said["1"]["config"]
    label = torch.arange(15).view(3, 5)
    scaled = logits.detach() / torch.tensor([1.0, 0.7, 1.0]).view(3, 1, 1)
    expected = torch.ops.batch_invariant.log_softmax(scaled.view(15, 64)).view(3, 5, 64).gather(2, label[..., None])
    assert torch.equal(said["1"]["log_probs"], expected[..., 0])
    # The first row's temperature is one, so all three agree within rounding; the entropy is the inherited one in all.
    assert torch.allclose(said["0"]["log_probs"][0], said["1"]["log_probs"][0], atol=1e-5)
    assert torch.equal(said[None]["log_probs"], said["0"]["log_probs"])
    assert torch.equal(said["0"]["entropy"], said["1"]["entropy"])
    exact = scaled.double().log_softmax(-1).gather(2, label[..., None])[..., 0]
    assert (said["1"]["log_probs"] - exact).abs().max() < 1e-5


def test_cuda_keeps_its_engine_unless_this_one_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.engine import base
    from verl.workers.engine.megatron import MegatronEngineWithLMHead

    monkeypatch.setattr(base, "get_device_name", lambda: "cuda")
    monkeypatch.setattr(base, "get_vendor", lambda: "nvidia")
    monkeypatch.delenv("VERL_ENGINE_VENDOR", raising=False)
    assert base.EngineRegistry.get_engine_cls("language_model", "megatron") is MegatronEngineWithLMHead
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "aligned")
    assert base.EngineRegistry.get_engine_cls("language_model", "megatron") is MegatronLocalSpecEngine


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("value", ["0", "1"])
def test_on_cuda_the_plain_layers_are_transformer_engines(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And fused; the aligned ones have nothing that is fused, and are the same on each device."""
    from megatron.core.models.common.embeddings import rope_utils
    from verl.workers.engine.megatron import local_spec_impl

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    monkeypatch.setattr(local_spec_impl, "get_device_name", lambda: "cuda")
    # Transformer Engine is not here; the config would ask for its rotation.
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", object())
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(local_spec_impl, "get_gpt_layer_with_transformer_engine_spec", lambda **how: asked.append(how))
    engine = engine_of_a_small_model()
    spec = engine._layer_spec()
    assert asked == ([{"qk_layernorm": True}] if value == "0" else [])
    fused = ("masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion")
    assert {getattr(engine.tf_config, name) for name in fused} == {value == "0"}
    assert not engine.tf_config.use_cpu_initialization
    assert (spec is None) is (value == "0")


@pytest.mark.usefixtures("one_rank")
def test_gradients_flow_through_logprobs_and_entropy_at_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients: dict[str, Any] = {}
    for value in ("0", "1"):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
        logits = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(2)).requires_grad_()
        engine = engine_of_a_small_model()
        engine._layer_spec()
        outputs = log_probs_and_entropy(engine, logits, calculate_entropy=True)
        (outputs["log_probs"][:2].sum() + outputs["entropy"][:2].sum()).backward()
        gradients[value] = logits.grad
    assert gradients["0"].any()
    assert torch.allclose(gradients["0"], gradients["1"], atol=1e-5)


@pytest.mark.usefixtures("one_rank")
def test_distillation_alone_takes_no_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    asked = {"distillation_use_topk": True, "distillation_only": True}
    outputs = log_probs_and_entropy(
        engine_of_a_small_model(),
        torch.randn(3, 5, 64),
        logits_processor_func=lambda student_logits, data, data_format: {"top": student_logits},
        **asked,
    )
    assert outputs.keys() == {"top"}


def test_a_megatron_core_without_the_aligned_spec_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setitem(sys.modules, "megatron.core.models.gpt.gpt_aligned_layer_specs", None)
    with pytest.raises(NotImplementedError, match="no aligned layer spec: install one"):
        engine_of_a_small_model()._layer_spec()


def test_a_checkpoint_is_saved_as_the_trainer_asks_for_it() -> None:
    """The RL worker passes folder, remote folder, step and number to keep by position."""
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager

    takes = inspect.signature(MegatronCheckpointManager.save_checkpoint)
    asked: list[dict[str, Any]] = []

    class Manager:
        def save_checkpoint(self, *positional: Any, **named: Any) -> None:
            asked.append({k: v for k, v in takes.bind(self, *positional, **named).arguments.items() if k != "self"})

    engine = object.__new__(MegatronLocalSpecEngine)
    engine.checkpoint_mananager = Manager()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        engine.save_checkpoint("folder", None, 7, 2)
        engine.save_checkpoint(local_path="folder", global_step=8)
    finally:
        torch.distributed.destroy_process_group()
    assert asked == [
        {"local_path": "folder", "hdfs_path": None, "global_step": 7, "max_ckpt_to_keep": 2},
        {"local_path": "folder", "global_step": 8},
    ]
