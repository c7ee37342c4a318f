"""sglang#27869: logprobs of a request differ alone and in a batch, because two code paths look at the batch's size.

One was a norm that takes one row a block or two by how many rows there are, the other a sum over experts that is done
by another kernel from 33 tokens on. A row must not feel such a threshold: here every operator and attention at 32 and
33 tokens, and on both sides of the other sizes at which a launch may change.
"""

import pytest
import torch
from operator_cases import DTYPES, ROW_OPERATORS, Sequence, assert_same_bits, attend, take, tuple_of

THRESHOLDS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 256)
FOLLOWING = [size + step for size in THRESHOLDS for step in (0, 1)]


@pytest.mark.parametrize("name", ROW_OPERATORS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_32_tokens_and_33(name: str, dtype: torch.dtype) -> None:
    operator = ROW_OPERATORS[name]
    width = 128 if name == "rotary_embedding" else 1024
    rows, shared = operator.cases(max(FOLLOWING), width, dtype)
    alone = [tuple_of(operator.call(take(rows, slice(row, row + 1)), shared)) for row in range(max(FOLLOWING))]
    wanted = tuple(torch.cat(parts) for parts in zip(*alone, strict=True))
    for size in FOLLOWING:
        found = operator.call(take(rows, slice(size)), shared)
        assert_same_bits(found, take(wanted, slice(size)), f"{size} tokens")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_32_requests_and_33_in_attention(dtype: torch.dtype) -> None:
    """Decodes of many lengths; the first is looked at, then all of the smaller batch."""
    batch = [Sequence.random(1 + 7 * n % 150, 1, dtype=dtype, seed=n) for n in range(129)]
    alone = [attend([one])[0] for one in batch]
    for size in (size for size in FOLLOWING if size <= len(batch)):
        for n, (found, wanted) in enumerate(zip(attend(batch[:size]), alone, strict=False)):
            assert_same_bits(found, wanted, f"request {n} of {size}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_32_tokens_of_a_prompt_and_33(dtype: torch.dtype) -> None:
    """A prompt that is a token longer says the same of the tokens that it shares."""
    whole = Sequence.random(257, 257, dtype=dtype)
    ((out, lse),) = attend([whole])
    for size in FOLLOWING:
        ((its_out, its_lse),) = attend([whole.part(0, size)])
        assert_same_bits((its_out, its_lse), (out[:size], lse[:size]), f"{size} tokens")
