"""Patched Megatron Core trains on a CPU: its own model, data-parallel wrapper, schedule, mixed-precision optimizer.

Three comparisons: with an independent model in plain PyTorch, with the release run under shims (every bit), and of the
patched source with the release's source where CUDA is available (every statement).
"""

from __future__ import annotations

import ast
import math
import pathlib
import sys
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron_reference import (
    TOLERANCE,
    Result,
    assert_gradients_are_the_references,
    errors,
    installed,
    reference,
    run,
    same,
    unequal,
)
from megatron_steps import CASES, PATCHED_CASES, ROPE_BASE

from samebits.sources.fetch import fetch
from samebits.sources.patching import plan_patch
from samebits.sources.patchset import load_series
from samebits.sources.pins import load_pins

REPOSITORY = pathlib.Path(__file__).parents[2]
UPSTREAM, BASE, PATCH = "Megatron-LM", "0.19.2", "0001-cpu-training"


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The release's wheel, verified by its pin and unpacked: a folder that holds `megatron`, unpatched."""
    upstream, folder = load_pins().upstreams[UPSTREAM], tmp_path_factory.mktemp("release")
    artefact = next(a for a in upstream.artefacts_of(BASE) if a.fits(sys.version_info[:2]))
    with zipfile.ZipFile(fetch(artefact)) as wheel:
        wheel.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """What the installed, patched Megatron Core computes."""
    return run(tmp_path_factory.mktemp("patched"), installed())


@pytest.fixture(scope="module")
def shimmed(tmp_path_factory: pytest.TempPathFactory, release: pathlib.Path) -> dict[str, Result]:
    """What the release computes when torch is told to answer as if the CPU were a CUDA device."""
    return run(tmp_path_factory.mktemp("shimmed"), release, "--shims")


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    values = result.values() if isinstance(result, dict) else result if isinstance(result, list) else ()
    return [tensor for value in values for tensor in _tensors(value)]


# --- the steps are real ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CASES, *PATCHED_CASES])
def test_two_steps_train(patched: dict[str, Result], name: str) -> None:
    result = patched[name]
    losses = [step[key] for step in result["steps"] for key in ("loss", "loss_after")]
    norms = [step["grad_norm"] for step in result["steps"]]
    print(
        f"{name}: {result['optimizer']}, losses {losses}, gradient norms {norms}, "
        f"seconds {[round(step['seconds'], 3) for step in result['steps']]}"
    )
    assert all(math.isfinite(value) for value in losses + norms)
    assert losses[1] < losses[0] and losses[3] < losses[2] and losses[3] < losses[1]
    assert all(norm > 0 for norm in norms)
    for step in result["steps"]:
        for parameter, gradient in step["gradients"].items():
            assert gradient.dtype == torch.float32 and torch.isfinite(gradient).all() and gradient.any(), parameter


@pytest.mark.parametrize("name", [*CASES, *PATCHED_CASES])
def test_the_parameter_is_its_fp32_main_rounded(patched: dict[str, Result], name: str) -> None:
    result = patched[name]
    dtype = result["case"]["dtype"]
    before_mains, before = result["initial_mains"], result["initial"]
    for step in result["steps"]:
        changed = 0
        for parameter, main in step["mains"].items():
            master = step["parameters"][parameter]
            assert main.dtype == torch.float32 and master.dtype == dtype
            assert same(main.to(dtype), master), parameter
            assert not torch.equal(main, before_mains[parameter]), f"the FP32 main of {parameter} did not change"
            changed += not torch.equal(master, before[parameter])
        print(f"{name}: {len(step['mains'])} FP32 mains changed, {changed} of their {dtype} masters")
        before_mains, before = step["mains"], step["parameters"]


def test_the_optimizers_are_megatrons(patched: dict[str, Result]) -> None:
    assert {name: result["optimizer"] for name, result in patched.items()} == {
        "bf16": "Float16OptimizerWithFloat16Params",
        "bf16-distributed": "DistributedOptimizer",
        "bf16-per-token": "Float16OptimizerWithFloat16Params",
        "bf16-dropout": "Float16OptimizerWithFloat16Params",
        "bf16-recompute": "Float16OptimizerWithFloat16Params",
        "bf16-sharded-checkpoint": "Float16OptimizerWithFloat16Params",
        "bf16-dropout-recompute": "Float16OptimizerWithFloat16Params",
        "fp32": "FP32Optimizer",
        "fp32-distributed": "DistributedOptimizer",
    }


def test_zeros_are_counted(patched: dict[str, Result]) -> None:
    for step in patched["bf16-per-token"]["steps"]:
        zeros = sum((gradient == 0).sum().item() for gradient in step["gradients"].values())
        print(f"{step['zeros']} zeros of {sum(g.numel() for g in step['gradients'].values())}")
        assert step["zeros"] == zeros


@pytest.mark.parametrize("name", ["bf16", "bf16-per-token", "bf16-recompute", "bf16-sharded-checkpoint", "fp32"])
def test_a_step_after_loading_the_saved_state_is_the_step_without(patched: dict[str, Result], name: str) -> None:
    assert unequal(patched[name]["resumed"], patched[name]["steps"][1]) == []


@pytest.mark.parametrize("name", ["bf16", "bf16-dropout"])
def test_recomputation_draws_the_same_random_numbers(patched: dict[str, Result], name: str) -> None:
    """The tracker puts the states back for the second forward: every bit of a step is the same with it."""
    assert unequal(patched[name]["steps"], patched[f"{name}-recompute"]["steps"]) == []


def test_dropout_draws_anything_at_all(patched: dict[str, Result]) -> None:
    assert unequal(patched["bf16"]["steps"], patched["bf16-dropout"]["steps"]) != []


# --- an independent model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(CASES))
def test_gradients_are_those_of_an_independent_model(patched: dict[str, Result], name: str) -> None:
    assert_gradients_are_the_references(name, patched[name])


def test_the_gradient_check_sees_a_wrong_rope_base(patched: dict[str, Result]) -> None:
    whole, worst, where = errors(patched["fp32"], reference(patched["fp32"], base=ROPE_BASE * 1.01)[1])
    print(f"RoPE base one percent off: gradient error {whole:.2e}, worst tensor {worst:.2e} ({where})")
    assert whole > 10 * TOLERANCE[torch.float32]


# --- single functions on the way ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield
    torch.distributed.destroy_process_group()


def test_a_forked_random_state_is_its_own_stream(caplog: pytest.LogCaptureFixture) -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    expected = torch.rand(6, generator=torch.Generator().manual_seed(11))
    tracker, outside = CudaRNGStatesTracker(), torch.get_rng_state()
    tracker.add("dropout", 11)
    drawn = []
    for _ in range(2):
        assert torch.equal(torch.get_rng_state(), outside)
        with tracker.fork("dropout"):
            drawn.append(torch.rand(3))
    assert torch.equal(torch.get_rng_state(), outside)
    assert torch.equal(torch.cat(drawn), expected)
    assert not [record for record in caplog.records if record.name.startswith("megatron")]


def test_the_model_parallel_seed_seeds_the_default_stream() -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(5, tp_rank=0, ep_rank=0, etp_rank=0, force_reset_rng=True)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(5)))
    names = {f"{axis}-parallel-rng" for axis in ("data", "model", "expert")}
    assert set(get_cuda_rng_tracker().get_states()) == names


def test_masks_hide_the_future_and_what_left_the_window() -> None:
    from megatron.core.transformer.utils import get_default_causal_mask, get_sliding_window_causal_mask

    query, key = torch.arange(5)[:, None], torch.arange(5)[None]
    assert torch.equal(get_default_causal_mask(5), key > query)
    assert torch.equal(get_sliding_window_causal_mask(5, 5, (2, 0)), (key > query) | (key < query - 2))


def test_scratch_memory_is_handed_out_again() -> None:
    from megatron.core.utils import GlobalMemoryBuffer

    memory = GlobalMemoryBuffer()
    first = memory.get_tensor((4, 6), torch.bfloat16, "scratch")
    again = memory.get_tensor((2, 3), torch.bfloat16, "scratch")
    assert first.device.type == "cpu" and first.shape == (4, 6) and first.dtype == torch.bfloat16
    assert again.data_ptr() == first.data_ptr()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_gradient_norm(order: float) -> None:
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    gradients = [torch.tensor([3.0, -1.0]), torch.tensor([[-4.0]])]
    expected = torch.linalg.vector_norm(torch.tensor([3.0, -1.0, -4.0]), order).item()
    assert float(get_grad_norm_fp32(gradients, order)) == pytest.approx(expected)


@pytest.mark.usefixtures("one_rank")
def test_gradient_norm_of_a_rank_without_gradients() -> None:
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    assert float(get_grad_norm_fp32([])) == 0.0


def test_fp32_parameters_beside_bf16_ones_are_their_own_mains() -> None:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    half, full = (torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
    optimizer = Float16OptimizerWithFloat16Params(
        torch.optim.AdamW([half, full]), OptimizerConfig(bf16=True), None, lambda *_: None
    )
    (main,) = optimizer.fp32_from_float16_groups[0]
    assert optimizer.float16_groups == [[half]] and optimizer.fp32_from_fp32_groups == [[full]]
    assert main.dtype == torch.float32 and vars(half)["main_param"] is main
    with pytest.raises(TypeError, match="DoubleTensor"):
        Float16OptimizerWithFloat16Params(
            torch.optim.AdamW([torch.nn.Parameter(torch.ones(2, dtype=torch.float64))]),
            OptimizerConfig(bf16=True),
            None,
            lambda *_: None,
        )


def test_the_loss_scale_of_an_empty_chain_is_one() -> None:
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    assert ChainedOptimizer([]).get_loss_scale().item() == 1.0


# --- the release -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(CASES))
def test_losses_gradients_and_parameters_are_the_releases_bits(
    patched: dict[str, Result], shimmed: dict[str, Result], name: str
) -> None:
    tensors = _tensors(patched[name])
    print(f"{name}: {len(tensors)} tensors, {sum(t.numel() for t in tensors)} elements")
    assert len(tensors) > 100
    assert unequal(patched[name], shimmed[name]) == []


class _CudaIsAvailable(ast.NodeTransformer):
    """Reduces a syntax tree to what runs where `torch.cuda.is_available()` is true; counts its decisions."""

    def __init__(self) -> None:
        self.decisions = 0

    @staticmethod
    def _holds(test: ast.expr) -> bool | None:
        negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        call = test.operand if isinstance(test, ast.UnaryOp) and negated else test
        return not negated if ast.unparse(call) == "torch.cuda.is_available()" else None

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        holds = self._holds(node.test)
        self.decisions += holds is not None
        return node if holds is None else node.body if holds else node.orelse

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        holds = self._holds(node.test)
        self.decisions += holds is not None
        return node if holds is None else node.body if holds else node.orelse

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        left = [value for value in node.values if not (isinstance(node.op, ast.And) and self._holds(value))]
        self.decisions += len(node.values) - len(left)
        return left[0] if len(left) == 1 else ast.BoolOp(node.op, left)


def test_with_cuda_the_patched_source_is_the_release(release: pathlib.Path) -> None:
    """Each touched file, with every question for CUDA answered by yes, is the release's syntax tree."""

    def read(path: str) -> bytes:
        return (release / path).read_bytes()

    patch = next(patch for patch in load_series(REPOSITORY / "patches", UPSTREAM) if patch.name == PATCH)
    sources = plan_patch(read, patch, BASE)
    edits = sum(not edit.bases or BASE in edit.bases for edit in patch.edits)
    decisions = 0
    for path, source in sources.items():
        before, after = ast.parse(read(path)), ast.parse(source)
        assert ast.dump(before) != ast.dump(after), path
        folds = [_CudaIsAvailable(), _CudaIsAvailable()]
        trees = [ast.dump(fold.visit(tree)) for fold, tree in zip(folds, (before, after), strict=True)]
        assert trees[0] == trees[1], f"{path} is not the release's where CUDA is available"
        decisions += folds[1].decisions - folds[0].decisions
    print(f"{len(sources)} files, {edits} edits, {decisions} questions for CUDA")
    assert decisions == edits > 0
