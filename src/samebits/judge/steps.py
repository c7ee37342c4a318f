"""What training runs side by side must show (`samebits bench rl`), and whether a document shows it.

Speed is judged on a real model's geometry, in a document of both arms; quality on one of LEAST_STEPS steps or more.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

BASE, ALIGNED, TRUNCATED = "bi0", "bi1", "bi0-tis"
FIRST = 1  # steps that are not timed: what the first does once (compilers, libraries, allocator) is no part of a step
LEAST_TIMED, LEAST_STEPS, WINDOW = 3, 40, 10
MOST_TIME, MOST_VERIFY = 1.05, 0.01  # of a step: BI=1 ÷ BI=0; the share that comparing takes

Steps = Sequence[Mapping[str, Any]]


def total(step: Mapping[str, Any]) -> float:
    """Seconds of a step, all phases."""
    return float(sum(step["seconds"].values()))


def timed(steps: Steps) -> Steps:
    """The steps that are timed: all behind the first ones; of a run that has no more, those."""
    return steps[FIRST:] or steps


def typical(steps: Steps) -> float:
    """Seconds of a step: the median of those that are timed."""
    return statistics.median(total(step) for step in timed(steps))


def differ(step: Mapping[str, Any]) -> float:
    """Logprobs that differ from the rollout's, on both paths."""
    return float(step["recompute_differ"] + step["actor_differ"])


def identical(document: Mapping[str, Any]) -> list[str]:
    """What keeps BI=1 from being the same bits throughout, one text a step."""
    if ALIGNED not in document["runs"]:
        return [f"{ALIGNED}: did not run"]
    found = []
    for step in document["runs"][ALIGNED]:
        if differ(step) or step["k3"]:
            found.append(f"{ALIGNED}, step {step['step']}: {differ(step):.0f} logprobs differ, k3 {step['k3']:.2g}")
        elif step["compared"] <= 0:
            found.append(f"{ALIGNED}, step {step['step']}: nothing was compared")
    return found


def missed_speed(document: Mapping[str, Any]) -> list[str]:
    """What a document lacks of what the time of a step must be."""
    found = identical(document)
    runs = document["runs"]
    if BASE not in runs or ALIGNED not in runs:
        return [*found, f"{BASE} and {ALIGNED} did not both run"]
    if document["steps"] - FIRST < LEAST_TIMED:
        found.append(f"{document['steps'] - FIRST} steps are timed, fewer than {LEAST_TIMED}")
    if not any(differ(step) for step in runs[BASE]):
        found.append(f"{BASE}: no logprob differs, so that comparing may not compare")
    ratio = typical(runs[ALIGNED]) / typical(runs[BASE])
    if ratio > MOST_TIME:
        found.append(f"a step of {ALIGNED} takes {ratio:.3f} of {BASE}'s time, must be ≤ {MOST_TIME:.2f}")
    share = statistics.median(step["seconds"]["compare"] / total(step) for step in timed(runs[ALIGNED]))
    if share > MOST_VERIFY:
        found.append(f"comparing takes {share:.2%} of a step of {ALIGNED}, must be ≤ {MOST_VERIFY:.0%}")
    return found


def missed_quality(document: Mapping[str, Any]) -> list[str]:
    """What a document lacks of what forty steps must show: the same bits throughout, a reward that rises."""
    found = identical(document)
    if document["steps"] < LEAST_STEPS:
        found.append(f"{document['steps']} steps, fewer than {LEAST_STEPS}")
    found += [f"{name}: did not run" for name in (BASE, TRUNCATED) if name not in document["runs"]]
    steps = document["runs"].get(ALIGNED, [])
    if len(steps) >= 2 * WINDOW:
        first, last = (statistics.mean(step["reward"] for step in part) for part in (steps[:WINDOW], steps[-WINDOW:]))
        if last <= first:
            found.append(
                f"{ALIGNED}: the reward does not rise, from {first:.3g} to {last:.3g} over {WINDOW} steps each"
            )
    return found
