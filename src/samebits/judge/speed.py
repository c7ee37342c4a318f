"""What BI=1 may cost, and whether a measurement of `samebits bench cpu` shows that it costs no more.

A workload keeps its bound if the median of the ratios BI=1 ÷ BI=0 does, a ratio being of two turns next to each other;
a measurement counts from `LEAST_ROUNDS` on, so that the median is none of the two worst rounds of a shared machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LEAST_ROUNDS = 5


@dataclass(frozen=True)
class Bound:
    """least or most: of BI=1 ÷ BI=0; one of the two is given."""

    unit: str
    least: float | None = None
    most: float | None = None

    def kept(self, ratio: float) -> bool:
        return (self.least is None or ratio >= self.least) and (self.most is None or ratio <= self.most)

    def text(self) -> str:
        return f"≥ {self.least:.2f}" if self.least is not None else f"≤ {self.most:.2f}"


# Every workload of a measurement, in its order.
MUST = {
    "decode, 1 request": Bound("tokens/s", least=0.95),
    "decode, 16 requests": Bound("tokens/s", least=0.95),
    "prefill, 512 tokens": Bound("tokens/s", least=0.85),
    "trainer step, 4 x 64 tokens": Bound("s", most=1.2),
}


def ratios(row: Mapping[str, Any]) -> list[float]:
    """BI=1 ÷ BI=0 of each round: the two were measured next to each other."""
    return [one / zero for zero, one in zip(row["values"]["0"], row["values"]["1"], strict=True)]


def kept(row: Mapping[str, Any]) -> bool:
    """Whether the median ratio of a workload of `MUST` is what it must be."""
    return MUST[row["workload"]].kept(statistics.median(ratios(row)))


def missed(document: Mapping[str, Any]) -> list[str]:
    """What a measurement lacks of what it must show, one text each: a contract, rounds, a workload, its bound."""
    rounds, executions = document["rounds"], document["executions"]
    found = []
    if rounds < LEAST_ROUNDS:
        found.append(f"{rounds} rounds, fewer than {LEAST_ROUNDS}")
    if executions["0"].get("contract"):
        found.append(f"BI=0 computed by the contract {executions['0']['contract']}")
    if not executions["1"].get("contract"):
        found.append("BI=1 computed by no contract")
    names = [row["workload"] for row in document["rows"]]
    found += [f"{name}: is not measured" for name in MUST if name not in names]
    found += [f"{name}: is none of the workloads" for name in names if name not in MUST]
    found += [f"{name}: is listed twice" for name in MUST if names.count(name) > 1]
    for row in document["rows"]:
        if (name := row["workload"]) not in MUST:
            continue
        if row["unit"] != MUST[name].unit or {len(values) for values in row["values"].values()} != {rounds}:
            found.append(f"{name}: is not one number a round in {MUST[name].unit}")
        elif not kept(row):
            found.append(f"{name}: {statistics.median(ratios(row)):.2f}, must be {MUST[name].text()}")
    return found
