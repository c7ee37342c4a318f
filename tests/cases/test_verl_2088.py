"""verl#2088, verl#2305: the first or the last sequences of a micro-batch have other logprobs than the rollout.

There padding or the cut into micro-batches moved some rows' values. Here a batch goes through verl's own padding and
the engine of arm 1, and each row, at either end and in the middle, must say what it says alone.
"""

import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samebits.recipe import model as recipe_model

os.environ["VERL_PLATFORM"] = "cpu"

from verl.models.mcore.model_forward import gptmodel_forward_model_engine
from verl.workers.engine.megatron.local_spec_impl import MegatronLocalSpecEngine, RightPaddedGPTModel

del os.environ["VERL_PLATFORM"]

LENGTHS = (47, 20, 33, 46, 21, 40, 29, 25)
# Both ends of a batch are of another length each time; the widest row is first, last or in the middle.
BATCHES = ([0, 1, 2, 3], [4, 5, 6, 7], [7, 2, 0], [3, 1, 5, 6, 4, 0], [2, 7], [1, 0, 4])


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Any:
    from megatron.core import parallel_state, tensor_parallel

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def log_probs_of(arm: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function from rows of token ids to the logprobs of each row's tokens but the first."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(arm))
    engine = object.__new__(MegatronLocalSpecEngine)
    engine.model_config = SimpleNamespace(hf_config=recipe_model.config(2, 256))
    engine.engine_config = SimpleNamespace(dtype="bfloat16", entropy_from_logits_with_chunking=False)
    engine._build_tf_config()
    torch.manual_seed(2088)
    model = RightPaddedGPTModel(
        engine.tf_config, engine._layer_spec(), vocab_size=64, max_sequence_length=256, position_embedding_type="rope"
    ).bfloat16()
    processor = partial(
        engine._lm_head_logits_processor,
        calculate_sum_pi_squared=False,
        calculate_entropy=False,
        distillation_use_topk=False,
        distillation_only=False,
        logits_processor_func=None,
        batch=None,
        data_format="bshd",
    )

    @torch.no_grad()
    def score(rows: list[torch.Tensor]) -> list[torch.Tensor]:
        ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        ones = torch.nested.as_nested_tensor([torch.ones(len(row)) for row in rows], layout=torch.jagged)
        given = {"label": ids.clone(), "temperature": ones}
        out = gptmodel_forward_model_engine(model, ids, {}, processor, given, pad_token_id=0, data_format="bshd")
        return [row[:-1] for row in out["log_probs"].unbind()]

    return score


def rows() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(2305)
    return [torch.randint(0, 64, (length,), generator=random) for length in LENGTHS]


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    assert left.dtype == right.dtype == torch.float32 and left.shape == right.shape
    assert bool(left.isfinite().all()) and bool(right.isfinite().all())
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


def test_a_row_says_the_same_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    score, samples = log_probs_of(1, monkeypatch), rows()
    alone = [score([row])[0] for row in samples]
    for batch in BATCHES:
        for number, said in zip(batch, score([samples[i] for i in batch]), strict=True):
            assert same(said, alone[number]), f"row {number} of {batch}"


def test_a_row_does_depend_on_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with one other token the first row changes, and its neighbour does not."""
    score, (first, second, *_) = log_probs_of(1, monkeypatch), rows()
    changed = first.clone()
    changed[0] = (changed[0] + 1) % 64
    before, after = score([first, second]), score([changed, second])
    assert not same(before[0], after[0]) and same(before[1], after[1])
