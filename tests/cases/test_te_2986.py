"""TransformerEngine#2986: a row of a linear layer has other bits when more rows are multiplied with it.

The library behind it picks a kernel by the whole shape: with N = K = 2048 in bf16 the row's bits at M = 1 came back
at M = 33 and at no other of 2, 17, 128, 257 and 1024, wherever the row stood. Here that table, the shapes around it,
and its sibling in attention: a decode among as many others.
"""

import pytest
import torch
from operator_cases import DTYPES, Sequence, assert_same_bits, attend, ops, values

SIZES = (1, 2, 17, 33, 128, 257, 1024)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n, k", [(2048, 2048), (256, 1024), (256, 1040), (255, 2047), (33, 4096)])
def test_a_row_is_the_same_at_every_m(n: int, k: int, dtype: torch.dtype) -> None:
    """Row 0, then the same row in the middle and at the end."""
    rows, weight = values((max(SIZES), k), dtype), values((n, k), dtype, seed=1)
    anchor = rows[:1].clone()
    alone = ops.linear(anchor, weight)
    for size in SIZES:
        places = [0, size // 2, size - 1]
        batch = rows[:size].clone()
        batch[places] = anchor
        found = ops.linear(batch, weight)[places]
        assert_same_bits(found, alone.expand(len(places), n), f"M = {size}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_decode_is_the_same_among_as_many_others(dtype: torch.dtype) -> None:
    anchor = Sequence.random(150, 1, dtype=dtype)
    (alone,) = attend([anchor])
    others = [Sequence.random(1 + n % 40, 1, dtype=dtype, seed=n) for n in range(max(SIZES) - 1)]
    for size in SIZES:
        for place in {0, size // 2, size - 1}:
            found = attend([*others[:place], anchor, *others[place : size - 1]])[place]
            assert_same_bits(found, alone, f"{place} of {size}")
