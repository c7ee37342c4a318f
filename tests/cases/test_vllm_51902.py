"""vllm#51902: a request that decodes gets other bits when a neighbour's prefill grows from 9 tokens to 10.

FlashAttention 3 picks its tile by the longest query of the batch, and with the tile the order of the sum over keys: one
stranger's tenth token changes everybody. Here the same geometry (14 query heads on 2 of keys, head size 64, 19802 keys,
cache blocks of 16 and 128), the sizes around it, and the linear that the same tokens pass.
"""

import pytest
import torch
from operator_cases import DTYPES, Layout, Sequence, assert_same_bits, attend, ops, threads, values

HEADS = (14, 2)
NEIGHBOURS = (1, 2, 8, 9, 10, 11, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)


def _neighbour(tokens: int) -> Sequence:
    """Its first tokens are the same whatever their number."""
    whole = Sequence.random(129, 129, HEADS, seed=50)
    return whole.part(0, tokens)


@pytest.mark.parametrize("block_size", [16, 128])
def test_a_neighbours_tenth_token_changes_nothing(block_size: int) -> None:
    victim = Sequence.random(19802, 1, HEADS)
    (alone,) = attend([victim], Layout(block_size))
    for tokens in (9, 10):
        found = attend([victim, _neighbour(tokens)], Layout(block_size))
        assert_same_bits(found[0], alone, f"beside a prefill of {tokens}")


@pytest.mark.parametrize("keys", [1, 63, 64, 65, 192, 1023, 1025])
@pytest.mark.parametrize("used", [1, 2], ids="{} threads".format)
def test_nor_does_any_other_size_of_it(keys: int, used: int) -> None:
    """Victims of other lengths, before and behind the neighbour; and what the neighbour's own first tokens get."""
    victim = Sequence.random(keys, 1, HEADS, seed=keys)
    (alone,) = attend([victim])
    (longest,) = attend([_neighbour(max(NEIGHBOURS))])
    with threads(used):
        for tokens in NEIGHBOURS:
            first, neighbour, last = attend([victim, _neighbour(tokens), victim], Layout(seed=tokens))
            assert_same_bits(first, alone, f"before a prefill of {tokens}")
            assert_same_bits(last, alone, f"behind a prefill of {tokens}")
            assert_same_bits(neighbour, [tensor[:tokens] for tensor in longest], f"a prefill of {tokens} itself")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nor_does_it_in_a_linear(dtype: torch.dtype) -> None:
    """The victim's token and the neighbour's are the rows of one product."""
    rows, weight = values((1 + max(NEIGHBOURS), 896), dtype), values((1152, 896), dtype, seed=1)
    whole = ops.linear(rows, weight)
    for tokens in NEIGHBOURS:
        assert_same_bits(ops.linear(rows[: 1 + tokens], weight), whole[: 1 + tokens], f"beside {tokens} tokens")
