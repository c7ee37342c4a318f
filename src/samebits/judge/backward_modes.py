"""What `samebits bench backward` must have measured of Transformer Engine's modes, and whether a document shows it.

Each module under each recipe in each mode, in the release and in the patched package; that the patched one does what a
mode says, and that the release, where it does not, is on record.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

MODES = {"default": None, "unquant": "high_precision", "dequant": "dequantized"}  # and Transformer Engine's names
RECIPES = ("Float8CurrentScaling", "Float8BlockScaling")
MODULES = ("Linear", "LayerNormLinear", "GroupedLinear", "ops.Linear", "ops chain")
BIASED = ("Linear", "LayerNormLinear", "GroupedLinear")  # whose bias is trained beside a frozen weight
FORMATS = ("E4M3 of the whole", "E5M2 of the whole", "E4M3 in 1 x 128", "E4M3 in 128 x 128")
LEAST_ELEMENTS = 10**5  # of a format
# Gradients are rounded to BF16, 2^-9 of an element at most each time; a quarter more for the order of FP32 sums.
ROUNDING = 1.25 * 2**-9
RUNS = "NVTE_BACKWARD_MODE, a region that does not quantize"
REFUSED = (
    "unquant, quantized parameters",
    "unquant, ops.GroupedLinear",
    "NVTE_BACKWARD_MODE, delayed scaling",
)
RESOLVED, RESOLVES_TO = "NVTE_BACKWARD_MODE, in a new recipe", "high_precision"


def missed(document: Mapping[str, Any]) -> list[str]:
    """What a measurement lacks of what it must show, one text each, arm by arm."""
    found = []
    for name, arm in document["arms"].items():
        found += [f"{name}: {problem}" for problem in lacking(arm)]
    return found + [f"patched: {problem}" for problem in problems(document["arms"]["patched"])]


def lacking(arm: Mapping[str, Any]) -> Iterator[str]:
    """What an arm does not say at all, and what must hold with and without the patch."""
    rows = [(row["module"], row["recipe"], row["mode"]) for row in arm["rows"]]
    for case in product(MODULES, RECIPES, MODES):
        if rows.count(case) != 1:
            yield f"{', '.join(case)}: is measured {rows.count(case)} times"
    formats = {one["format"]: one for one in arm["formats"]}
    for name in FORMATS:
        if (one := formats.get(name)) is None or one["of"] < LEAST_ELEMENTS:
            yield f"{name}: {one['of'] if one else 0} elements are compared, too few"
        elif one["differ"]:
            yield f"{name}: {one['differ']} of {one['of']} elements differ from the judge's"
    tests = arm["tests"]
    if not tests["passed"]:
        yield "none of Transformer Engine's own tests passed: name their folder"
    elif tests["failed"]:
        yield f"{tests['failed']} of Transformer Engine's own tests failed"


def problems(arm: Mapping[str, Any]) -> list[str]:
    """What of a measured arm is not as the modes say."""
    found = []
    for row in arm["rows"]:
        place = f"{row['module']}, {row['recipe']}, {row['mode']}"
        if "refused" in row:
            found.append(f"{place}: {row['refused']}")
            continue
        if row["forward"]["differ"]:
            found.append(f"{place}: the forward differs in {row['forward']['differ']} of {row['forward']['of']}")
        for name, roundings in row["roundings"].items():
            error, bound = row["error"][name], roundings * ROUNDING
            wrong = error is None or not math.isfinite(error)
            if wrong or (row["mode"] != "default" and error > bound):
                found.append(f"{place}: {name} is {error} away, bound {bound:.2g}")
    trained = arm["frozen_weight_bias_gradient"]
    for name, mode in product(BIASED, MODES):
        if not trained.get(f"{name} {mode}"):
            found.append(f"{name}, {mode}: the bias beside a frozen weight gets no gradient")
    said = arm["behaviours"]
    if said.get(RUNS) != "":
        found.append(f"{RUNS}: {said.get(RUNS, 'was not tried')}")
    found += [f"{name}: is not refused" for name in REFUSED if not said.get(name)]
    if said.get(RESOLVED) != RESOLVES_TO:
        found.append(f"{RESOLVED}: {said.get(RESOLVED)}, must be {RESOLVES_TO}")
    return found
