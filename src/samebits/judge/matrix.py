"""The C3 matrix: which recordings of an engine must hold the same bits, and what shows that each cell was really run.

This is the only list of cells. `samebits.probe.invariance` makes the engines and requests that the cells name, the
judge compares them, and a recording that lacks a cell is no pass.
"""

from __future__ import annotations

from dataclasses import dataclass

POWERS = tuple(range(1, 12))  # prompts of 2^k - 1, 2^k and 2^k + 1 tokens, up to 2049
QUICK_POWERS = (3, 5, 7)
BATCHES = (2, 4, 8, 16, 32, 64)
QUICK_BATCHES = (2, 8, 32)
COMPILED_BATCHES, COMPILED_POWERS = (8, 64), (1, 2, 3, 4, 5, 6, 7)
BUDGETS = (32, 64, 256)
QUICK_BUDGETS = (32,)
WHOLE = "whole"  # the one request whose prefill covers every prompt of the power-of-two cells


@dataclass(frozen=True)
class Cell:
    """One row of the matrix: two recordings that must be equal bit for bit.

    left, right: (engine, say), the names of a process and of one set of requests that it served. pairs: the request
    ids to compare, or None for those that both sides have. answers: compare decoded positions only, not the prompt's.
    proof: a count of the right-hand recording that must be at least `least`: that what the cell is about took place.
    apart: a fact of the two engines that must differ.
    """

    name: str
    left: tuple[str, str]
    right: tuple[str, str]
    pairs: tuple[tuple[str, str], ...] | None = None
    answers: bool = False
    proof: str | None = None
    least: int = 1
    apart: str | None = None


def lengths(power: int) -> tuple[int, int, int]:
    """The prompt lengths around a power of two."""
    return 2**power - 1, 2**power, 2**power + 1


def cells(quick: bool = False) -> tuple[Cell, ...]:
    """The cells of one arm and dtype, in the order of the table."""
    powers, batches = (QUICK_POWERS, QUICK_BATCHES) if quick else (POWERS, BATCHES)
    eager = [*_batches("base", batches), _joined("base"), *_powers("base", powers)]
    eager += [
        Cell(f"chunked prefill, budget {n}", ("base", "sample"), (f"chunks-{n}", "sample"), proof="chunked")
        for n in (QUICK_BUDGETS if quick else BUDGETS)
    ]
    eager += [
        Cell("prefix cache: off, cold", ("base", "prefixes"), ("prefix", "cold")),
        Cell("prefix cache: off, warm", ("base", "prefixes"), ("prefix", "warm"), proof="cached_tokens", least=32),
        Cell("preemption and recompute", ("base", "crowd"), ("small-cache", "crowd"), proof="preempted"),
        Cell("request order", ("base", "sample"), ("base", "reversed"), proof="together", least=2),
        Cell("1 and 2 threads", ("base", "sample"), ("one-thread", "sample"), apart="threads"),
        Cell("two processes", ("base", "sample"), ("second", "sample"), apart="process"),
    ]
    if quick:
        return tuple(eager)
    return (
        *eager,
        *_batches("compiled", COMPILED_BATCHES),
        *_powers("compiled", COMPILED_POWERS),
        Cell("compiled: request order", ("compiled", "sample"), ("compiled", "reversed"), proof="together", least=2),
        Cell("eager and compiled", ("base", "sample"), ("compiled", "sample"), apart="compiled"),
    )


def _prefix(engine: str) -> str:
    return "" if engine == "base" else f"{engine}: "


def _batches(engine: str, sizes: tuple[int, ...]) -> list[Cell]:
    return [
        Cell(
            f"{_prefix(engine)}alone, batch of {n}",
            (engine, "alone"),
            (engine, f"batch-{n}"),
            proof="together",
            least=n,
        )
        for n in sizes
    ]


def _joined(engine: str) -> Cell:
    name = f"{_prefix(engine)}alone, neighbours join in decode"
    return Cell(name, (engine, "alone"), (engine, "joined"), proof="mixed_steps")


def _powers(engine: str, powers: tuple[int, ...]) -> list[Cell]:
    found = []
    for power in powers:
        short, _, long = lengths(power)
        pairs = tuple((f"prompt-{n}", WHOLE) for n in lengths(power))
        name = f"{_prefix(engine)}decode, prefill: prompts {short} to {long}"
        found.append(Cell(name, (engine, "prompts"), (engine, WHOLE), pairs, answers=True))
    every = tuple((f"prompt-{n}", WHOLE) for n in sorted({n for power in powers for n in lengths(power)}))
    name = f"{_prefix(engine)}prefill, prefill of a longer text"
    found.append(Cell(name, (engine, "prompts"), (engine, WHOLE), every))
    return found
