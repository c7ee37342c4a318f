"""vLLM on the CPU, patched: the default arm keeps every bit of the release, and a running engine takes new weights.

Real engines on a small random Qwen3 whose layers are wide enough for the kernels that a real model meets.
"""

from __future__ import annotations

import importlib.metadata
import math
import pathlib
from typing import Any

import pytest
import torch
from cpu_engines import MLP, Models, Outputs, Shape, Weights, run_engine, unpack_release
from safetensors.torch import load_file

KEEP: dict[str, Any] = {"additional_config": {"cpu_keep_weights": True}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("untied"), Shape())


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("tied"), Shape(tied=True))


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return unpack_release(tmp_path_factory.mktemp("release"))


def _run(job: pathlib.Path, model: pathlib.Path, steps: list[dict], release: pathlib.Path | None = None, **engine: Any):
    results = run_engine(job, model, steps, release, **engine)
    for outputs in results:
        if isinstance(outputs, list):
            _logprobs(outputs)
    return results


def _logprobs(outputs: Outputs) -> list[float]:
    """All logprobs of the sampled tokens; none is missing, NaN or infinite."""
    values = [value for request in outputs for value in request["logprobs"]]
    assert len(values) == 7 * 12
    assert all(
        math.isfinite(value) for request in outputs for value in request["logprobs"] + request["prompt_logprobs"]
    )
    return values


def _changed(one: Outputs, two: Outputs) -> int:
    return sum(a != b for a, b in zip(_logprobs(one), _logprobs(two), strict=True))


def _unfused(resident: Weights) -> Weights:
    """vLLM's parameters under the checkpoint's names."""
    weights: Weights = {}
    for name, tensor in resident.items():
        stem = name.rpartition(".weight")[0]
        if stem.endswith("qkv_proj"):
            parts = dict(zip(("q_proj", "k_proj", "v_proj"), tensor.split(Shape().qkv), strict=True))
        elif stem.endswith("gate_up_proj"):
            parts = dict(zip(("gate_proj", "up_proj"), tensor.split(MLP), strict=True))
        else:
            parts = {stem.rpartition(".")[2]: tensor}
        prefix = stem.rpartition(".")[0]
        weights |= {f"{prefix}.{part}.weight".lstrip("."): value for part, value in parts.items()}
    return weights


def _assert_resident(file: pathlib.Path, sent: Weights) -> None:
    resident = _unfused(load_file(file))
    assert resident.keys() == sent.keys()
    for name, tensor in sent.items():
        assert resident[name].dtype == tensor.dtype, name
        assert torch.equal(resident[name].view(torch.int16), tensor.view(torch.int16)), name


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory, models: Models) -> list[Any]:
    """The patched engine as anyone starts it: no switch. It generates, then is asked to load."""
    steps = [{"generate": True}, models.load("scaled", process=False)]
    return _run(tmp_path_factory.mktemp("default"), models.folder["original"], steps)


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory: pytest.TempPathFactory, models: Models) -> tuple[pathlib.Path, list[Any]]:
    """An engine that keeps its weights: starts on the original, takes it again, then the scaled, then the original."""
    job = tmp_path_factory.mktemp("reloaded")
    steps = [
        {"generate": True},
        models.load("original", process=False),
        {"generate": True},
        models.load("scaled", process=False),
        {"read": str(job / "scaled.safetensors")},
        {"generate": True},
        models.load("original", process=True),
        {"read": str(job / "original.safetensors")},
        {"generate": True},
    ]
    return job, _run(job, models.folder["original"], steps, **KEEP)


def test_the_version_names_the_release_and_its_patches() -> None:
    version = importlib.metadata.version("vllm")
    assert version.startswith("0.26.0+cpu.samebits."), f"vLLM {version} is not our wheel: install the patched wheels"


def test_default_arm_unchanged(
    tmp_path: pathlib.Path, release: pathlib.Path, models: Models, default: list[Any]
) -> None:
    """With no switch set: the release's tokens and logprobs, bit for bit, and its refusal to load a packed weight.

    Weights are packed where oneDNN has a bf16 product; elsewhere the release loads them, and so do we.
    """
    steps = [{"generate": True}, models.load("scaled", process=False)]
    unpatched = _run(tmp_path, models.folder["original"], steps, release)
    assert default[0] == unpatched[0]
    assert default[1] == unpatched[1]
    assert (default[1] != "") == torch.ops.mkldnn._is_mkldnn_bf16_supported()


def test_a_seeded_request_samples_the_same_when_its_prompt_is_chunked(
    tmp_path: pathlib.Path, models: Models, default: list[Any]
) -> None:
    """A budget of 16 tokens cuts the prompts; each cut samples a token and throws it away, with its random numbers."""
    (chunked,) = _run(tmp_path, models.folder["original"], [{"generate": True}], max_num_batched_tokens=16)
    first = [(one["tokens"][0], other["tokens"][0]) for one, other in zip(chunked, default[0], strict=True)]
    # Another cut may move a logprob by a rounding, and with it a sample that was nearly a tie. With the random numbers
    # of the cuts used up, seven samples out of 64 tokens would agree by chance alone.
    assert sum(one != other for one, other in first) <= 1, first


def test_keeping_weights_changes_no_bit(default: list[Any], reloaded: tuple[pathlib.Path, list[Any]]) -> None:
    assert reloaded[1][0] == default[0]


def test_a_load_takes_effect_and_the_original_comes_back(reloaded: tuple[pathlib.Path, list[Any]]) -> None:
    start, _, same, _, _, scaled, _, _, again = reloaded[1]
    assert [result for result in reloaded[1] if isinstance(result, str)] == ["", "", ""]
    assert same == start
    assert _changed(scaled, start) == len(_logprobs(start))
    assert again == start


def test_a_loaded_engine_equals_a_fresh_one(
    tmp_path: pathlib.Path, models: Models, reloaded: tuple[pathlib.Path, list[Any]]
) -> None:
    fresh = _run(tmp_path, models.folder["scaled"], [{"generate": True}])
    assert fresh[0] == reloaded[1][5]


@pytest.mark.parametrize("name", ["original", "scaled"])
def test_resident_weights_are_what_was_sent(
    models: Models, reloaded: tuple[pathlib.Path, list[Any]], name: str
) -> None:
    _assert_resident(reloaded[0] / f"{name}.safetensors", models.weights[name])


def test_tied_output_and_compiled_graph_follow_a_load(tmp_path_factory: pytest.TempPathFactory, tied: Models) -> None:
    """The output layer is the embedding, and the graph was traced before the load: both serve the new weights."""
    one, two = tmp_path_factory.mktemp("loaded"), tmp_path_factory.mktemp("fresh")
    steps = [
        {"generate": True},
        tied.load("scaled", process=False),
        {"read": str(one / "scaled.safetensors")},
        {"generate": True},
    ]
    start, error, _, scaled = _run(one, tied.folder["original"], steps, enforce_eager=False, **KEEP)
    (fresh,) = _run(two, tied.folder["scaled"], steps[:1], enforce_eager=False)
    assert error == ""
    assert _changed(scaled, start) == len(_logprobs(start))
    assert scaled == fresh
    _assert_resident(one / "scaled.safetensors", tied.weights["scaled"])
