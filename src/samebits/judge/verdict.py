"""From the capsules of a run to a receipt, and from a receipt to its verdict again.

`judge_run` reads every capsule, counts, and lists reasons; `_rules` turns counts into reasons and is all that a
verdict rests on besides damage; `rejudge` applies the same rules to a committed receipt, without its capsules.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from samebits.errors import SamebitsError
from samebits.evidence import eventlog, provenance, receipt, strictjson
from samebits.evidence.capsule import SUMS, TENSORS, Capsule, CapsuleError, Tensor, read_capsule

from .compare import PIECE, compare

COMPARES = 3  # weights theta0, theta1, theta2: two updates lie between them
PATHS = ("recompute", "actor")
REQUIRED = tuple(
    [f"step-{k + 1:04d}" for k in range(COMPARES)]
    + [f"{kind}-{k:04d}" for kind in ("sync", "fresh") for k in range(COMPARES)]
)
_CLAIMED = tuple(f"theta{k}" for k in range(COMPARES - 1))  # the weights whose updates the comparisons enclose
MIN_TOKENS = 1000  # of one comparison: fewer say nothing of a policy
_EVENTS = ("trained", "probed")  # what a run that went through to its end has logged
_MISTAKES = ("temperature", "position", "mask")

Bounds = dict[str, dict[str, Any]]
Reason = dict[str, str]  # {"verdict": fail|inconclusive, "where", "what"}


class JudgeError(SamebitsError):
    """Something that cannot be judged, or a receipt that contradicts itself: what, and what to do."""


def judge_run(run: Path, claim: str = "observe", bounds: Bounds | None = None) -> dict[str, Any]:
    """The receipt of the run in folder `run`.

    claim: "observe" (complete, finite, not degenerate, differences within the bound of its model) or "zero" (that,
    and not one mismatch). bounds: see `read_bounds`. JudgeError if `run` is no folder or the claim unknown."""
    if claim not in ("observe", "zero"):
        raise JudgeError(f"claim {claim!r} is unknown; use observe or zero")
    if not run.is_dir():
        raise JudgeError(f"{run} is not a folder; pass the folder that `samebits run rl --out` wrote")
    reasons: list[Reason] = []
    execution = _read_execution(run, reasons)
    _check_events(run, reasons)
    _check_config(run, execution, reasons)
    capsules = _read_capsules(run, execution, reasons)
    facts = {
        "arm": execution and execution["arm"],
        "claim": claim,
        "bound": _bound(execution and execution["model"], bounds),
        "compares": _isolated(capsules, "step", _compares, reasons),
        "updates": [u for u in _isolated(capsules, "step", _update, reasons) if u["from"] in _CLAIMED],
        "sync": _isolated(capsules, "sync", lambda c, r: _sync(c, capsules, r), reasons),
        "execution": execution,
        "model": execution and execution["model"],
        "capsules": {f"capsules/{name}": capsule.sha256 for name, capsule in sorted(capsules.items())},
    }
    reasons += _check_weights(capsules)
    reasons += _rules(facts)
    reasons = [r for i, r in enumerate(reasons) if r not in reasons[:i]]
    reasons.sort(key=lambda r: r["verdict"] != "fail")
    return receipt.build(verdict=_worst(reasons), reasons=reasons, **facts)


def rejudge(
    document: dict[str, Any], claim: str | None = None, bounds: Bounds | None = None, run: Path | None = None
) -> str:
    """Judge a receipt again from its own counts and return its verdict.

    JudgeError names every contradiction: counts that cannot be, a rule's reason that is not listed, a verdict other
    than that of its reasons, a claim other than `claim`, a bound other than that of `bounds`; and with `run`, capsules
    other than the recorded ones. What is None is not asked.
    ReceiptError if the receipt breaks its schema or its checksum."""
    receipt.validate(document)
    wrong = list(_contradictions(document))
    wrong += [
        f"{_text(r)}, but this is not among the reasons" for r in _rules(document) if r not in document["reasons"]
    ]
    if document["verdict"] != _worst(document["reasons"]):
        wrong.append(f"verdict {document['verdict']} with reasons for {_worst(document['reasons'])}")
    if claim is not None and document["claim"] != claim:
        wrong.append(f"the claim is {document['claim']}, not {claim}")
    if bounds is not None and document["bound"] != _bound(document["model"], bounds):
        wrong.append("the bound is not the calibrated one of its model")
    if run is not None:
        for folder, digest in document["capsules"].items():
            sums = run / folder / SUMS
            if not sums.is_file() or hashlib.sha256(sums.read_bytes()).hexdigest() != digest:
                wrong.append(f"{folder} is not the capsule that was judged")
    if wrong:
        raise JudgeError(f"receipt contradicts itself: {'; '.join(wrong)}; judge the run again")
    return str(document["verdict"])


def read_bounds(file: Path) -> Bounds:
    """Calibrated bounds, JSON of {model name: figures of `samebits.probe.rounding`, max_abs and the command}.

    max_abs is the largest |difference| of two logprobs, in nats, that rounding explains for a model: twice what was
    measured of one side. JudgeError for anything else, and for a bound that a planted mistake would not exceed."""
    try:
        table = strictjson.loads(file.read_bytes())
        bounds = {}
        for name, row in table.items():
            bound, rounding = float(row["max_abs"]), float(row["rounding"])
            mistakes = {mistake: float(row[mistake]) for mistake in _MISTAKES}
            if abs(bound - 2 * rounding) > 1e-3 * rounding:
                raise ValueError(f"{name}: max_abs {bound} is not twice the measured rounding {rounding}")
            if not 0 < bound < min(mistakes.values()):
                raise ValueError(f"{name}: max_abs {bound} does not lie below every planted mistake")
            figures = ", ".join(f"{mistake} {size:.3g}" for mistake, size in mistakes.items())
            said = f"{row['command']}: rounding {rounding:.3g} over {row['tokens']} tokens; planted {figures}"
            bounds[name] = {"max_abs": bound, "calibrated": said}
        return bounds
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise JudgeError(f"{file}: no table of calibrated bounds: {error!r}; restore the file") from error


def _bound(model: dict[str, Any] | None, bounds: Bounds | None) -> dict[str, Any] | None:
    return bounds.get(model["name"]) if model and bounds else None


def summary(document: dict[str, Any]) -> str:
    """The receipt in a few lines of plain text."""
    lines = [f"{document['claim']}: {document['verdict'].upper()}"]
    for c in document["compares"]:
        lines.append(
            f"  {c['weights']}  {c['path']:<9}  {c['mismatched']:>8,} of {c['valid_tokens']:,} logprobs differ, "
            f"largest difference {c['max_abs']:.3g}"
        )
    return "\n".join([*lines, *(f"  {_text(r)}" for r in document["reasons"])])


# What a run recorded


def _read_execution(run: Path, reasons: list[Reason]) -> dict[str, Any] | None:
    try:
        execution = provenance.read(run / "execution.json")
    except provenance.ProvenanceError as error:
        reasons.append(_fail("execution.json", str(error)))
        return None
    return execution


def _check_events(run: Path, reasons: list[Reason]) -> None:
    try:
        log = eventlog.read(run / "events.jsonl")
    except OSError:
        reasons.append(_open("events.jsonl", "no event log"))
        return
    if log.damage:
        reasons.append(_fail("events.jsonl", log.damage))
        return
    logged = {entry["event"] for entry in log.entries}
    if missing := [event for event in _EVENTS if event not in logged]:
        reasons.append(_open("events.jsonl", f"does not say {' or '.join(missing)}: the run did not reach its end"))


def _check_config(run: Path, execution: dict[str, Any] | None, reasons: list[Reason]) -> None:
    """The fresh engines take their arguments from config.json: it must be the one that the identity names."""
    try:
        digest = hashlib.sha256((run / "config.json").read_bytes()).hexdigest()
    except OSError:
        reasons.append(_open("config.json", "no resolved configuration"))
        return
    if execution is not None and digest != execution["config_sha256"]:
        reasons.append(_fail("config.json", "is not the configuration that the execution identity names"))


def _read_capsules(run: Path, execution: dict[str, Any] | None, reasons: list[Reason]) -> dict[str, Capsule]:
    folder = run / "capsules"
    capsules: dict[str, Capsule] = {}
    tensors_of: dict[str, str] = {}
    # A hidden folder is one whose writer did not finish: it never was a capsule.
    found = sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")) if folder.is_dir() else []
    for name in found:
        where = f"capsules/{name}"
        match = re.fullmatch(r"(step|sync|fresh)-(\d{4})", name)
        if not match:
            reasons.append(_fail(where, "not the name of a capsule"))
            continue
        try:
            capsule = read_capsule(folder / name)
        except CapsuleError as error:
            reasons.append(_fail("/".join(filter(None, (where, error.file))), error.what))
            continue
        if wrong := _disorder(capsule, match[1], int(match[2])):
            reasons.append(_fail(where, wrong))
            continue
        capsules[name] = capsule
        if execution is not None and capsule.meta["execution"] != execution:
            reasons.append(_fail(where, "its execution identity is not that of the run"))
        if capsule.kind == "step":
            if capsule.meta["bypass"]:
                reasons.append(_open(where, "recomputation was bypassed: the trainer used the rollout's own logprobs"))
            earlier = tensors_of.setdefault(capsule.sums[TENSORS], name)
            if earlier != name:
                reasons.append(_fail(where, f"holds the tensors of {earlier}"))
    return capsules


def _disorder(capsule: Capsule, kind: str, number: int) -> str | None:
    """Why a capsule in the place of `kind` `number` holds something else; such a capsule is not counted at all."""
    meta = capsule.meta
    weights = f"theta{number - 1 if kind == 'step' else number}"
    held = (capsule.kind, meta["step" if capsule.kind == "step" else "sync"], meta["weights"])
    if held != (kind, number, weights):
        return f"holds {held[0]} {held[1]} of {held[2]}, not {kind} {number} of {weights}"
    if kind == "step" and (meta["update"]["from"], meta["update"]["to"]) != (weights, f"theta{number}"):
        return f"its update does not lead from {weights} to theta{number}"
    return None


def _isolated(
    capsules: dict[str, Capsule],
    kind: str,
    extract: Callable[[Capsule, list[Reason]], Iterable[dict[str, Any]]],
    reasons: list[Reason],
) -> list[dict[str, Any]]:
    """What `extract` finds in the capsules of a kind, in order; one that cannot be read is a reason, not a crash."""
    facts: list[dict[str, Any]] = []
    for name in sorted(n for n in capsules if n.startswith(kind)):
        try:
            facts += extract(capsules[name], reasons)
        except CapsuleError as error:
            reasons.append(_fail(f"capsules/{name}/{error.file}", error.what))
    return facts


def _compares(capsule: Capsule, reasons: list[Reason]) -> Iterator[dict[str, Any]]:
    tensors, where = capsule.tensors, f"capsules/{capsule.folder.name}"
    longest = tensors["prompts"].shape[1]
    length = tensors["prompt_length"].read()
    if length.min() < 1 or length.max() > longest:
        reasons.append(_fail(where, f"a prompt length is outside 1 to {longest}"))
    if any((ids[mask] < 0).any() for ids, mask in _pieces(tensors["responses"], tensors["valid"])):
        reasons.append(_fail(where, "a valid position holds no token"))
    if not np.array_equal(np.sort(tensors["order"].read()), np.arange(length.size)):
        reasons.append(_fail(where, "the update did not see each sequence once"))
    for path in PATHS:
        if tensors[path].dtype != tensors["rollout"].dtype:
            reasons.append(_fail(where, f"{path} is {tensors[path].dtype}, rollout {tensors['rollout'].dtype}"))
            continue
        found = compare(tensors["rollout"], tensors[path], tensors["valid"])
        width = tensors["rollout"].shape[1]
        yield {
            "weights": capsule.meta["weights"],
            "path": path,
            "dtype": tensors[path].dtype,
            "valid_tokens": found.valid_tokens,
            "mismatched": found.mismatched,
            "nonfinite": found.nonfinite,
            "max_abs": found.max_abs,
            "constant": found.constant,
            "first_mismatch": None
            if found.first is None
            else {"sequence": found.first // width, "position": found.first % width},
        }


def _update(capsule: Capsule, reasons: list[Reason]) -> Iterator[dict[str, Any]]:
    where = f"capsules/{capsule.folder.name}"
    reward = capsule.tensors["reward"].read().astype(np.float64)
    group, seed = capsule.tensors["group"].read(), capsule.tensors["seed"].read()
    moved, _, _ = advantages(capsule)
    groups, moving = np.unique(group).size, np.unique(group[moved]).size
    finite = bool(np.isfinite(reward).all())
    if not finite:
        reasons.append(_fail(where, "a reward is infinite or NaN"))
    if any(
        not np.isfinite(a[mask]).all() for a, mask in _pieces(capsule.tensors["advantages"], capsule.tensors["valid"])
    ):
        reasons.append(_fail(where, "an advantage is infinite or NaN"))
    if np.unique(np.stack([group, seed]), axis=1).shape[1] != group.size:
        reasons.append(_open(where, "two sequences of one group share a sampling seed: one sample, counted twice"))
    if not moving and capsule.meta["step"] >= COMPARES:  # an earlier step's is a rule on its update
        reasons.append(_open(where, "no group has an advantage: nothing was learnt"))
    yield {
        **{key: capsule.meta["update"][key] for key in _UPDATE_KEYS},
        "reward_mean": float(reward.mean()) if finite else None,
        "reward_std": float(reward.std()) if finite else None,
        "nonzero_advantage_groups": moving,
        "groups": groups,
    }


_UPDATE_KEYS = [
    "from",
    "to",
    "grad_norm",
    "parameters",
    "changed_parameters",
    "masters",
    "changed_masters",
    "update_rms",
    "learning_rate",
]


def advantages(capsule: Capsule) -> tuple[np.ndarray[Any, np.dtype[np.bool_]], float, float]:
    """Of a step capsule: bool [n], the sequences with a nonzero advantage at a valid position; and the least and the
    greatest advantage at any valid position (0 where there is none)."""
    n, width = capsule.tensors["advantages"].shape
    moved = np.zeros(n, np.bool_)
    done, low, high = 0, 0.0, 0.0
    for advantage, mask in _pieces(capsule.tensors["advantages"], capsule.tensors["valid"]):
        moved[(done + np.flatnonzero((advantage != 0) & mask)) // width] = True
        done += mask.size
        low = min(low, float(advantage.min(where=mask, initial=0)))
        high = max(high, float(advantage.max(where=mask, initial=0)))
    return moved, low, high


def _sync(capsule: Capsule, capsules: dict[str, Capsule], reasons: list[Reason]) -> Iterator[dict[str, Any]]:
    name = capsule.folder.name
    fresh = capsules.get(name.replace("sync", "fresh"))
    exported = capsule.meta["exported"]
    fact: dict[str, Any] = {
        "weights": capsule.meta["weights"],
        "tensors": len(exported),
        "unequal": _unequal(exported, capsule.meta["loaded"]),
        "fresh_unequal": None,
        "probe_tokens": None,
        "probe_mismatched": None,
    }
    if "contracts" in capsule.meta:  # capsules from before the operators have none
        fact["contracts"] = dict(capsule.meta["contracts"])
    if fresh is not None:
        if "contracts" in fact and "contract" in fresh.meta:
            fact["contracts"]["fresh"] = fresh.meta["contract"]
        ours, theirs = capsule.tensors, fresh.tensors
        same = all(
            ours[key].shape == theirs[key].shape and np.array_equal(ours[key].read(), theirs[key].read())
            for key in ("probe_tokens", "probe_length", "probe_prompt_length")
        )
        begin, end = ours["probe_prompt_length"].read(), ours["probe_length"].read()
        longest = ours["probe_tokens"].shape[1]
        if not same:
            reasons.append(_fail(f"capsules/{fresh.folder.name}", f"its probe is not that of {name}"))
        elif begin.min() < 1 or end.max() > longest or (begin > end).any():
            reasons.append(_fail(f"capsules/{name}", f"a probe's lengths are not 1 <= prompt <= whole <= {longest}"))
        else:
            position = np.arange(longest)
            response = Tensor.of((position >= begin[:, None]) & (position < end[:, None]))
            found = compare(ours["probe_log_probs"], theirs["probe_log_probs"], response)
            fact |= {
                "fresh_unequal": _unequal(exported, fresh.meta["loaded"]),
                "probe_tokens": found.valid_tokens,
                "probe_mismatched": found.mismatched,
            }
    yield fact


def _unequal(exported: dict[str, Any], loaded: dict[str, Any]) -> int:
    return sum(exported.get(name) != loaded.get(name) for name in exported.keys() | loaded.keys())


def _check_weights(capsules: dict[str, Capsule]) -> Iterator[Reason]:
    """Each sync must export what the step before it made: other weights if and only if masters changed."""
    for k in range(1, COMPARES):
        before, step, after = (capsules.get(n) for n in (f"sync-{k - 1:04d}", f"step-{k:04d}", f"sync-{k:04d}"))
        if not (before and step and after):
            continue
        differs = before.meta["exported"] != after.meta["exported"]
        if differs != (step.meta["update"]["changed_masters"] > 0):
            kind = "differ" if differs else "are those of the sync before"
            changed = step.meta["update"]["changed_masters"]
            yield _fail(f"capsules/sync-{k:04d}", f"its weights {kind}, but the update changed {changed} masters")


def _pieces(tensor: Tensor, valid: Tensor) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    for start in range(0, tensor.size, PIECE):
        stop = min(start + PIECE, tensor.size)
        yield tensor.flat(start, stop), valid.flat(start, stop)


# What the counts mean


def _rules(facts: dict[str, Any]) -> Iterator[Reason]:
    """Every reason against a pass that the counts of a receipt show."""
    if facts["execution"] is not None:
        arm, switch = facts["execution"]["arm"], facts["execution"]["switches"]["VLLM_BATCH_INVARIANT"]
        if str(arm) != switch:
            yield _fail("execution.json", f"arm {arm} ran with VLLM_BATCH_INVARIANT={switch}")
        if arm == 1:
            yield from _contract_rules(facts["execution"].get("contract"), facts["sync"])
    whole = {name for name in REQUIRED if f"capsules/{name}" in facts["capsules"]}
    for name in REQUIRED:
        if name not in whole:
            yield _open(f"capsules/{name}", "missing or refused")
    if facts["claim"] == "observe" and facts["bound"] is None:
        yield _open("bound", "no calibrated bound for this model")
    compared = {(c["weights"], c["path"]) for c in facts["compares"]}
    updated = {u["from"] for u in facts["updates"]}
    synced = {s["weights"] for s in facts["sync"]}
    for k in range(COMPARES):
        step = f"step-{k + 1:04d}" in whole
        for path in PATHS:
            if step and (f"theta{k}", path) not in compared:
                yield _open(f"theta{k} {path}", "not compared")
        if step and k < COMPARES - 1 and f"theta{k}" not in updated:
            yield _open(f"update theta{k}", "not recorded")
        if f"sync-{k:04d}" in whole and f"theta{k}" not in synced:
            yield _open(f"sync theta{k}", "not recorded")
    for c in facts["compares"]:
        yield from _compare_rules(c, facts["claim"], facts["bound"])
    for u in facts["updates"]:
        yield from _update_rules(u)
    for s in facts["sync"]:
        yield from _sync_rules(s, f"capsules/fresh-{int(s['weights'].removeprefix('theta')):04d}" in facts["capsules"])


def _contract_rules(named: str | None, syncs: list[dict[str, Any]]) -> Iterator[Reason]:
    """At arm 1 the trainer, its rollout and the fresh engine compute by one contract, the one that the run names."""
    if not named:
        yield _fail("execution.json", "arm 1 without the name of its numerical contract")
        return
    for s in syncs:
        sides = {"trainer": "trainer", "rollout": "rollout"}
        if s["probe_mismatched"] is not None:
            sides["fresh"] = "fresh engine"
        for side, name in sides.items():
            said = s.get("contracts", {}).get(side)
            if said != named:
                yield _fail(
                    f"sync {s['weights']}", f"the {name} computes by {said or 'no contract'}, the run by {named}"
                )


def _compare_rules(c: dict[str, Any], claim: str, bound: dict[str, Any] | None) -> Iterator[Reason]:
    where = f"{c['weights']} {c['path']}"
    if c["valid_tokens"] < MIN_TOKENS:
        yield _open(where, f"{c['valid_tokens']} valid tokens, fewer than {MIN_TOKENS}")
    if c["nonfinite"]:
        yield _fail(where, f"{c['nonfinite']} logprobs are infinite or NaN")
    if c["constant"]:
        yield _open(where, "every logprob is one and the same value: the path was not executed")
    if bound is not None and c["max_abs"] > bound["max_abs"]:
        yield _fail(
            where, f"largest difference {c['max_abs']:.6g} exceeds {bound['max_abs']:.6g}, which rounding explains"
        )
    if claim == "zero" and c["mismatched"]:
        yield _fail(where, f"{c['mismatched']} of {c['valid_tokens']} logprobs differ")


def _update_rules(u: dict[str, Any]) -> Iterator[Reason]:
    where = f"update {u['from']}"
    if u["changed_parameters"] > u["parameters"] or u["changed_masters"] > u["masters"]:
        yield _fail(where, "more changed than there are")
    if u["grad_norm"] == 0:
        yield _open(where, "the gradient is zero")
    if u["changed_parameters"] == 0 or u["update_rms"] == 0:
        yield _open(where, "no parameter changed")
    elif u["changed_masters"] == 0:
        yield _open(where, "no BF16 master changed: the next weights are the same")
    if 2 * u["nonzero_advantage_groups"] < u["groups"] or not u["nonzero_advantage_groups"]:
        yield _open(
            where, f"{u['nonzero_advantage_groups']} of {u['groups']} groups have an advantage, fewer than half"
        )


def _sync_rules(s: dict[str, Any], fresh: bool) -> Iterator[Reason]:
    where = f"sync {s['weights']}"
    if s["tensors"] == 0:
        yield _open(where, "no tensor compared")
    if s["unequal"]:
        yield _fail(where, f"{s['unequal']} of {s['tensors']} tensors in the engine are not the exported ones")
    if s["probe_mismatched"] is None or s["probe_tokens"] is None or s["fresh_unequal"] is None:
        if fresh:
            yield _open(where, "not compared with a fresh engine")
        return
    if s["fresh_unequal"]:
        yield _fail(
            where, f"{s['fresh_unequal']} of {s['tensors']} tensors in the fresh engine are not the exported ones"
        )
    if s["probe_tokens"] == 0:
        yield _open(where, "no probe token compared")
    if s["probe_mismatched"]:
        yield _fail(
            where, f"{s['probe_mismatched']} of {s['probe_tokens']} probe logprobs differ from a fresh engine's"
        )


def _contradictions(document: dict[str, Any]) -> Iterator[str]:
    """Counts that no run can have produced together."""
    execution = document["execution"]
    if execution is None and document["verdict"] == "pass":
        yield "a pass without an execution identity"
    if document["arm"] != (execution and execution["arm"]) or document["model"] != (execution and execution["model"]):
        yield "arm or model is not that of its execution identity"
    tokens: dict[str, int] = {}
    for c in document["compares"]:
        where = f"{c['weights']} {c['path']}"
        if not c["nonfinite"] <= c["mismatched"] <= c["valid_tokens"]:
            yield f"{where}: nonfinite <= mismatched <= valid_tokens does not hold"
        if (c["mismatched"] == 0) != (c["first_mismatch"] is None):
            yield f"{where}: mismatched and first_mismatch disagree"
        if c["max_abs"] > 0 and c["mismatched"] == c["nonfinite"]:
            yield f"{where}: max_abs without a finite mismatch"
        if tokens.setdefault(c["weights"], c["valid_tokens"]) != c["valid_tokens"]:
            yield f"{where}: the paths of one step have one number of valid tokens"
        if f"capsules/step-{int(c['weights'].removeprefix('theta')) + 1:04d}" not in document["capsules"]:
            yield f"{where}: compared without its capsule"
    for u in document["updates"]:
        if int(u["to"].removeprefix("theta")) != int(u["from"].removeprefix("theta")) + 1:
            yield f"update {u['from']}: leads to {u['to']}"
        if u["nonzero_advantage_groups"] > u["groups"]:
            yield f"update {u['from']}: more groups with an advantage than groups"
    for s in document["sync"]:
        probed = [s[key] is not None for key in ("fresh_unequal", "probe_tokens", "probe_mismatched")]
        if any(probed) and not (all(probed) and s["probe_mismatched"] <= s["probe_tokens"]):
            yield f"sync {s['weights']}: probe_mismatched <= probe_tokens does not hold"
    for key, names in (("compares", ("weights", "path")), ("updates", ("from",)), ("sync", ("weights",))):
        entries = [tuple(item[name] for name in names) for item in document[key]]
        if len(set(entries)) != len(entries):
            yield f"{key}: one entry twice"


def _worst(reasons: list[Reason]) -> str:
    return min((r["verdict"] for r in reasons), key=("fail", "inconclusive").index, default="pass")


def _fail(where: str, what: str) -> Reason:
    return {"verdict": "fail", "where": where, "what": what}


def _open(where: str, what: str) -> Reason:
    return {"verdict": "inconclusive", "where": where, "what": what}


def _text(reason: Reason) -> str:
    return f"{reason['verdict']}: {reason['where']}: {reason['what']}"
