"""verl#6280: old and new logprobs of one policy differ when they are computed in micro-batches of different sizes.

With as many sequences for the old logprobs as verl's documentation advises, twice those of the update, clipping set in
although nothing had been updated. The recipe goes further (8 against 28, and another order). Here the same forward over
the operators of arm 1 is taken apart in many ways, with its siblings: order, padding, neighbours, threads; and a judge
who sees one path alone move. `test_loop.py` holds the real trainer to it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from operator_cases import threads
from runs import BOUNDS, make_run, rewrite

from samebits.judge import judge_run
from samebits.recipe import arms

HIDDEN, HEADS, KV_HEADS, HEAD, MLP, VOCABULARY, EPSILON = 256, 4, 2, 64, 512, 64, 1e-6
SEQUENCES, LONGEST = 28, 47
Batch = list[int]


@pytest.fixture(scope="module")
def ops() -> Any:
    assert arms.contract(1)
    return torch.ops.batch_invariant


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(6280)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=random) * shape[-1] ** -0.5).bfloat16()

    return {
        "embedding": torch.randn(VOCABULARY, HIDDEN, generator=random).bfloat16(),
        "norm": torch.rand(HIDDEN, generator=random).bfloat16() + 0.5,
        "qkv": normal((HEADS + 2 * KV_HEADS) * HEAD, HIDDEN),
        "out": normal(HIDDEN, HEADS * HEAD),
        "gate_up": normal(2 * MLP, HIDDEN),
        "down": normal(HIDDEN, MLP),
        "head": normal(VOCABULARY, HIDDEN) * 4,
    }


@pytest.fixture(scope="module")
def samples() -> list[torch.Tensor]:
    """Token ids of samples of different lengths."""
    random = torch.Generator().manual_seed(1)
    lengths = torch.randint(20, LONGEST + 1, (SEQUENCES,), generator=random).tolist()
    return [torch.randint(0, VOCABULARY, (length,), generator=random) for length in lengths]


def log_probs(ops: Any, w: dict[str, torch.Tensor], rows: list[torch.Tensor], width: int) -> list[torch.Tensor]:
    """fp32 logprobs of each sample's tokens, from one right-padded forward of a one-layer model."""
    ids = torch.stack([torch.nn.functional.pad(row, (0, width - row.numel())) for row in rows])
    n = len(rows)
    hidden = w["embedding"][ids].view(n * width, HIDDEN)
    normed = ops.rms_norm(hidden, w["norm"], EPSILON)
    qkv = ops.linear(normed, w["qkv"]).view(n * width, HEADS + 2 * KV_HEADS, HEAD)
    query, key, value = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    mixed, _ = ops.attention(
        query,
        key.unsqueeze(2),
        value.unsqueeze(2),
        torch.arange(n * width, dtype=torch.int32).view(n, width),
        torch.arange(0, n * width + 1, width, dtype=torch.int32),
        torch.full((n,), width, dtype=torch.int32),
        HEAD**-0.5,
    )
    normed, hidden = ops.add_rms_norm(ops.linear(mixed.flatten(1), w["out"]), hidden, w["norm"], EPSILON)
    hidden = hidden + ops.linear(ops.silu_and_mul(ops.linear(normed, w["gate_up"])), w["down"])
    logits = ops.linear(ops.rms_norm(hidden, w["norm"], EPSILON), w["head"]).view(n, width, VOCABULARY)
    return [
        ops.selected_log_softmax(logits[i, : row.numel() - 1].contiguous(), row[1:])[0] for i, row in enumerate(rows)
    ]


def in_batches(
    ops: Any, w: dict[str, torch.Tensor], samples: list[torch.Tensor], batches: list[Batch], width: int = 0
) -> list[torch.Tensor]:
    """The logprobs of all samples, computed batch by batch, each padded to `width` or to its own longest."""
    found: dict[int, torch.Tensor] = {}
    for batch in batches:
        rows = [samples[i] for i in batch]
        found |= zip(batch, log_probs(ops, w, rows, width or max(row.numel() for row in rows)), strict=True)
    return [found[i] for i in range(len(samples))]


def sliced(size: int, order: list[int] | None = None) -> list[Batch]:
    order = order or list(range(SEQUENCES))
    return [order[i : i + size] for i in range(0, SEQUENCES, size)]


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        assert a.dtype == b.dtype == torch.float32 and bool(a.isfinite().all())
        assert torch.equal(a.view(torch.int32), b.view(torch.int32)), f"sample {i}"


@pytest.mark.parametrize(("old", "new"), [(16, 8), (8, 28), (1, 28), (2, 1), (7, 13), (28, 3)])
def test_micro_batches_of_two_sizes_give_one_logprob(
    ops: Any, weights: dict[str, torch.Tensor], samples: list[torch.Tensor], old: int, new: int
) -> None:
    assert_same(
        in_batches(ops, weights, samples, sliced(old), LONGEST), in_batches(ops, weights, samples, sliced(new), LONGEST)
    )


@pytest.mark.parametrize("used", [1, 2], ids="{} threads".format)
def test_nor_do_order_padding_and_threads_matter(
    ops: Any, weights: dict[str, torch.Tensor], samples: list[torch.Tensor], used: int
) -> None:
    alone = in_batches(ops, weights, samples, sliced(1))
    order = torch.randperm(SEQUENCES, generator=torch.Generator().manual_seed(2)).tolist()
    with threads(used):
        assert_same(in_batches(ops, weights, samples, sliced(8, order)), alone)
        assert_same(in_batches(ops, weights, samples, sliced(28, order), 2 * LONGEST), alone)


def test_a_logprob_does_depend_on_its_own_tokens(
    ops: Any, weights: dict[str, torch.Tensor], samples: list[torch.Tensor]
) -> None:
    """The control: one other token at the start of a sample is seen to its end, and in no other sample."""
    changed = [row.clone() for row in samples]
    changed[3][0] = (changed[3][0] + 1) % VOCABULARY
    before = in_batches(ops, weights, samples, sliced(8), LONGEST)
    after = in_batches(ops, weights, changed, sliced(8), LONGEST)
    assert (before[3] != after[3]).float().mean() > 0.9
    assert_same(before[:3] + before[4:], after[:3] + after[4:])


@pytest.mark.parametrize(("moved", "still"), [("actor", "recompute"), ("recompute", "actor")])
def test_one_path_that_moves_alone_is_named(tmp_path: Path, moved: str, still: str) -> None:
    """What the report saw: rollout and one path agree, the other differs by a rounding in one token."""
    run = make_run(tmp_path / "run", 1)

    def nudge(meta: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors[moved][2, 1] = np.nextafter(tensors[moved][2, 1], np.float32(-np.inf))

    rewrite(run, "step-0001", nudge)
    document = judge_run(run, "zero", BOUNDS)
    assert document["verdict"] == "fail"
    assert [r["where"] for r in document["reasons"]] == [f"theta0 {moved}"]
    counts = {c["path"]: c["mismatched"] for c in document["compares"] if c["weights"] == "theta0"}
    assert counts == {moved: 1, still: 0}
