"""The C3 matrix: which recordings of an engine must hold the same bits, and what shows that each cell was really run.

This is the only list of cells and of the requests that they compare. `samebits.probe.invariance` makes engines that are
asked these requests, the judge compares what they said, and a recording that lacks any of it is no pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

POWERS = tuple(range(1, 12))  # prompts of 2^k - 1, 2^k and 2^k + 1 tokens, up to 2049
QUICK_POWERS = (3, 5, 7)
BATCHES = (2, 4, 8, 16, 32, 64)
QUICK_BATCHES = (2, 8, 32)
COMPILED_BATCHES, COMPILED_POWERS = (8, 64), (1, 2, 3, 4, 5, 6, 7)
BUDGETS = (32, 64, 256)
QUICK_BUDGETS = (32,)
ANSWER, FORCED_ANSWER, CROWD_ANSWER = 6, 4, 8  # tokens; of the power-of-two cells; of those that run out of cache
VICTIMS = (5, 20, 70)
# 9 and 10 are the two sides of a tile that a neighbour's prefill once flipped.
NEIGHBOURS = (1, 9, 10, 3, 16, 2, 7, 33, 4, 12)
LATE = (9, 10, 33, 2, 128, 300)
SAMPLE, QUICK_SAMPLE = (3, 9, 17, 33, 65, 200), (3, 40, 65)
PREFIXES = (40, 70, 100)
BLOCK = 32  # tokens of a block of the caches that are shared or run out
CROWD = 6  # requests that need one more block each at the same step, from a cache that has one to spare
THREADS = 2
ONE_BY_ONE = 10**6  # steps to wait: each enters when the former is done
PROMPTS, WHOLE = "prompts", "whole"  # whole: the one request whose prefill covers every one of the prompts

Side = Literal["left", "right"]


@dataclass(frozen=True)
class Request:
    """One request: the tokens of its prompt and of its answer, and which of their logprobs are recorded.

    prompt_logprobs: the prompt's too, from its second token on. after: the steps of the engine after which it enters.
    """

    id: str
    prompt: int
    answer: int = ANSWER
    prompt_logprobs: bool = False
    after: int = 0

    @property
    def start(self) -> int:
        """The position of the first token whose logprob is recorded."""
        return 1 if self.prompt_logprobs else self.prompt

    @property
    def tokens(self) -> int:
        return self.prompt + self.answer


Requests = tuple[Request, ...]
Plan = dict[str, dict[str, Requests]]  # engine -> say -> its requests, in the order in which they are asked
Pairs = tuple[tuple[Request, Request], ...]


@dataclass(frozen=True)
class Proof:
    """That what a cell is about took place: a count of one side's recording is at least `least` and at most `most`."""

    side: Side
    fact: str
    least: int
    most: int | None = None

    def refutes(self, value: int | None) -> str | None:
        """What is wrong with a count, or None."""
        if value is None or value < self.least:
            return f"{self.fact} is {value}, less than {self.least}"
        if self.most is not None and value > self.most:
            return f"{self.fact} is {value}, more than {self.most}"
        return None


@dataclass(frozen=True)
class Cell:
    """One row of the matrix: two recordings that must be equal bit for bit.

    left, right: (engine, say), the names of a process and of one set of requests that it served. pairs: the requests to
    compare, all of which must be there. answers: compare decoded positions only, not the prompt's. apart: a fact of the
    two engines that must differ.
    """

    name: str
    left: tuple[str, str]
    right: tuple[str, str]
    pairs: Pairs
    proofs: tuple[Proof, ...] = ()
    answers: bool = False
    apart: str | None = None

    def span(self, one: Request, other: Request) -> tuple[int, int]:
        """The positions of a pair that are compared: [begin, end)."""
        return max(one.start, other.start, one.prompt if self.answers else 0), min(one.tokens, other.tokens)

    @property
    def positions(self) -> int:
        """How many logprobs of each side are compared, if no answer parts from the other side's."""
        return sum(end - begin for begin, end in (self.span(*pair) for pair in self.pairs))


def lengths(power: int) -> tuple[int, int, int]:
    """The prompt lengths around a power of two."""
    return 2**power - 1, 2**power, 2**power + 1


# What the engines are asked


def says(quick: bool = False) -> Plan:
    """All that the engines of one arm and dtype are asked."""
    sample = tuple(Request(f"sample-{n}", n, prompt_logprobs=True) for n in (QUICK_SAMPLE if quick else SAMPLE))
    prefixes = tuple(Request(f"prefix-{n}", n) for n in PREFIXES)
    crowd = tuple(Request(f"crowd-{i}", BLOCK - 4 + i % 3, CROWD_ANSWER) for i in range(CROWD))
    powers, batches = (QUICK_POWERS, QUICK_BATCHES) if quick else (POWERS, BATCHES)
    asked = {"sample": sample}
    shuffled = {**asked, "reversed": sample[::-1]}
    victims = {**_batched(batches), "joined": _joining()}
    plan: Plan = {
        "base": {**victims, **_prefilled(powers), **shuffled, "prefixes": prefixes, "crowd": crowd},
        **{f"chunks-{n}": asked for n in (QUICK_BUDGETS if quick else BUDGETS)},
        "prefix": {"cold": prefixes, "warm": prefixes},
        "small-cache": {"crowd": crowd},
        "one-thread": asked,
        "second": asked,
    }
    if not quick:
        plan["compiled"] = {
            **_batched(COMPILED_BATCHES),
            "joined": _joining(),
            **_prefilled(COMPILED_POWERS),
            **shuffled,
        }
    return plan


def _victims(after: int = 0) -> Requests:
    return tuple(Request(f"victim-{n}", n, after=after) for n in VICTIMS)


def _batched(sizes: tuple[int, ...]) -> dict[str, Requests]:
    neighbours = tuple(Request(f"neighbour-{i}", NEIGHBOURS[i % len(NEIGHBOURS)]) for i in range(max(sizes)))
    found = {"alone": _victims(ONE_BY_ONE)}
    for size in sizes:
        few = _victims() if size >= 4 else _victims()[1:2]
        # The victims stand in the middle of their neighbours, not in front.
        before = (size - len(few)) // 2
        found[f"batch-{size}"] = (*neighbours[:before], *few, *neighbours[before : size - len(few)])
    return found


def _joining() -> Requests:
    """Neighbours of 2 to 300 tokens enter while the victims decode."""
    return (*_victims(), *(Request(f"late-{n}", n, after=2 + i % 3) for i, n in enumerate(LATE)))


def _prefilled(powers: tuple[int, ...]) -> dict[str, Requests]:
    every = sorted({n for power in powers for n in lengths(power)})
    prompts = (Request(f"prompt-{n}", n, FORCED_ANSWER, prompt_logprobs=True, after=ONE_BY_ONE) for n in every)
    return {PROMPTS: tuple(prompts), WHOLE: (Request(WHOLE, every[-1] + FORCED_ANSWER, 1, prompt_logprobs=True),)}


# What is compared


def cells(quick: bool = False) -> tuple[Cell, ...]:
    """The cells of one arm and dtype, in the order of the table."""
    plan = says(quick)
    powers, batches = (QUICK_POWERS, QUICK_BATCHES) if quick else (POWERS, BATCHES)
    sample, prefixes, crowd = ("base", "sample"), ("base", "prefixes"), ("base", "crowd")
    uncached = _exactly("cached_tokens", 0, "left")
    cold = (uncached, _exactly("cached_tokens", 0, "right"))
    warm = (uncached, _least("cached_tokens", BLOCK, "right"))
    preempted = (_exactly("preempted", 0, "left"), _least("preempted", 1, "right"))
    threads = (_exactly("threads", THREADS, "left"), _exactly("threads", 1, "right"))
    found = [*_batches(plan, "base", batches), _joined(plan, "base"), *_powers(plan, "base", powers)]
    for n in QUICK_BUDGETS if quick else BUDGETS:
        chunked = (_exactly("chunked", 0, "left"), _least("chunked", 1, "right"))
        found.append(_cell(plan, f"chunked prefill, budget {n}", sample, (f"chunks-{n}", "sample"), chunked))
    found += [
        _cell(plan, "prefix cache: off, cold", prefixes, ("prefix", "cold"), cold),
        _cell(plan, "prefix cache: off, warm", prefixes, ("prefix", "warm"), warm),
        _cell(plan, "preemption and recompute", crowd, ("small-cache", "crowd"), preempted),
        _order(plan, "base"),
        _cell(plan, "1 and 2 threads", sample, ("one-thread", "sample"), threads),
        _cell(plan, "two processes", sample, ("second", "sample"), apart="process"),
    ]
    if not quick:
        compiled = (_exactly("compiled", 0, "left"), _least("compiled", 1, "right"))
        found += [
            *_batches(plan, "compiled", COMPILED_BATCHES),
            _joined(plan, "compiled"),
            *_powers(plan, "compiled", COMPILED_POWERS),
            _order(plan, "compiled"),
            _cell(plan, "eager and compiled", sample, ("compiled", "sample"), compiled),
        ]
    return tuple(found)


def _exactly(fact: str, count: int, side: Side) -> Proof:
    return Proof(side, fact, count, count)


def _least(fact: str, count: int, side: Side) -> Proof:
    return Proof(side, fact, count)


def _cell(
    plan: Plan,
    name: str,
    left: tuple[str, str],
    right: tuple[str, str],
    proofs: tuple[Proof, ...] = (),
    apart: str | None = None,
) -> Cell:
    """The requests that both sides are asked, each with itself."""
    there = {request.id: request for request in plan[right[0]][right[1]]}
    here = plan[left[0]][left[1]]
    return Cell(name, left, right, tuple((r, there[r.id]) for r in here if r.id in there), proofs, apart=apart)


def _named(engine: str) -> tuple[str, tuple[Proof, ...]]:
    """How the cells of an engine are called, and what shows that they are of it."""
    if engine == "base":
        return "", ()
    return f"{engine}: ", (_least("compiled", 1, "left"), _least("compiled", 1, "right"))


def _batches(plan: Plan, engine: str, sizes: tuple[int, ...]) -> list[Cell]:
    prefix, proofs = _named(engine)
    found = []
    for n in sizes:
        together = (_exactly("together", 1, "left"), _least("together", n, "right"))
        name = f"{prefix}alone, batch of {n}"
        found.append(_cell(plan, name, (engine, "alone"), (engine, f"batch-{n}"), (*proofs, *together)))
    return found


def _joined(plan: Plan, engine: str) -> Cell:
    prefix, proofs = _named(engine)
    mixed = (_exactly("together", 1, "left"), _least("mixed_steps", 1, "right"))
    name = f"{prefix}alone, neighbours join in decode"
    return _cell(plan, name, (engine, "alone"), (engine, "joined"), (*proofs, *mixed))


def _order(plan: Plan, engine: str) -> Cell:
    prefix, proofs = _named(engine)
    all_at_once = len(plan[engine]["sample"])
    together = (_least("together", all_at_once, "left"), _least("together", all_at_once, "right"))
    name = f"{prefix}request order"
    return _cell(plan, name, (engine, "sample"), (engine, "reversed"), (*proofs, *together))


def _powers(plan: Plan, engine: str, powers: tuple[int, ...]) -> list[Cell]:
    prefix, proofs = _named(engine)
    prompts, (whole,) = plan[engine][PROMPTS], plan[engine][WHOLE]
    proofs += (
        # Each prompt alone and in one prefill, then a step a token; the whole text in one prefill.
        _exactly("together", 1, "left"),
        _exactly("chunked", 0, "left"),
        _exactly("cached_tokens", 0, "left"),
        _least("largest_step", max(request.prompt for request in prompts), "left"),
        _least("steps", sum(request.answer for request in prompts), "left"),
        _exactly("cached_tokens", 0, "right"),
        _least("largest_step", whole.prompt, "right"),
    )
    sides = (engine, PROMPTS), (engine, WHOLE)
    found = []
    for power in powers:
        short, _, long = lengths(power)
        pairs = tuple((request, whole) for request in prompts if request.prompt in lengths(power))
        name = f"{prefix}decode, prefill: prompts {short} to {long}"
        found.append(Cell(name, *sides, pairs, proofs, answers=True))
    every = tuple((request, whole) for request in prompts)
    found.append(Cell(f"{prefix}prefill, prefill of a longer text", *sides, every, proofs))
    return found
