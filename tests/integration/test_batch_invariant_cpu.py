"""vLLM on the CPU at VLLM_BATCH_INVARIANT=1: a request's bits are its own, and only the contract's operators compute.

Five engines: eager and compiled, bfloat16 and float32, with other token budgets, cache blocks and logprob modes each,
and one of another shape: output tied to the embedding, heads of 128.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Collection
from typing import Any

import pytest
import torch
from cpu_engines import VOCABULARY, Models, Shape, run_engine, run_script, unpack_release

from samebits.probe.generated import MOVES, foreign_code, foreign_operators

LENGTHS = (1, 9, 10, 33, 63, 64, 65, 130)  # around the 64 keys of a block of the contract
RESPONSE = 8
ENGINES: dict[str, dict[str, Any]] = {
    "eager-bfloat16": {"enable_prefix_caching": False},
    "compiled-bfloat16": {
        "enforce_eager": False,
        "logprobs_mode": "processed_logprobs",
        "max_num_batched_tokens": 32,
        "block_size": 32,
    },
    "eager-float32": {
        "dtype": "float32",
        "max_num_batched_tokens": 48,
        "block_size": 16,
        "num_gpu_blocks_override": 24,
        "disable_log_stats": False,
    },
    "compiled-float32": {"dtype": "float32", "enforce_eager": False},
    "eager-tied-head128": {"logprobs_mode": "processed_logprobs", "max_num_batched_tokens": 48, "block_size": 16},
}
SHAPES = {"eager-tied-head128": Shape(tied=True, hidden=256, heads=2, kv_heads=1, head_dim=128)}
CONTRACT = {"linear", "rms_norm", "add_rms_norm", "rotary_embedding", "silu_and_mul", "attention", "log_softmax"}
# What the sampler runs of torch's, by what it is for. Before the log-softmax:
TEMPERATURE = {"div_"}  # by each row's own: elementwise, FP32, IEEE
GREEDY = {"argmax", "lt", "scalar_tensor", "where"}  # the greedy token, and a divisor of one for its row
TRUNCATION = {  # top-k and top-p: which logits become minus infinity; the others stay
    "_softmax", "arange", "cumsum", "gather", "le", "lt", "masked_fill_", "rsub", "scatter_", "softmax", "sort", "sub",
}  # fmt: skip
# After it: the choice of the token, the token's rank and its place among the logprobs. It takes them and changes none.
CHOICE = {"_softmax", "argmax", "cat", "div_", "exponential_", "gather", "ge", "lt", "softmax", "sum", "topk", "where"}


def _requests() -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, VOCABULARY, (n,), generator=random).tolist() for n in LENGTHS]
    return [{"prompt": prompt, "max_tokens": RESPONSE, "seed": 30 + n} for n, prompt in enumerate(prompts)]


REQUESTS = _requests()
TEMPERATURES = (0.7, 1.0)
# What is watched: requests as the recipe sends them, but for the temperature; then with all that may choose a token.
WATCHED = [
    [{**REQUESTS[3], "temperature": TEMPERATURES[0], "prompt_logprobs": True}, {**REQUESTS[7], "temperature": 1.3}],
    [{**REQUESTS[3], "temperature": 0.7, "top_k": 20, "top_p": 0.9}, {**REQUESTS[4], "temperature": 0.0}],
]
NEIGHBOURS = [{**request, "seed": None, "temperature": n % 2} for n, request in enumerate(REQUESTS[:3])]
STEPS: list[dict[str, Any]] = [
    {"serve": REQUESTS, "together": True},
    {"serve": REQUESTS, "together": False},
    {"score": 0},
    {"serve": REQUESTS[::-1], "together": True},  # the cache is warm here, where there is one
    {"serve": NEIGHBOURS + REQUESTS, "together": True},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("model"), Shape())


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Models]:
    return {name: Models(tmp_path_factory.mktemp(name), shape) for name, shape in SHAPES.items()}


class Engines:
    """Each engine is started once, when a test asks for it."""

    def __init__(self, folders: pytest.TempPathFactory, models: Models, others: dict[str, Models]) -> None:
        self.folders, self.models, self.others, self.done = folders, models, others, dict[str, list[Any]]()

    def __call__(self, name: str) -> list[Any]:
        if name not in self.done:
            settings = {"max_model_len": 160, "max_num_seqs": 12, "enable_prefix_caching": True, **ENGINES[name]}
            models = self.others.get(name, self.models)
            last = {"operators": WATCHED} if settings.get("enforce_eager", True) else {"code": True}
            steps = [*STEPS, last]
            if "num_gpu_blocks_override" in settings:
                steps.append({"preemptions": True})
            elif settings.get("enforce_eager", True):
                for name_of_weights in ("scaled", "original"):
                    steps += [models.load(name_of_weights, process=name_of_weights == "original"), STEPS[0]]
            job, model = self.folders.mktemp(name), models.folder["original"]
            self.done[name] = run_engine(job, model, steps, batch_invariant=True, **settings)
        return self.done[name]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, models: Models, others: dict[str, Models]) -> Engines:
    return Engines(tmp_path_factory, models, others)


def _said(served: list[dict[str, Any]]) -> list[tuple[list[int], list[float]]]:
    said = [(one["tokens"], one["logprobs"]) for one in served]
    values = torch.tensor([logprobs for _, logprobs in said])
    assert values.shape == (len(LENGTHS), RESPONSE) and bool(values.isfinite().all()) and bool((values < 0).all())
    assert values.unique().numel() > values.numel() // 2
    return said


@pytest.mark.parametrize("name", ENGINES)
def test_a_request_alone_in_a_batch_and_as_a_prompt(engines: Engines, name: str) -> None:
    """Bit for bit: alone, among seven others, in a warm cache, beside unseeded ones, and scored as a prompt."""
    together, alone, scored, warm, beside = engines(name)[: len(STEPS)]
    want = _said(together)
    assert _said(alone) == want
    assert scored == [logprobs for _, logprobs in want]
    assert _said(warm[::-1]) == want
    assert _said(beside[len(NEIGHBOURS) :]) == want


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_eager_and_compiled_agree(engines: Engines, dtype: str) -> None:
    """Nothing is left for the compiler to round otherwise; nor do budget, cache blocks and preemption matter."""
    assert _said(engines(f"eager-{dtype}")[0]) == _said(engines(f"compiled-{dtype}")[0])


def test_the_small_cache_preempts(engines: Engines) -> None:
    assert engines("eager-float32")[-1] > 0


@pytest.mark.parametrize("name", ["eager-bfloat16", "eager-tied-head128"])
def test_weights_loaded_while_it_runs_are_served(engines: Engines, name: str) -> None:
    """Layers read their weights where they are loaded, so that none has to be kept or packed for it."""
    start, (to_scaled, scaled, to_original, original) = engines(name)[0], engines(name)[-4:]
    assert (to_scaled, to_original) == ("", "")
    assert all(one != other for one, other in zip(_said(scaled), _said(start), strict=True))
    assert _said(original) == _said(start)


def _foreign_operators(names: list[str], allowed: Collection[str] = ()) -> list[str]:
    """Those that compute, are not of the contract and not among `allowed`, which are torch's."""
    found = foreign_operators(names, {*CONTRACT, "reshape_and_cache"})
    return [name for name in found if name.removeprefix("aten::") not in allowed]


@pytest.mark.parametrize("name", [name for name in ENGINES if name.startswith("eager")])
def test_eager_runs_the_operators_of_the_contract_alone(engines: Engines, name: str) -> None:
    for watched in engines(name)[len(STEPS)]:
        calls = {operator for call in watched["sampler"] for operator in call}
        assert _foreign_operators(watched["model"]) == []
        assert {name.removeprefix("batch_invariant::") for name in {*watched["model"], *calls}} >= CONTRACT


@pytest.mark.parametrize("name", [name for name in ENGINES if name.startswith("eager")])
def test_the_sampler_computes_a_quotient_and_the_log_softmax(engines: Engines, name: str) -> None:
    """What torch runs before the log-softmax is the division alone, or chooses; what it runs afterwards chooses."""
    processed = ENGINES[name].get("logprobs_mode") == "processed_logprobs"
    plain, truncated = engines(name)[len(STEPS)]
    for watched, before in ((plain, TEMPERATURE), (truncated, TEMPERATURE | GREEDY | TRUNCATION)):
        assert len(watched["sampler"]) >= RESPONSE
        for call in watched["sampler"]:
            assert call.count("batch_invariant::log_softmax") == 1
            at = call.index("batch_invariant::log_softmax")
            assert _foreign_operators(call[:at], before if processed else set()) == []
            assert ("aten::div_" in call[:at]) is processed
            after = CHOICE if processed else CHOICE | before
            assert _foreign_operators(call[at:], after) == []


def test_the_trainer_scores_what_the_rollout_served(
    tmp_path: pathlib.Path, engines: Engines, others: dict[str, Models]
) -> None:
    """The prompt's logprobs as they are and the response's by temperature: verl's engine on the same checkpoint."""
    name = "eager-tied-head128"
    served = engines(name)[len(STEPS)][0]["served"][:1] + engines(name)[0]
    tokens = [one["prompt"] + one["tokens"] for one in served]
    task = {"model": str(others[name].folder["original"]), "tokens": tokens, "temperatures": TEMPERATURES}
    (tmp_path / "job.json").write_text(json.dumps(task))
    run_script("aligned_trainer.py", tmp_path, VLLM_BATCH_INVARIANT="1")
    said = json.loads((tmp_path / "results.json").read_text())
    by_temperature = dict(zip(TEMPERATURES, said["log_probs"], strict=True))
    watched = served[0]
    responses = [row[-RESPONSE:] for row in by_temperature[1.0]]
    assert by_temperature[1.0][0][:-RESPONSE] == watched["prompt_logprobs"]
    assert by_temperature[0.7][0][-RESPONSE:] == watched["logprobs"] != responses[0]
    assert responses[1:] == [logprobs for _, logprobs in _said(served[1:])]
    trainers, rollouts = said["rope"]
    assert trainers == rollouts and (trainers["dtype"], trainers["shape"]) == ("bfloat16", [256, 128])
    outside = {operator.removeprefix("aten.") for operator, module in said["kernels"] if not module}
    made_here = {"full", "unbind"}  # the test's temperatures, and its reading of the answer
    assert outside - MOVES - made_here == {"batch_invariant.selected_log_softmax", "div", "masked_fill"}


@pytest.mark.parametrize("name", [name for name in ENGINES if name.startswith("compiled")])
def test_the_compiler_is_left_no_arithmetic(engines: Engines, name: str) -> None:
    (graph,) = [code for code in engines(name)[len(STEPS)] if "unified_attention" in code]
    assert foreign_code(graph, {*CONTRACT, "reshape_and_cache"}) == []
    called = set(re.findall(r"torch\.ops\.batch_invariant\.(\w+)", graph))
    assert called == CONTRACT - {"attention", "log_softmax"}  # these run inside of vLLM's operator, and after the graph


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory, models: Models) -> list[Any]:
    return _default(tmp_path_factory.mktemp("default"), models, None)


def _default(job: pathlib.Path, models: Models, release: pathlib.Path | None) -> list[Any]:
    settings: dict[str, Any] = {
        "enforce_eager": False,
        "logprobs_mode": "processed_logprobs",
        "max_model_len": 160,
        "max_num_batched_tokens": 1024,  # in chunks the release ends at a seeded request
    }
    steps = [*STEPS[:1], STEPS[2], {"code": True}]
    return run_engine(job, models.folder["original"], steps, release, **settings)


def test_without_the_switch_nothing_changes(
    tmp_path_factory: pytest.TempPathFactory, models: Models, default: list[Any]
) -> None:
    """Compiled, processed logprobs: tokens and logprobs are the release's, bit for bit (eager ones: test_vllm_cpu)."""
    release = unpack_release(tmp_path_factory.mktemp("release"))
    unpatched = _default(tmp_path_factory.mktemp("unpatched"), models, release)
    assert _said(default[0]) == _said(unpatched[0])
    assert default[1] == unpatched[1]


def test_the_search_for_foreign_arithmetic_finds_it(default: list[Any]) -> None:
    """The stock graph computes norm, rotation and activation in fused kernels."""
    (graph,) = [code for code in default[2] if "unified_attention" in code]
    found = foreign_code(graph, {*CONTRACT, "reshape_and_cache"})
    assert {"aten::rsqrt", "aten::mul", "aten::silu"} <= set(found)
    assert any(use.startswith(("convert<", "static_cast<", "Vectorized<")) for use in found)


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "float16": ({"dtype": "float16"}, "torch.float16"),
    "tensor parallel": ({"tensor_parallel_size": 2}, "tensor parallelism"),
    "fp8 cache": ({"kv_cache_dtype": "fp8"}, "KV cache in fp8"),
    "architecture": ({"hf_overrides": {"architectures": ["Qwen2ForCausalLM"]}}, "Qwen2ForCausalLM is not"),
    "LoRA": ({"enable_lora": True}, "LoRA"),
    "head dtype": ({"hf_overrides": {"head_dtype": "float32"}}, "output layer in torch.float32"),
    "logits processors": ({"logits_processors": ["a.module:AProcessor"]}, "logits processors of one's own"),
}
REQUESTS_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "presence penalty": ({"presence_penalty": 0.5}, "presence_penalty=0.5"),
    "frequency penalty": ({"frequency_penalty": -0.5}, "frequency_penalty=-0.5"),
    "repetition penalty": ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
    "min-p": ({"min_p": 0.1}, "min_p=0.1"),
    "logit bias": ({"logit_bias": {3: 1.0}}, "logit_bias={"),
}
REQUESTS_SERVED: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature, top-k, top-p": {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3, "logprobs": 2},
    "masks": {"allowed_token_ids": [1, 2, 3], "min_tokens": 2, "logit_bias": {}},
}
PASS = {"RMSNorm", "SiluAndMul", "rope", "rope, scaled", "attention", "linear", "embedding", "output", *REQUESTS_SERVED}


def test_what_has_no_operator_is_refused_by_name(tmp_path: pathlib.Path, models: Models) -> None:
    refused = {name: parameters for name, (parameters, _) in REQUESTS_REFUSED.items()}
    task = {
        "model": str(models.folder["original"]),
        "settings": {name: args for name, (args, _) in SETTINGS.items()},
        "requests": {**REQUESTS_SERVED, **refused},
    }
    (tmp_path / "job.json").write_text(json.dumps(task))
    run_script("refusals.py", tmp_path, VLLM_BATCH_INVARIANT="1")
    said = json.loads((tmp_path / "results.json").read_text())
    assert {name for name, error in said.items() if not error} == PASS
    for name, error in said.items():
        if name not in PASS:
            assert "VLLM_BATCH_INVARIANT=1 on a CPU: " in error and "Remedy: " in error, f"{name}: {error}"
    for name, (_, what) in {**SETTINGS, **REQUESTS_REFUSED}.items():
        assert what in said[name], f"{name}: {said[name]}"
