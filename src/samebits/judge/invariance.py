"""From the recordings of an engine to the C3 matrix, and from a matrix to its verdict again.

`judge_recordings` compares, bit for bit, what `samebits.judge.matrix` says must be equal, and counts; `_rules` turns
counts into reasons, and is all that a verdict rests on; `rejudge_matrix` applies the same rules to a committed matrix.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samebits.evidence import provenance, schema, strictjson
from samebits.evidence.invariance import KIND

from .compare import values
from .matrix import Cell, Plan, Request, Requests, cells, says
from .verdict import JudgeError, Reason, _fail, _open, _text, _worst

SUFFIX = ".said.json"
_INFINITE = np.uint32(0x7F80_0000)
_NO_COUNTS: dict[str, Any] = {
    "compared": 0,
    "mismatched": 0,
    "nonfinite": 0,
    "unreached": 0,
    "missing": 0,
    "distinct": 0,
    "max_abs": 0.0,
    "apart": None,
    "first": None,
}

Said = dict[str, Any]


def judge_recordings(out: Path, quick: bool, arms: Sequence[int], dtypes: Sequence[str]) -> dict[str, Any]:
    """The matrix of OUT/recordings, as a sealed document (schemas/invariance-1.json).

    quick, arms, dtypes: what was asked for; the executions' commands must say the same. Whatever of it is missing,
    damaged or not what it claims to be is a reason against it. JudgeError if there is nothing."""
    folder = out / "recordings"
    columns = {f"arm{arm}-{dtype}": (arm, dtype) for arm in arms for dtype in dtypes}
    runs = {path.name for path in folder.glob("arm[01]-*") if path.is_dir()}
    if not runs:
        raise JudgeError(f"{out} holds no recordings; pass the folder that `samebits check bits --out` wrote")
    reasons = [_fail(run, "was not asked for") for run in sorted(runs - columns.keys())]
    found: list[dict[str, Any]] = []
    digests: dict[str, str] = {}
    contracts: dict[str, Any] = {}
    executions = {str(arm): _execution(folder / f"arm{arm}.execution.json", arm, reasons) for arm in arms}
    plan, wanted = says(quick), cells(quick)
    for run, (arm, dtype) in columns.items():
        engines = _read(folder / run, arm, dtype, plan, digests, reasons)
        for name, said in engines.items():
            if contracts.setdefault(str(arm), said["facts"]["contract"]) != said["facts"]["contract"]:
                reasons.append(_fail(f"{run}/{name}", "computed under another contract than its siblings"))
            if arm == 1 and (foreign := said["facts"]["foreign"]):
                reasons.append(_fail(f"{run}/{name}", f"the compiler was left arithmetic: {', '.join(foreign[:5])}"))
        for cell in wanted:
            counts = _judge(cell, engines, f"{run}: {cell.name}", reasons)
            found.append({"arm": arm, "dtype": dtype, "cell": cell.name, **counts})
    facts = {
        "quick": quick,
        "asked": {"arms": list(arms), "dtypes": list(dtypes)},
        "cells": found,
        "contracts": contracts,
        "executions": executions,
        "recordings": digests,
    }
    reasons += [reason for reason in _rules(facts) if reason not in reasons]
    return KIND.build(verdict=_worst(reasons), reasons=reasons, **facts)


def rejudge_matrix(document: dict[str, Any]) -> str:
    """Judge a matrix again from its own counts and return its verdict.

    JudgeError names every contradiction; InvarianceError if the document breaks its schema or its checksum."""
    KIND.validate(document, "matrix")
    wrong = list(_contradictions(document))
    wrong += [
        f"{_text(r)}, but this is not among the reasons" for r in _rules(document) if r not in document["reasons"]
    ]
    if document["verdict"] != _worst(document["reasons"]):
        wrong.append(f"verdict {document['verdict']} with reasons for {_worst(document['reasons'])}")
    if wrong:
        raise JudgeError(f"the matrix contradicts itself: {'; '.join(wrong)}; judge its recordings again")
    return str(document["verdict"])


def matrix_rows(document: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table of a matrix: its column heads (cell, arms and dtypes), and its rows of "mismatched of compared"."""
    columns = list(dict.fromkeys((c["arm"], c["dtype"]) for c in document["cells"]))
    table: dict[str, dict[tuple[int, str], str]] = {}
    for c in document["cells"]:
        text = f"{c['mismatched']:,} of {c['compared']:,}"
        table.setdefault(c["cell"], {})[c["arm"], c["dtype"]] = text
    head = ["cell", *(f"BI={arm} {dtype}" for arm, dtype in columns)]
    return head, [[cell, *(row.get(column, "") for column in columns)] for cell, row in table.items()]


def matrix_summary(document: dict[str, Any]) -> str:
    """The verdict and its reasons, a mismatch of arm 1 with its first differing token, in lines of plain text."""
    scope = "quick matrix" if document["quick"] else "matrix"
    lines = [f"{scope}: {document['verdict'].upper()}", *(f"  {_text(r)}" for r in document["reasons"])]
    lines += [f"  BI={arm}: contract {contract}" for arm, contract in document["contracts"].items() if contract]
    return "\n".join(lines)


# What the recordings hold


def _execution(path: Path, arm: int, reasons: list[Reason]) -> dict[str, Any] | None:
    try:
        identity = provenance.read(path)
    except provenance.ProvenanceError as error:
        reasons.append(_fail(path.name, str(error)))
        return None
    if identity["arm"] != arm:
        reasons.append(_fail(path.name, f"is the identity of arm {identity['arm']}"))
    return identity


def _read(
    folder: Path, arm: int, dtype: str, plan: Plan, digests: dict[str, str], reasons: list[Reason]
) -> dict[str, Said]:
    """The recordings of one arm and dtype that can be believed, by the engine's name."""
    found = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        where = f"{folder.name}/{path.name.removesuffix(SUFFIX)}"
        data = path.read_bytes()
        try:
            said = strictjson.loads(data)
        except ValueError as error:
            reasons.append(_fail(where, f"not JSON: {error}"))
            continue
        wrong = schema.problems(said, "said-1")
        if not wrong and said["engine"] != path.name.removesuffix(SUFFIX):
            wrong = [f"is a recording of engine {said['engine']}"]
        if not wrong and said["engine"] not in plan:
            wrong = ["is no engine of the matrix"]
        if not wrong and (said["facts"]["arm"], said["facts"]["dtype"]) != (arm, dtype):
            wrong = [f"ran arm {said['facts']['arm']} in {said['facts']['dtype']}"]
        for say, one in [] if wrong else said["says"].items():
            wrong += [f"{say}{problem}" for problem in _unlike(one["requests"], plan[said["engine"]].get(say))]
        if wrong:
            reasons.append(_fail(where, wrong[0]))
            continue
        digests[where] = hashlib.sha256(data).hexdigest()
        found[said["engine"]] = said
    return found


def _unlike(recorded: dict[str, Said], planned: Requests | None) -> list[str]:
    """In what the requests of one say are not the planned ones."""
    if planned is None:
        return [": is not asked of this engine"]
    if list(recorded) != [request.id for request in planned]:
        lost = [request.id for request in planned if request.id not in recorded]
        missing = f": {len(lost)} of {len(planned)} requests are missing: {', '.join(lost[:3])}"
        return [missing if lost else ": other requests, or in another order"]
    wrong = []
    for request in planned:
        one = recorded[request.id]
        # Not in the schema: a validator takes a second for what this does in a millisecond.
        if not all(type(n) is int and 0 <= n < 1 << 32 for n in (*one["tokens"], *one["bits"])):
            wrong.append(f"/{request.id}: tokens or bits are not integers of 32 bits")
        shape = (one["prompt"], one["start"], len(one["tokens"]), len(one["bits"]))
        if shape != (request.prompt, request.start, request.tokens, request.tokens - request.start):
            wrong.append(
                f"/{request.id}: prompt of {shape[0]}, begins at {shape[1]}, {shape[2]} tokens, {shape[3]} logprobs; "
                f"asked for a prompt of {request.prompt}, from {request.start}, {request.tokens} tokens"
            )
    return wrong


def _judge(cell: Cell, engines: dict[str, Said], where: str, reasons: list[Reason]) -> dict[str, Any]:
    """The counts of one cell."""
    counts = {**_NO_COUNTS, "missing": len(cell.pairs), "proof": {"left": {}, "right": {}}}
    try:
        (left, left_say), (right, right_say) = (
            (engines[engine], engines[engine]["says"][say]) for engine, say in (cell.left, cell.right)
        )
    except KeyError as missing:
        reasons.append(_open(where, f"there is no recording of {missing}"))
        return counts
    seen: set[int] = set()
    for one, other in cell.pairs:
        a, b = left_say["requests"][one.id], right_say["requests"][other.id]
        shared = min(one.prompt, other.prompt)
        if a["tokens"][:shared] != b["tokens"][:shared]:
            reasons.append(_fail(where, f"{one.id} and {other.id} were not asked the same"))
            continue
        counts["missing"] -= 1
        _count(counts, seen, (one, other), (a, b), *cell.span(one, other))
    counts["distinct"] = len(seen)
    facts = {
        "left": {**left["facts"], **left_say["facts"]},
        "right": {**right["facts"], **right_say["facts"]},
    }
    for proof in cell.proofs:
        counts["proof"][proof.side][proof.fact] = facts[proof.side][proof.fact]
    if cell.apart:
        counts["apart"] = left["facts"][cell.apart] != right["facts"][cell.apart]
    return counts


def _count(
    counts: dict[str, Any],
    seen: set[int],
    asked: tuple[Request, Request],
    pair: tuple[Said, Said],
    begin: int,
    end: int,
) -> None:
    """Compare positions [begin, end) of two requests, up to and with the first whose tokens differ."""
    tokens = [np.array(one["tokens"][begin:end]) for one in pair]
    parted = np.flatnonzero(tokens[0] != tokens[1])
    stop = int(parted[0]) + 1 if parted.size else end - begin
    left, right = (_bits(one, begin, begin + stop) for one in pair)
    infinite = ((left & _INFINITE) == _INFINITE) | ((right & _INFINITE) == _INFINITE)
    differ = (left != right) | infinite
    if parted.size:
        differ[stop - 1] = True
    counts["compared"] += stop
    counts["unreached"] += end - begin - stop
    counts["mismatched"] += int(np.count_nonzero(differ))
    counts["nonfinite"] += int(np.count_nonzero(infinite))
    seen.update(left.tolist())
    finite = ~infinite
    delta = np.abs(values(left[finite], "float32") - values(right[finite], "float32"))
    counts["max_abs"] = max(counts["max_abs"], float(delta.max(initial=0.0)))
    if counts["first"] is None and differ.any():
        at = int(np.argmax(differ))
        position = begin + at
        counts["first"] = {
            "request": asked[0].id,
            "against": asked[1].id,
            "position": position,
            "of": "answer" if position >= asked[0].prompt else "prompt",
            "tokens": [int(one[at]) for one in tokens],
            "bits": [f"{int(left[at]):08x}", f"{int(right[at]):08x}"],
        }


def _bits(said: Said, begin: int, end: int) -> NDArray[np.uint32]:
    return np.array(said["bits"][begin - said["start"] : end - said["start"]], np.uint32)


# What the counts prove


def _rules(facts: dict[str, Any]) -> list[Reason]:
    """Every reason that follows from the counts alone. BI=0 may differ; nothing else may be amiss in either arm."""
    reasons = []
    wanted = {cell.name: cell for cell in cells(facts["quick"])}
    arms, dtypes = facts["asked"]["arms"], facts["asked"]["dtypes"]
    have: dict[tuple[int, str], set[str]] = {(arm, dtype): set() for arm in arms for dtype in dtypes}
    for c in facts["cells"]:
        where = f"arm{c['arm']}-{c['dtype']}: {c['cell']}"
        if (c["arm"], c["dtype"]) not in have:
            reasons.append(_fail(where, "was not asked for"))
            continue
        have[c["arm"], c["dtype"]].add(c["cell"])
        cell = wanted.get(c["cell"])
        if cell is None:
            reasons.append(_fail(where, "is no cell of the matrix"))
            continue
        reasons += _rules_of_cell(c, cell, where)
    for (arm, dtype), names in have.items():
        for name in wanted.keys() - names:
            reasons.append(_open(f"arm{arm}-{dtype}: {name}", "the cell is missing"))
    recordings = {f"arm{arm}-{dtype}/{engine}" for arm, dtype in have for engine in says(facts["quick"])}
    for name in recordings - facts["recordings"].keys():
        reasons.append(_open(name, "there is no recording that can be believed"))
    for name in facts["recordings"].keys() - recordings:
        reasons.append(_fail(name, "is a recording that was not asked for"))
    for arm in arms:
        identity = facts["executions"].get(str(arm))
        if not identity:
            reasons.append(_fail(f"arm{arm}", "has no execution identity"))
            continue
        if identity.get("contract") != facts["contracts"].get(str(arm)):
            reasons.append(_fail(f"arm{arm}", "its execution identity names another contract than its engines"))
        words = identity["command"]
        said = (_options(words, "--arm"), _options(words, "--dtype"), "--quick" in words)
        if said != ([str(arm) for arm in arms], dtypes, facts["quick"]):
            reasons.append(_fail(f"arm{arm}", f"its command asks for another matrix: {' '.join(words)}"))
    for arm in sorted(facts["executions"].keys() - set(map(str, arms))):
        reasons.append(_fail(f"arm{arm}", "has an execution identity and was not asked for"))
    if 1 in arms and not facts["contracts"].get("1"):
        reasons.append(_fail("arm1", "its engines computed by no contract"))
    return sorted(reasons, key=lambda r: (r["verdict"] != "fail", r["where"]))


def _options(words: list[str], name: str) -> list[str]:
    """The values that a command gives an option."""
    return [value for option, value in itertools.pairwise(words) if option == name]


def _rules_of_cell(c: dict[str, Any], cell: Cell, where: str) -> list[Reason]:
    """What is amiss in the counts of one cell: that all was compared, and that what the cell is about took place."""
    if not c["compared"]:
        return [_open(where, "nothing was compared")]
    reasons = []
    if c["missing"]:
        reasons.append(_open(where, f"{c['missing']} of {len(cell.pairs)} pairs of requests are missing"))
    if c["compared"] + c["unreached"] != cell.positions or c["compared"] < len(cell.pairs):
        counted = f"{c['compared']} logprobs were compared and {c['unreached']} not reached"
        reasons.append(_open(where, f"{counted}, of {cell.positions} in {len(cell.pairs)} pairs of requests"))
    if c["distinct"] < 2:
        reasons.append(_open(where, "every logprob is the same: they say nothing"))
    for proof in cell.proofs:
        wrong = proof.refutes(c["proof"][proof.side].get(proof.fact))
        if wrong:
            of = "/".join(cell.left if proof.side == "left" else cell.right)
            reasons.append(_open(where, f"{of}: {wrong}: what the cell is about did not take place"))
    if cell.apart and c["apart"] is not True:
        reasons.append(_open(where, f"the two engines do not differ in {cell.apart}"))
    if c["nonfinite"]:
        reasons.append(_fail(where, f"{c['nonfinite']} logprobs are infinite or NaN"))
    if c["arm"] == 1 and c["mismatched"]:
        reasons.append(_fail(where, _accusation(c)))
    return reasons


def _accusation(c: dict[str, Any]) -> str:
    """A mismatch in words: how many, and the first differing token."""
    first = c["first"] or {"request": "?", "position": "?", "of": "?", "tokens": ["?"] * 2, "bits": ["?"] * 2}
    return (
        f"{c['mismatched']} of {c['compared']} logprobs differ, by at most {c['max_abs']:.3g}; the first in "
        f"{first['request']}, {first['of']} token {first['tokens'][0]} against {first['tokens'][1]} at position "
        f"{first['position']}, bits {first['bits'][0]} against {first['bits'][1]}"
    )


def _contradictions(document: dict[str, Any]) -> list[str]:
    """Counts that cannot be."""
    wrong = []
    keys = [(c["arm"], c["dtype"], c["cell"]) for c in document["cells"]]
    if len(set(keys)) != len(keys):
        wrong.append("a cell is listed twice")
    for c in document["cells"]:
        where = f"arm{c['arm']}-{c['dtype']}: {c['cell']}"
        if not c["nonfinite"] <= c["mismatched"] <= c["compared"]:
            wrong.append(f"{where}: {c['nonfinite']} nonfinite, {c['mismatched']} mismatched, {c['compared']} compared")
        if c["distinct"] > c["compared"]:
            wrong.append(f"{where}: {c['distinct']} distinct logprobs of {c['compared']}")
        if (c["first"] is None) != (c["mismatched"] == 0):
            wrong.append(f"{where}: {c['mismatched']} mismatched, and the first is {c['first']}")
        if c["max_abs"] and not c["mismatched"]:
            wrong.append(f"{where}: a largest difference {c['max_abs']} without a mismatch")
        if c["unreached"] and not c["mismatched"]:
            wrong.append(f"{where}: {c['unreached']} tokens behind a difference that is not counted")
    for arm, identity in document["executions"].items():
        if identity is not None and identity["arm"] != int(arm):
            wrong.append(f"arm {arm} has the execution identity of arm {identity['arm']}")
    return wrong
