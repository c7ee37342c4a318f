"""Running sums: an arithmetic task that a program can check, small enough to learn a tenth of in a minute on two cores.

A question is a row of digits, the answer its running sums: ``3 1 4`` → ``3 4 8``. verl loads `compute_score` from
this file by path, so it imports nothing of the package.
"""

import random

QUESTION_LENGTHS = (6, 7, 8)


def question(rng: random.Random) -> str:
    """Six to eight digits, separated by spaces."""
    return " ".join(str(rng.randrange(10)) for _ in range(rng.choice(QUESTION_LENGTHS)))


def answer(text: str) -> str:
    """The running sums of a question, separated by spaces."""
    total, sums = 0, []
    for digit in text.split():
        total += int(digit)
        sums.append(str(total))
    return " ".join(sums)


def examples(count: int, seed: int) -> list[tuple[str, str]]:
    """``count`` (question, answer) pairs; the same for the same seed."""
    rng = random.Random(seed)
    questions = [question(rng) for _ in range(count)]
    return [(text, answer(text)) for text in questions]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """1 for the right answer; otherwise half the share of sums that stand right at their place.

    The signature is verl's custom reward function; the partial credit lets rewards differ inside a group.
    """
    said, right = solution_str.split(), ground_truth.split()
    if said == right:
        return 1.0
    return 0.5 * sum(a == b for a, b in zip(said, right, strict=False)) / len(right)
