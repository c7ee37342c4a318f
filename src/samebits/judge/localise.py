"""Two traces of the same tokens: the first layer and operator whose bits part, or that none does.

A trace holds one hash for each operator and token (`samebits.probe.trace`). The first operator, in the order in which
they ran, that put out another row is the one to look at: all before it agreed, at every token.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from .verdict import JudgeError


@dataclass(frozen=True)
class Accused:
    """Where two runs part. layer: None outside of the decoder layers. weight: a parameter of the module that differs
    between the two. rows: how many of the compared rows of this operator differ; request, position: the first."""

    layer: int | None
    module: str
    operator: str
    call: int
    weight: str | None
    request: str
    position: int
    differ: int
    rows: int

    def text(self) -> str:
        where = "no decoder layer" if self.layer is None else f"layer {self.layer}"
        what = f"{where}, {self.module}: {self.operator}"
        if self.weight:
            what += f", whose weight {self.weight} differs"
        at = f"{self.differ} of {self.rows} tokens, the first at position {self.position} of {self.request}"
        return f"{what}; {at}" if self.differ else f"{what}; no token shows it"

    def document(self) -> dict[str, Any]:
        return asdict(self)


def layer_of(module: str) -> int | None:
    """The decoder layer of a module or parameter name."""
    found = re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", module)
    return int(found[1]) if found else None


def first_difference(
    left: dict[str, Any], right: dict[str, Any], request: str | None = None, against: str | None = None
) -> Accused | None:
    """The first operator that parts, over every request that both traces have (or `request` of left and `against` of
    right); None if all rows agree and no weight differs. JudgeError if no row can be compared."""
    pairs = [(request, against or request)] if request else [(name, name) for name in left["rows"]]
    here, there = ({tuple(key): str(i) for i, key in enumerate(one["operators"])} for one in (left, right))
    common = [key for key in here if key in there]
    weights = [
        name
        for name, digest in left["weights"].items()
        if name in right["weights"] and right["weights"][name] != digest
    ]
    owners = {name.rpartition(".")[0] for name in weights}
    compared = 0
    hidden: Accused | None = None
    for key in common:
        if hidden is not None and key[0] != hidden.module:
            return hidden
        rows, parted = 0, []
        for one, other in pairs:
            mine, theirs = left["rows"].get(one, {}), right["rows"].get(other, {})
            for position in sorted(mine.keys() & theirs.keys(), key=int):
                a, b = mine[position].get(here[key]), theirs[position].get(there[key])
                if a is None or b is None:
                    continue
                rows += 1
                if a != b:
                    parted.append((one, int(position)))
        compared += rows
        module = key[0]
        if not parted and not (module in owners and rows and hidden is None):
            continue
        # A weight that differs accuses its module even if rounding hid it at every token: the operator that shows it,
        # if one does, else the first.
        weight = next((name for name in weights if name.rpartition(".")[0] == module), None)
        at = parted[0] if parted else (str(pairs[0][0]), 0)
        accused = Accused(layer_of(module), module, key[1], key[2], weight, *at, len(parted), rows)
        if parted:
            return accused
        hidden = accused
    if hidden is not None:
        return hidden
    if not compared:
        raise JudgeError("the traces share no token: trace the same requests on both sides")
    if weights:
        module = weights[0].rpartition(".")[0]
        return Accused(layer_of(module), module, "none was seen", 0, weights[0], str(pairs[0][0]), 0, 0, compared)
    return None
