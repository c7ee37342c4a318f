"""Layer 3: three arms of one supervised run, and what a difference between them is due to.

Under test: the aligned forward with its own backward. Gradient reference: the same forward, every operator's backward
its surrogate's in FP64. Native baseline: Megatron Core's local layer spec. Same weights, data, order and settings. What
counts is fixed here: the steps, the window (evaluations from the middle of the run on) and how far the validation NLL
may be apart, which is `TIMES` the spread between seeds of the baseline and at most `MOST`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

TEST, REFERENCE, NATIVE = "under test", "gradient reference", "native baseline"
ARMS = (TEST, REFERENCE, NATIVE)
STEPS, LEAST_SEEDS = 40, 3
TIMES, MOST = 3.0, 0.02  # nats
# Settings that the arms may differ in, and what each has.
DIFFERENCES = {
    "layer spec": {TEST: "aligned", REFERENCE: "aligned", NATIVE: "local"},
    "backward": {TEST: "its own", REFERENCE: "surrogates in FP64", NATIVE: "its own"},
}
NUMBERS = ("loss", "grad_norm", "update_rms", "clip", "seconds")


def spread(document: Mapping[str, Any]) -> float:
    """The standard deviation of the last validation NLL between seeds of the baseline; NaN of fewer than two."""
    last = [one["validation"][-1]["nll"] for one in document["seeds"]]
    return statistics.stdev(last) if len(last) > 1 else math.nan


def bound(document: Mapping[str, Any]) -> float:
    """The most by which the validation NLL of two arms may differ, in nats."""
    return min(TIMES * spread(document), MOST)


def forward_bound(document: Mapping[str, Any]) -> float:
    """The most by which the first losses of two forwards may differ, relative: bf16 rounds 14 times a layer and 4 more,
    each time by at most 2^-8, which add up like a root."""
    return 2.0**-8 * math.sqrt(14 * document["layers"] + 4)


def window(document: Mapping[str, Any], arm: str) -> list[float]:
    """The validation NLLs that are compared."""
    half = document["steps"] / 2
    return [row["nll"] for row in document["arms"][arm]["validation"] if row["step"] >= half]


def apart(document: Mapping[str, Any], other: str) -> float:
    """The largest difference of the validation NLL between the arm under test and another, within the window."""
    pairs = zip(window(document, TEST), window(document, other), strict=True)
    differences = [abs(a - b) for a, b in pairs]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def localise(document: Mapping[str, Any], other: str) -> tuple[str, str] | None:
    """What a difference between the arm under test and another is due to, by the rules of seed 000, in their order: a
    verdict (fail, inconclusive) and a text; None if there is none that counts."""
    test, against = (document["arms"][name]["steps"] for name in (TEST, other))
    first = abs(test[0]["loss"] - against[0]["loss"])
    allowed = 0.0 if other == REFERENCE else forward_bound(document) * against[0]["loss"]
    if not first <= allowed:
        return "fail", (
            f"the losses of the initial weights differ by {first:.2g}, {allowed:.2g} is allowed: look at the forward, "
            "the data and the mask"
        )
    if other == REFERENCE and (wrong := [row for row in document["first"] if row["wrong"]]):
        named = ", ".join(f"{row['what']} of {row['tensor']}" for row in wrong[:5])
        return "fail", (
            f"initial losses agree and one step does not: {named}: look at the backward, reduction, scale, clipping "
            "and optimizer"
        )
    if not apart(document, other) <= bound(document):
        limit = bound(document)
        when = next((a["step"] for a, b in zip(test, against, strict=True) if abs(a["loss"] - b["loss"]) > limit), None)
        at = "no step's loss" if when is None else f"the loss of step {when} first"
        return "inconclusive", (
            f"one step agrees, and the validation NLL is {apart(document, other):.2g} apart, {limit:.2g} is allowed; "
            f"{at} is further apart: keep the weights before it, look at recomputation, refreshed quantized values, "
            "learning rate and random state, and replay it"
        )
    return None


def missing(document: Mapping[str, Any]) -> list[str]:
    """What keeps a document from telling anything: a run that is short, empty, not finite or not the same for all."""
    found = []
    arms = document["arms"]
    if lacks := set(ARMS) - set(arms):
        return [f"no arm {', '.join(sorted(lacks))}"]
    if document["steps"] < STEPS:
        found.append(f"{document['steps']} steps, fewer than {STEPS}")
    if len(document["seeds"]) < LEAST_SEEDS or len({one["seed"] for one in document["seeds"]}) < LEAST_SEEDS:
        found.append(f"the spread is of {len(document['seeds'])} seeds, {LEAST_SEEDS} are needed")
    elif not spread(document) > 0:
        found.append("the seeds have no spread")
    for name, arm in arms.items():
        rows = arm["steps"]
        if [row["step"] for row in rows] != list(range(1, document["steps"] + 1)):
            found.append(f"{name}: not every step is there")
            continue
        if any(row["nonfinite"] for row in rows):
            found.append(f"{name}: {sum(row['nonfinite'] for row in rows)} values are not finite")
        if not all(row["update_rms"] > 0 and row["grad_norm"] > 0 and row["tokens"] > 0 for row in rows):
            found.append(f"{name}: a step without tokens, gradient or update")
        quarter = max(len(rows) // 4, 1)
        if not sum(r["loss"] for r in rows[-quarter:]) < sum(r["loss"] for r in rows[:quarter]):
            found.append(f"{name}: its loss does not fall")
        if arm["weights_sha256"] != arms[TEST]["weights_sha256"]:
            found.append(f"{name}: other initial weights than the arm under test")
        if [row["tokens"] for row in rows] != [row["tokens"] for row in arms[TEST]["steps"]]:
            found.append(f"{name}: other tokens than the arm under test")
        if [row["step"] for row in arm["validation"]] != [row["step"] for row in arms[TEST]["validation"]]:
            found.append(f"{name}: validated at other steps than the arm under test")
    config = document["config"]
    differ = {key: dict(of) for key, of in config.items() if len({str(value) for value in of.values()}) > 1}
    if differ != DIFFERENCES:
        found.append(f"the arms differ in {', '.join(sorted(differ)) or 'nothing'}, not in {', '.join(DIFFERENCES)}")
    if not document["first"]:
        found.append("no first step was compared")
    return found


def verdict(document: Mapping[str, Any]) -> tuple[str, list[str]]:
    """pass, fail or inconclusive, and why."""
    if found := missing(document):
        return "inconclusive", found
    said = [(other, localise(document, other)) for other in (REFERENCE, NATIVE)]
    told = [(one[0], f"{TEST} and {other}: {one[1]}") for other, one in said if one is not None]
    if not told:
        return "pass", []
    worst = "fail" if any(kind == "fail" for kind, _ in told) else "inconclusive"
    return worst, [text for _, text in told]
