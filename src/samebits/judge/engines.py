"""What vLLM's engines must reach on an H200 at BI=1, and whether measurements of `samebits bench engine` show it.

The arms are known by their names: `unpatched0` is the release at BI=0, against which all others are counted,
`unpatched1` the same at BI=1; `bi0` and `bi1` are ours, `first` is the series' first commit for CUDA at BI=1. A
ratio is of two turns of one round.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .speed import Bound

RELEASE = "unpatched0"
MODEL = "Qwen3-8B"
LEAST_ROUNDS = 3
UNIT = "tokens/s"

COMMAND = "samebits"  # that a measurement's command begins with, unless a variable of the environment stands before it

Case = tuple[int, int, int]  # tokens of a prompt, of an answer (1: the prompts' tokens count), requests


def _at_least(**least: float) -> dict[str, tuple[Bound, ...]]:
    return {arm: (Bound(UNIT, least=value),) for arm, value in least.items()}


SAME = {"bi0": (Bound(UNIT, least=0.99), Bound(UNIT, most=1.01))}
MUST: dict[Case, dict[str, tuple[Bound, ...]]] = {
    (1024, 128, 1): {**SAME, **_at_least(first=0.97, bi1=1.02)},
    (1024, 128, 16): {**SAME, **_at_least(first=1.00, bi1=1.00)},
    (1024, 256, 64): {**SAME, **_at_least(first=1.00, bi1=1.00)},
    (1024, 1, 64): {**SAME, **_at_least(first=0.99, bi1=0.99)},
    (8192, 1024, 1): _at_least(bi1=0.95),
    (8192, 1024, 4): _at_least(bi1=0.97),
    (8192, 1024, 16): _at_least(bi1=0.98),
    (8192, 1024, 64): _at_least(bi1=0.98),
}

# The arm that says of each request in shared steps what it says of it alone.
INVARIANT = "bi1"
# Arms that say the same bits: of each request alone, and of requests that share steps where that does not matter.
SAY_THE_SAME = {(RELEASE, "bi0"): ("alone",), ("unpatched1", "first"): ("together", "alone")}


def name(case: Case) -> str:
    prompt, answer, requests = case
    return f"{requests} x {prompt} tokens" + (f", {answer} more" if answer > 1 else "")


def case_of(row: Mapping[str, Any]) -> Case:
    return row["case"]["prompt"], row["case"]["answer"], row["case"]["requests"]


def ratios(row: Mapping[str, Any], arm: str) -> list[float]:
    """arm ÷ the release at BI=0, of each round."""
    return [one / base for base, one in zip(row["values"][RELEASE], row["values"][arm], strict=True)]


def missed(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """What measurements together lack of `MUST`, one text each: a case, an arm, rounds, a bound."""
    found: list[str] = []
    seen: dict[Case, set[str]] = {case: set() for case in MUST}
    for document in documents:
        if document["model"]["name"] != MODEL or document["eager"]:
            found.append(
                f"a measurement of {document['model']['name']}, eager {document['eager']}: is none of {MODEL}, compiled"
            )
            continue
        if document["rounds"] < LEAST_ROUNDS:
            found.append(f"{document['rounds']} rounds, fewer than {LEAST_ROUNDS}")
        found += _wrong_arms(document["arms"])
        if document["command"].split()[0] != COMMAND and RELEASE in document["arms"]:
            found.append(f"a measurement of speed with {document['command'].split()[0]}: make it without")
        for row in document["rows"]:
            if (case := case_of(row)) not in MUST:
                continue
            values = row["values"]
            if set(values) != set(document["arms"]) or {len(one) for one in values.values()} != {document["rounds"]}:
                found.append(f"{name(case)}: is not one number a round and arm")
                continue
            if RELEASE not in values:
                continue  # it is about what arms say, not how fast
            for arm in (arm for arm in MUST[case] if arm in values):
                seen[case].add(arm)
                found += _broken(case, arm, ratios(row, arm))
    if len({json.dumps(document["card"], sort_keys=True) for document in documents}) > 1:
        found.append("the measurements are of several cards or drivers")
    found += _of_several_wheels(documents) + _apart(documents)
    found += [f"{name(case)}, {arm}: is not measured" for case in MUST for arm in MUST[case] if arm not in seen[case]]
    return found


def _wrong_arms(arms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Arms that are not what their names say."""
    found = []
    for arm, bi, ours in (
        (RELEASE, 0, False),
        ("unpatched1", 1, False),
        ("bi0", 0, True),
        ("first", 1, True),
        ("bi1", 1, True),
    ):
        if (said := arms.get(arm)) is None:
            continue
        if said["bi"] != bi or ("git_commit" in said["tree"]) != ours:
            found.append(f"{arm} is BI={said['bi']} of {said['tree']['wheel']}")
        elif ours and said["tree"]["git_commit"].endswith("-dirty"):
            found.append(f"{arm} is of sources that were not committed")
        elif ours and bi and not said["admitted"]:
            found.append(f"{arm} admitted nothing: it ran on another vllm's kernels")
    return found


def _of_several_wheels(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Arms that are not one wheel in all measurements."""
    wheels: dict[str, set[str]] = {}
    for document in documents:
        for arm, said in document["arms"].items():
            wheels.setdefault(arm, set()).add(said["tree"].get("sha256", said["tree"]["wheel"]))
    return [f"{arm} is of {len(several)} wheels" for arm, several in sorted(wheels.items()) if len(several) > 1]


def _apart(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """What arms that must say the same did not say the same, or were not asked."""
    found = []
    shared = [document["arms"].get(INVARIANT, {}).get("shared") for document in documents]
    if not any(shared):
        found.append(f"{INVARIANT}: what it says together is not compared with what it says alone")
    controls = [document["arms"][RELEASE].get("shared") for document in documents if RELEASE in document["arms"]]
    if not any(count and count["logprobs"] for count in controls):
        found.append(f"{RELEASE}: says together what it says alone, so that no requests may have shared a step")
    for count in filter(None, shared):
        if differ := count["tokens"] + count["logprobs"]:
            found.append(f"{INVARIANT}: {differ} tokens and logprobs differ together from alone")
    for (a, b), ways in SAY_THE_SAME.items():
        about = _about(documents, a, b)
        said = [one for document in about for one in document["said"] if set(one["pair"]) == {a, b}]
        words = [document["command"].split()[0] for document in about]
        if words and COMMAND not in words:
            found.append(f"{a} and {b}: are compared only with {words[0]}")
        for how in ways:
            counts = [one if how == "together" else one["alone"] for one in said if how == "together" or "alone" in one]
            differ = sum(count["tokens"] + count["logprobs"] for count in counts)
            if not counts:
                found.append(f"{a} and {b}: what they say {how} is not compared")
            elif differ:
                found.append(f"{a} and {b}: {differ} tokens and logprobs differ {how}")
    return found


def _about(documents: Sequence[Mapping[str, Any]], a: str, b: str) -> list[Mapping[str, Any]]:
    """The measurements that compare two arms."""
    return [document for document in documents if any(set(one["pair"]) == {a, b} for one in document["said"])]


def _broken(case: Case, arm: str, found: Sequence[float]) -> list[str]:
    middle = statistics.median(found)
    return [
        f"{name(case)}, {arm}: {middle:.3f} of {RELEASE}, must be {bound.text()}"
        for bound in MUST[case][arm]
        if not bound.kept(middle)
    ]
