"""A run's receipt, and its capsules where they are at hand, as one self-contained HTML page or one picture.

The page states what the receipt states: each receipt is judged again first, and one that contradicts itself is
not drawn. The figures that need recorded tensors are left out, with a word, where the capsules are gone.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from samebits.evidence import receipt as receipts
from samebits.evidence.capsule import Capsule, CapsuleError, read_capsule
from samebits.judge import compare, rejudge
from samebits.judge.verdict import PATHS, advantages

from . import charts

CLAIMS = {
    "observe": "observe: complete, finite, not degenerate, within the bound",
    "zero": "zero: complete, finite, not degenerate, no logprob differs",
}

SCOPE = (
    "Only sampled tokens are compared: the logprobs of tokens that were not sampled are not recorded.",
    "Updates after the last comparison are not claimed.",
    "Gradients are shown by their norm and by what they changed; they are not compared with a reference here.",
    "Other devices, instruction sets, model runners, models and parallel layouts than those named above have not run.",
    "Checksums show damage and edits. They are no signature: they do not show who made the evidence.",
    "Speed is not measured here.",
)


@dataclass(frozen=True)
class _Step:
    """What one step capsule adds to the receipt. groups: (mean reward, has an advantage)."""

    step: int
    sequences: int
    magnitudes: dict[str, dict[int, int]]
    reward_mean: float
    reward_std: float
    advantage_min: float
    advantage_max: float
    groups: list[tuple[float, bool]]  # of finite reward

    @property
    def learning(self) -> int:
        return sum(learns for _, learns in self.groups)


class _Arm:
    """One run: its receipt, the totals over its comparisons, and its figures."""

    def __init__(self, run: Path) -> None:
        self.receipt = receipts.read(run / "receipt.json")
        self.verdict = rejudge(self.receipt)
        arm = self.receipt["arm"]
        self.name = "unknown arm" if arm is None else f"BI={arm}"
        self.claim = CLAIMS[self.receipt["claim"]]
        compares = self.receipt["compares"]
        self.tokens = sum(c["valid_tokens"] for c in compares)
        self.mismatched = sum(c["mismatched"] for c in compares)
        self.max_abs = max((c["max_abs"] for c in compares), default=0.0)
        self.rate = self.mismatched / self.tokens if self.tokens else 0.0
        execution = self.receipt["execution"]
        self.command = execution and shlex.join(execution["command"])
        self.steps = list(_steps(run, self.receipt))
        self.weights = sorted({c["weights"] for c in compares}, key=lambda w: int(w[5:]))
        self.rates = self.largest = self.histogram = self.rewards = Markup()
        self.no_histogram = "No logprob differs." if self.steps else "The capsules are not at hand."

    def series(self, value: Any) -> list[charts.Series]:
        cells = {(c["weights"], c["path"]): value(c) for c in self.receipt["compares"]}
        return [(path, [cells.get((w, path), 0.0) for w in self.weights]) for path in PATHS]

    def draw(self, top: float, low: int, high: int, bins: range) -> None:
        """Draw the figures on the axes that all arms of the page share."""
        names = [theta(w) for w in self.weights]
        if self.weights:
            self.rates = charts.shares(
                names, self.series(_rate), top, f"{self.name}: {percent_of(self)} of logprobs differ"
            )
            bound = self.receipt["bound"]
            self.largest = charts.dots(
                names,
                self.series(lambda c: c["max_abs"]),
                low,
                high,
                bound and bound["max_abs"],
                f"{self.name}: largest difference {charts.number(self.max_abs)}",
            )
        if self.steps:
            self.rewards = charts.rewards(
                [f"step {s.step}" for s in self.steps],
                [s.groups for s in self.steps],
                f"{self.name}: mean reward {', '.join(f'{s.reward_mean:.2f}' for s in self.steps)}",
            )
        counts = self.counts()
        if any(counts.values()):
            series = [(path, [counts[path][e] for e in bins]) for path in PATHS]
            self.histogram = charts.magnitudes(series, bins.start, f"{self.name}: logprobs by size of difference")

    def counts(self) -> dict[str, Counter[int]]:
        total: dict[str, Counter[int]] = {path: Counter() for path in PATHS}
        for step in self.steps:
            for path, magnitudes in step.magnitudes.items():
                total[path].update(magnitudes)
        return total


def render(runs: list[Path], out: Path) -> None:
    """Write the page of one run, or of several side by side, to `out`. Each folder holds a receipt.json.

    ReceiptError or JudgeError if a receipt is missing, damaged or contradicts itself."""
    arms = _drawn(runs)
    worst = min((a.verdict for a in arms), key=("fail", "inconclusive", "pass").index)
    style = _file("style.css") + _file("page.css")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(_file("page.html.j2")).render(
        arms=arms,
        several=len(arms) > 1,
        verdict=worst,
        statement=statement(arms),
        style=Markup(style),
        identity=_identity(arms),
        uncovered=[*_unshown(arms), *SCOPE],
        number=charts.number,
        percent=charts.percent,
        share=_share,
        theta=theta,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")


def render_svg_summary(runs: list[Path]) -> str:
    """The mismatch charts of some runs, side by side, as one standalone SVG with its own colours, for a README."""
    arms = _drawn(runs)
    top, width = 70, charts.WIDTH * len(arms)
    frame = f'viewBox="0 0 {width} {charts.HEIGHT + top}" width="{width}" height="{charts.HEIGHT + top}"'
    key = (
        '<rect class="a" x="18" y="34" width="11" height="11"/><text x="35" y="44">recompute</text>'
        '<rect class="b" x="118" y="34" width="11" height="11"/><text x="135" y="44">actor</text>'
    )
    panels = []
    for i, arm in enumerate(arms):
        place = f'<svg x="{i * charts.WIDTH}" y="{top}" width="{charts.WIDTH}" height="{charts.HEIGHT}" '
        panels.append(str(arm.rates).replace("<svg ", place, 1))
        name = f"{arm.name}: {percent_of(arm)} of {arm.tokens:,}"
        panels.append(f'<text class="title" x="{i * charts.WIDTH + charts.LEFT}" y="{top - 2}">{escape(name)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {frame} role="img" aria-label="{escape(statement(arms))}">'
        f'<style>{_file("style.css")}</style><rect class="paper" width="100%" height="100%" rx="8"/>'
        f'<text class="title" x="18" y="24">Logprobs that differ, trainer against rollout</text>{key}'
        f"{''.join(panels)}</svg>\n"
    )


def statement(arms: list[_Arm]) -> str:
    """What the comparisons found, in one sentence an arm."""
    if len(arms) == 1:
        arm = arms[0]
        if not arm.tokens:
            return "No logprob was compared."
        if not arm.mismatched:
            return f"Each of {arm.tokens:,} logprobs of the trainer equals the rollout's, bit for bit."
        return (
            f"{percent_of(arm)} of the trainer's logprobs differ from the rollout's at {arm.name}, "
            f"by up to {charts.number(arm.max_abs)} nats."
        )
    found = []
    for arm in arms:
        share = f"{percent_of(arm)} of" if arm.mismatched else "none of"
        size = f", by up to {charts.number(arm.max_abs)} nats" if arm.mismatched else ""
        found.append(f"{arm.name}: {share} {arm.tokens:,} logprobs differ{size}.")
    return " ".join(found)


def percent_of(arm: _Arm) -> str:
    return charts.percent(arm.rate)


def theta(weights: str) -> str:
    return weights.replace("theta", "θ")


def _drawn(runs: list[Path]) -> list[_Arm]:
    arms = [_Arm(run) for run in runs]
    if not arms:
        raise receipts.ReceiptError("no run to report on; pass at least one folder with a receipt.json")
    compares = [c for arm in arms for c in arm.receipt["compares"]]
    top = min(1.12, 1.2 * max((_rate(c) for c in compares), default=0.0) or 0.05)
    sizes = [c["max_abs"] for c in compares if c["max_abs"]]
    sizes += [arm.receipt["bound"]["max_abs"] for arm in arms if arm.receipt["bound"]]
    low, high = (math.floor(math.log10(min(sizes))), math.ceil(math.log10(max(sizes)))) if sizes else (-6, 0)
    exponents = [e for arm in arms for counts in arm.counts().values() for e in counts] or [0]
    bins = range(min(exponents), max(max(exponents), min(exponents) + 7) + 1)
    for arm in arms:
        arm.draw(top, min(low, high - 3), high, bins)
    return arms


def _steps(run: Path, receipt: dict[str, Any]) -> Any:
    for name in sorted(n for n in receipt["capsules"] if n.startswith("capsules/step-")):
        try:
            capsule = read_capsule(run / name)
            if capsule.sha256 == receipt["capsules"][name]:
                yield _step(capsule)
        except (CapsuleError, ValueError):  # what the judge refused to read has its reason in the receipt
            continue


def _step(capsule: Capsule) -> _Step:
    tensors = capsule.tensors
    reward = tensors["reward"].read().astype(np.float64)
    group = tensors["group"].read()
    members = [group == g for g in np.unique(group)]
    moving, least, greatest = advantages(capsule)
    return _Step(
        step=capsule.meta["step"],
        sequences=reward.size,
        magnitudes={p: compare(tensors["rollout"], tensors[p], tensors["valid"]).magnitudes for p in PATHS},
        reward_mean=float(reward.mean()),
        reward_std=float(reward.std()),
        advantage_min=least,
        advantage_max=greatest,
        groups=[(float(reward[g].mean()), bool(moving[g].any())) for g in members if np.isfinite(reward[g]).all()],
    )


def _rate(c: dict[str, Any]) -> float:
    return float(c["mismatched"] / c["valid_tokens"]) if c["valid_tokens"] else 0.0


def _share(part: int, whole: int) -> str:
    return f"{charts.percent(part / whole) if whole else '0%'} of {whole:,}"


def _unshown(arms: list[_Arm]) -> list[str]:
    return [
        f"{arm.name}: {r['where']}: {r['what']}."
        for arm in arms
        for r in arm.receipt["reasons"]
        if r["verdict"] == "inconclusive"
    ]


def _identity(arms: list[_Arm]) -> list[tuple[str, list[list[str]]]]:
    """Rows of (name, one list of lines an arm)."""

    def pairs(values: dict[str, Any], join: str) -> list[str]:
        return [f"{key}{join}{value}" for key, value in values.items()] or ["none"]

    def cells(e: dict[str, Any] | None) -> dict[str, list[str]]:
        if e is None:
            return {}
        commit = e["git_commit"] or "no commit"
        return {
            "Commit": [commit + (", with uncommitted changes" if e["git_dirty"] else "")],
            "Lock": [e["lock"]["name"], e["lock"]["sha256"]],
            "Wheels": [line for name, digest in e["wheels"].items() for line in (name, digest)] or ["none"],
            "Versions": [f"Python {e['python']}", *pairs(e["versions"], " ")],
            "Device": [e["device_name"], f"{e['device']}, {e['threads']} threads"],
            "Instruction sets": [", ".join(e["instruction_set"]) or "none listed"],
            "Kernels of torch": pairs(e.get("kernels", {}), " "),
            "Numerical contract": [e.get("contract") or "none: each engine computes as it is"],
            "Model runner": [e["runner"]],
            "Switches": pairs(e["switches"], "="),
            "Model": pairs(e["model"], ": "),
            "Configuration": [e["config_sha256"]],
        }

    columns = [cells(arm.receipt["execution"]) for arm in arms]
    names = list(dict.fromkeys(name for column in columns for name in column))
    return [(name, [column.get(name, ["unknown"]) for column in columns]) for name in names]


def _file(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")
