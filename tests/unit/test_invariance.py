"""The judge of the invariance matrix: an engine that is invariant passes every cell, and each planted lie is caught.

The recordings are of an imagined engine, whose logprob is a function of the tokens before it and nothing else; they are
made from the probe's own engines and requests, so that the probe and the judge are held to one matrix.
"""

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs

from samebits.evidence import provenance
from samebits.evidence.invariance import KIND, InvarianceError
from samebits.judge import JudgeError, judge_recordings, matrix_rows, matrix_summary, rejudge_matrix
from samebits.judge.localise import first_difference
from samebits.judge.matrix import cells
from samebits.probe import invariance

NAN = 0x7FC0_0000
Change = Callable[[dict[str, Any]], None]


def logprob_bits(tokens: list[int]) -> int:
    digest = hashlib.sha256(bytes(tokens)).digest()
    return struct.unpack("<I", struct.pack("<f", -0.5 - digest[0] - digest[1] / 256))[0]


def imagine(request: dict[str, Any]) -> dict[str, Any]:
    draw = hashlib.sha256(request["id"].encode()).digest()
    answer = [request.get("allowed", [draw[i] % 64])[0] for i in range(request["answer"])]
    tokens, start = [*request["prompt"], *answer], len(request["prompt"])
    start = 1 if request.get("prompt_logprobs") else start
    bits = [logprob_bits(tokens[: i + 1]) for i in range(start, len(tokens))]
    return {"tokens": tokens, "prompt": len(request["prompt"]), "start": start, "bits": bits}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Recordings of both arms in one dtype that pass."""
    counts = dict.fromkeys(
        ("steps", "together", "largest_step", "preempted", "mixed_steps", "chunked", "cached_tokens"), 64
    )
    for arm in (0, 1):
        folder = tmp_path / "recordings" / f"arm{arm}-float32"
        folder.mkdir(parents=True)
        provenance.write(tmp_path / "recordings" / f"arm{arm}.execution.json", runs.execution(arm))
        for engine in invariance.engines(quick=True):
            facts = {
                "process": f"{engine.name} {arm}",
                "threads": engine.threads or 2,
                "compiled": 0,
                "dtype": "float32",
                "arm": arm,
                "contract": "a contract" if arm else None,
                "device_name": None,
            }
            says = {
                say: {"facts": counts, "requests": {r["id"]: imagine(r) for r in requests}}
                for say, requests in engine.says.items()
            }
            said = {"schema": "samebits.said/1", "engine": engine.name, "facts": facts, "seconds": {}, "says": says}
            (folder / f"{engine.name}.said.json").write_text(json.dumps(said))
    return tmp_path


def alter(out: Path, arm: int, engine: str, change: Change) -> None:
    file = out / "recordings" / f"arm{arm}-float32" / f"{engine}.said.json"
    said = json.loads(file.read_text())
    change(said)
    file.write_text(json.dumps(said))


def flip(say: str, request: str, at: int = 0) -> Change:
    def change(said: dict[str, Any]) -> None:
        said["says"][say]["requests"][request]["bits"][at] ^= 1

    return change


def cell(document: dict[str, Any], arm: int, name: str) -> dict[str, Any]:
    (found,) = [c for c in document["cells"] if (c["arm"], c["cell"]) == (arm, name)]
    return found


def test_an_invariant_engine_passes_and_every_cell_compared(out: Path) -> None:
    document = judge_recordings(out, quick=True)
    assert document["verdict"] == "pass" == rejudge_matrix(document), document["reasons"]
    assert len(document["cells"]) == 2 * len(cells(quick=True))
    assert all(c["compared"] > 0 and c["mismatched"] == 0 for c in document["cells"])
    head, rows = matrix_rows(document)
    assert head == ["cell", "BI=0 float32", "BI=1 float32"]
    assert all(text.startswith("0 of ") for row in rows for text in row[1:])


@pytest.mark.parametrize("quick", [True, False])
def test_the_probe_makes_what_the_cells_name(quick: bool) -> None:
    made = {engine.name: engine for engine in invariance.engines(quick)}
    for one in cells(quick):
        left, right = ({r["id"] for r in made[engine].says[say]} for engine, say in (one.left, one.right))
        assert all(a in left and b in right for a, b in one.pairs) if one.pairs else left & right, one.name
    assert len({one.name for one in cells(quick)}) == len(cells(quick))


def test_one_bit_at_arm_1_fails_and_names_the_token(out: Path) -> None:
    alter(out, 1, "base", flip("batch-8", "victim-20", 3))
    document = judge_recordings(out, quick=True)
    assert document["verdict"] == "fail" == rejudge_matrix(document)
    (reason,) = document["reasons"]
    assert reason["where"] == "arm1-float32: alone, batch of 8"
    assert "1 of 18 logprobs differ" in reason["what"] and "victim-20, answer token" in reason["what"]
    assert cell(document, 1, "alone, batch of 8")["first"]["position"] == 23
    assert "at position 23" in matrix_summary(document)


def test_one_bit_at_arm_0_is_counted_and_does_not_fail(out: Path) -> None:
    alter(out, 0, "base", flip("batch-8", "victim-20"))
    document = judge_recordings(out, quick=True)
    assert document["verdict"] == "pass"
    assert cell(document, 0, "alone, batch of 8")["mismatched"] == 1


def test_a_bit_of_a_decoded_token_is_a_mismatch_of_decode_against_prefill(out: Path) -> None:
    alter(out, 1, "base", flip("prompts", "prompt-31", -1))
    document = judge_recordings(out, quick=True)
    found = {c["cell"]: c["mismatched"] for c in document["cells"] if c["mismatched"]}
    assert found == {"decode, prefill: prompts 31 to 33": 1, "prefill, prefill of a longer text": 1}


def test_nothing_is_compared_behind_the_first_other_token(out: Path) -> None:
    def change(said: dict[str, Any]) -> None:
        said["says"]["batch-2"]["requests"]["victim-20"]["tokens"][22] ^= 1

    alter(out, 1, "base", change)
    found = cell(judge_recordings(out, quick=True), 1, "alone, batch of 2")
    assert (found["compared"], found["mismatched"], found["unreached"]) == (3, 1, 3)


def nan_in_both(said: dict[str, Any]) -> None:
    for say in ("alone", "batch-2", "batch-8", "batch-32", "joined"):
        said["says"][say]["requests"]["victim-20"]["bits"][0] = NAN


def constant(said: dict[str, Any]) -> None:
    for say in said["says"].values():
        for request in say["requests"].values():
            request["bits"] = [logprob_bits([1])] * len(request["bits"])


def no_preemption(said: dict[str, Any]) -> None:
    said["says"]["crowd"]["facts"]["preempted"] = 0


def cold_cache(said: dict[str, Any]) -> None:
    said["says"]["warm"]["facts"]["cached_tokens"] = 0


def same_process(said: dict[str, Any]) -> None:
    said["facts"]["process"] = "base 0"


def two_threads(said: dict[str, Any]) -> None:
    said["facts"]["threads"] = 2


def not_together(said: dict[str, Any]) -> None:
    said["says"]["batch-32"]["facts"]["together"] = 31


def whole_prompt(said: dict[str, Any]) -> None:
    said["says"]["sample"]["facts"]["chunked"] = 0


def other_prompt(said: dict[str, Any]) -> None:
    said["says"]["batch-2"]["requests"]["victim-20"]["tokens"][3] ^= 1


def other_contract(said: dict[str, Any]) -> None:
    said["facts"]["contract"] = "another"


def other_arm(said: dict[str, Any]) -> None:
    said["facts"]["arm"] = 1


def other_engine(said: dict[str, Any]) -> None:
    said["engine"] = "base"


def short(said: dict[str, Any]) -> None:
    said["says"]["sample"]["requests"]["sample-3"]["bits"].pop()


def no_victim(said: dict[str, Any]) -> None:
    del said["says"]["batch-2"]["requests"]["victim-20"]


def no_whole(said: dict[str, Any]) -> None:
    said["says"]["whole"]["requests"].clear()


def not_integers(said: dict[str, Any]) -> None:
    said["says"]["sample"]["requests"]["sample-3"]["bits"][0] = "0"


def extra_field(said: dict[str, Any]) -> None:
    said["verdict"] = "pass"


@pytest.mark.parametrize(
    ("engine", "change", "verdict", "what"),
    [
        ("base", nan_in_both, "fail", "infinite or NaN"),
        ("base", constant, "inconclusive", "every logprob is the same"),
        ("small-cache", no_preemption, "inconclusive", "preempted is 0, less than 1"),
        ("prefix", cold_cache, "inconclusive", "cached_tokens is 0, less than 32"),
        ("second", same_process, "inconclusive", "do not differ in process"),
        ("one-thread", two_threads, "inconclusive", "do not differ in threads"),
        ("base", not_together, "inconclusive", "together is 31, less than 32"),
        ("chunks-32", whole_prompt, "inconclusive", "chunked is 0"),
        ("base", other_prompt, "fail", "were not asked the same"),
        ("chunks-32", other_contract, "fail", "another contract"),
        ("second", other_arm, "fail", "ran arm 1"),
        ("second", other_engine, "fail", "is a recording of engine base"),
        ("second", short, "fail", "logprobs for other than as many tokens"),
        ("second", not_integers, "fail", "not integers of 32 bits"),
        ("base", no_victim, "inconclusive", "nothing was compared"),
        ("base", no_whole, "inconclusive", "requests are missing"),
        ("base", extra_field, "fail", "verdict"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_planted_lie_is_no_pass(out: Path, engine: str, change: Change, verdict: str, what: str) -> None:
    alter(out, 0, engine, change)
    document = judge_recordings(out, quick=True)
    assert document["verdict"] == verdict == rejudge_matrix(document)
    assert any(what in reason["what"] for reason in document["reasons"]), document["reasons"]


def test_a_recording_that_is_missing_or_cut_is_no_pass(out: Path) -> None:
    folder = out / "recordings" / "arm0-float32"
    (folder / "second.said.json").unlink()
    document = judge_recordings(out, quick=True)
    assert document["verdict"] == "inconclusive" and cell(document, 0, "two processes")["compared"] == 0
    (folder / "base.said.json").write_text((folder / "base.said.json").read_text()[:-20])
    assert judge_recordings(out, quick=True)["verdict"] == "fail"


def test_a_quick_recording_is_no_full_matrix(out: Path) -> None:
    document = judge_recordings(out, quick=False)
    assert document["verdict"] == "inconclusive"
    assert cell(document, 1, "eager and compiled")["compared"] == 0


def test_no_recording_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(JudgeError, match="holds no recordings"):
        judge_recordings(tmp_path, quick=True)


def hide(document: dict[str, Any]) -> None:
    document["cells"][0]["mismatched"] = 0


def drop(document: dict[str, Any]) -> None:
    del document["cells"][0]


def whitewash(document: dict[str, Any]) -> None:
    document["reasons"], document["verdict"] = [], "pass"


def more_than_all(document: dict[str, Any]) -> None:
    document["cells"][1]["mismatched"] = document["cells"][1]["compared"] + 1


def nothing_compared(document: dict[str, Any]) -> None:
    document["cells"][2]["compared"] = document["cells"][2]["distinct"] = 0


@pytest.mark.parametrize("change", [hide, drop, whitewash, more_than_all, nothing_compared])
def test_an_edited_matrix_contradicts_itself(out: Path, change: Change) -> None:
    alter(out, 1, "base", flip("batch-2", "victim-20"))
    document = judge_recordings(out, quick=True)
    facts = {k: v for k, v in document.items() if k not in ("schema", "checksum")}
    facts["cells"].sort(key=lambda c: -c["mismatched"])
    change(facts)
    with pytest.raises(JudgeError, match="contradicts itself"):
        rejudge_matrix(KIND.build(**facts))


def test_an_edited_matrix_breaks_its_checksum(out: Path, tmp_path: Path) -> None:
    document = judge_recordings(out, quick=True)
    KIND.write(tmp_path / "invariance.json", document)
    assert rejudge_matrix(KIND.read(tmp_path / "invariance.json")) == "pass"
    text = (tmp_path / "invariance.json").read_text()
    (tmp_path / "invariance.json").write_text(text.replace('"compared": 18', '"compared": 19', 1))
    with pytest.raises(InvarianceError, match="checksum"):
        KIND.read(tmp_path / "invariance.json")


# --- traces


def trace(rows: dict[str, dict[str, list[str]]], weights: dict[str, str] | None = None) -> dict[str, Any]:
    operators = [["embed", "lookup", 0], ["model.layers.0.norm", "rms_norm", 0], ["model.layers.1.mlp", "linear", 0]]
    numbered = {
        request: {position: {str(k): digest for k, digest in enumerate(row)} for position, row in at.items()}
        for request, at in rows.items()
    }
    return {"operators": operators, "rows": numbered, "weights": weights or {"model.layers.1.mlp.weight": "w"}}


def test_traces_that_agree_accuse_nobody() -> None:
    one = trace({"r": {"0": ["a", "b", "c"], "1": ["d", "e", "f"]}})
    assert first_difference(one, trace({"r": {"0": ["a", "b", "c"]}})) is None


def test_the_first_operator_is_named_not_the_first_token() -> None:
    one = trace({"r": {"0": ["a", "b", "c"], "1": ["d", "e", "f"]}})
    found = first_difference(one, trace({"r": {"0": ["a", "b", "x"], "1": ["d", "x", "x"]}}))
    assert found is not None
    assert (found.layer, found.module, found.operator) == (0, "model.layers.0.norm", "rms_norm")
    assert (found.position, found.differ, found.rows) == (1, 1, 2)


def test_a_weight_that_no_token_shows_is_named() -> None:
    rows = {"r": {"0": ["a", "b", "c"]}}
    found = first_difference(trace(rows), trace(rows, {"model.layers.1.mlp.weight": "x"}))
    assert found is not None
    assert (found.layer, found.operator, found.weight) == (1, "linear", "model.layers.1.mlp.weight")
    assert "no token shows it" in found.text()


def test_requests_of_other_names_are_compared_when_they_are_named() -> None:
    one, other = trace({"r": {"0": ["a", "b", "c"]}}), trace({"s": {"0": ["a", "b", "x"]}})
    with pytest.raises(JudgeError, match="share no token"):
        first_difference(one, other)
    found = first_difference(one, other, "r", "s")
    assert found is not None and found.layer == 1
