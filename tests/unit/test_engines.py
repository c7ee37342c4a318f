"""What engines on a card must reach: every case, arm and bound, and arms that are what their names say."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from samebits.judge import engines

Change = Callable[[dict[str, Any]], None]
OURS = {"wheel": "vllm-1.whl", "sha256": "1" * 64, "git_commit": "2" * 40}


def document(cases: list[engines.Case]) -> dict[str, Any]:
    """A measurement of all arms in which every bound is kept."""
    ratio = {engines.RELEASE: 1.0, "unpatched1": 0.5, "bi0": 1.0, "first": 1.0, "bi1": 1.1}
    arms = {
        name: {
            "bi": int(name.endswith("1") or name == "first"),
            "tree": OURS,
            "vllm": "0.26.0",
            "admitted": {"4096x4096-bf16": {}},
            "shared": {"tokens": 0, "logprobs": 0, "of": 9},
        }
        for name in ratio
    }
    for name in (engines.RELEASE, "unpatched1"):
        arms[name]["tree"] = {"wheel": "release"}
    values = {name: [100.0 * r, 120.0 * r, 110.0 * r] for name, r in ratio.items()}
    arms[engines.RELEASE]["shared"] = {"tokens": 0, "logprobs": 3, "of": 9}
    return {
        "command": "samebits bench engine",
        "card": {"name": "a card", "driver": "580"},
        "model": {"name": engines.MODEL},
        "eager": False,
        "rounds": 3,
        "arms": arms,
        "said": [
            {"pair": list(pair), "tokens": 0, "logprobs": 0, "of": 9, "alone": {"tokens": 0, "logprobs": 0, "of": 9}}
            for pair in engines.SAY_THE_SAME
        ],
        "rows": [
            {"case": dict(zip(("prompt", "answer", "requests"), c, strict=True)), "values": values} for c in cases
        ],
    }


def whole() -> list[dict[str, Any]]:
    """Two measurements that together hold all."""
    cases = list(engines.MUST)
    return copy.deepcopy([document(cases[:4]), document(cases[4:])])


def test_measurements_that_hold_all_lack_nothing() -> None:
    assert engines.missed(whole()) == []


def test_a_measurement_without_the_release_shows_no_speed() -> None:
    """It is about what arms say: its rates stand for nothing, and are not taken for a figure that is asked for."""
    found = whole()
    for one in found:
        del one["arms"][engines.RELEASE]
        for row in one["rows"]:
            row["values"].pop(engines.RELEASE, None)  # one table of values for all rows
    assert "1 x 1024 tokens, 128 more, bi1: is not measured" in engines.missed(found)
    assert engines.missed([*whole(), found[0]]) == []


def set_arm(arm: str, **changes: Any) -> Change:
    return lambda d: d["arms"][arm].update(changes)


def without(arm: str) -> Change:
    def change(document: dict[str, Any]) -> None:
        del document["arms"][arm]
        document["rows"][0]["values"].pop(arm)  # one table of values for all rows

    return change


def set_ratio(arm: str, ratio: float) -> Change:
    return lambda d: d["rows"][0]["values"].update({arm: [v * ratio for v in d["rows"][0]["values"][engines.RELEASE]]})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d["rows"].pop(0), "1 x 1024 tokens, 128 more, bi1: is not measured"),
        (lambda d: d["rows"][0]["values"].pop("first"), "is not one number a round and arm"),
        (without("first"), "1 x 1024 tokens, 128 more, first: is not measured"),
        (lambda d: d["rows"][0]["values"].pop(engines.RELEASE), "is not one number a round and arm"),
        (lambda d: d["rows"][0]["values"]["bi1"].pop(), "is not one number a round and arm"),
        (lambda d: d.update(rounds=2), "2 rounds, fewer than 3"),
        (lambda d: d.update(eager=True), "is none of Qwen3-8B, compiled"),
        (lambda d: d["model"].update(name="Qwen3-0.6B"), "is none of Qwen3-8B, compiled"),
        (
            set_arm("bi1", shared={"tokens": 1, "logprobs": 2, "of": 9}),
            "3 tokens and logprobs differ together from alone",
        ),
        (
            set_arm(engines.RELEASE, shared={"tokens": 0, "logprobs": 0, "of": 9}),
            "unpatched0: says together what it says alone, so that no requests may have shared a step",
        ),
        (lambda d: d["card"].update(driver="581"), "are of several cards or drivers"),
        (
            lambda d: d.update(command="TORCHINDUCTOR_DETERMINISTIC=1 samebits bench engine"),
            "a measurement of speed with TORCHINDUCTOR_DETERMINISTIC=1: make it without",
        ),
        (
            lambda d: d.update(command="TORCHINDUCTOR_DETERMINISTIC=1 samebits bench engine"),
            "unpatched1 and first: are compared only with TORCHINDUCTOR_DETERMINISTIC=1",
        ),
        (lambda d: d["arms"]["bi1"].pop("shared"), "says together is not compared with what it says alone"),
        (lambda d: d["rows"][0]["values"].pop("unpatched1"), "is not one number a round and arm"),
        (set_ratio("bi1", 1.019), "bi1: 1.019 of unpatched0, must be ≥ 1.02"),
        (set_ratio("first", 0.969), "first: 0.969 of unpatched0, must be ≥ 0.97"),
        (set_ratio("bi0", 0.989), "bi0: 0.989 of unpatched0, must be ≥ 0.99"),
        (set_ratio("bi0", 1.011), "bi0: 1.011 of unpatched0, must be ≤ 1.01"),
        (lambda d: d["said"][0].pop("alone"), "unpatched0 and bi0: what they say alone is not compared"),
        (lambda d: d["said"][0]["alone"].update(logprobs=1), "unpatched0 and bi0: 1 tokens and logprobs differ alone"),
        (lambda d: d["said"][1].update(tokens=2), "unpatched1 and first: 2 tokens and logprobs differ together"),
        (lambda d: d["said"].pop(1), "unpatched1 and first: what they say together is not compared"),
        (set_arm("bi1", tree={**OURS, "sha256": "3" * 64}), "bi1 is of 2 wheels"),
        (set_arm("bi1", bi=0), "bi1 is BI=0 of vllm-1.whl"),
        (set_arm("bi1", tree={"wheel": "release"}), "bi1 is BI=1 of release"),
        (set_arm("bi1", admitted={}), "bi1 admitted nothing"),
        (set_arm(engines.RELEASE, tree=OURS), "unpatched0 is BI=0 of vllm-1.whl"),
        (
            set_arm("first", tree={**OURS, "git_commit": "2" * 40 + "-dirty"}),
            "first is of sources that were not committed",
        ),
    ],
)
def test_a_planted_lie_is_named(change: Change, text: str) -> None:
    documents = whole()
    change(documents[0])
    documents[1]["said"] = []
    for arm in ("bi1", engines.RELEASE):
        del documents[1]["arms"][arm]["shared"]
    assert any(text in lacking for lacking in engines.missed(documents)), engines.missed(documents)
