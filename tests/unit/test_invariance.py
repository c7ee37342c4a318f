"""The judge of the invariance matrix: an engine that is invariant passes every cell, and each planted lie is caught.

The recordings are of an imagined engine, whose logprob is a function of the tokens before it and nothing else; they are
made from the probe's own engines and requests, so that the probe and the judge are held to one matrix.
"""

import hashlib
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs

from samebits.evidence import provenance
from samebits.evidence.invariance import KIND, InvarianceError
from samebits.judge import JudgeError, judge_recordings, matrix, matrix_rows, matrix_summary, rejudge_matrix
from samebits.judge.localise import first_difference
from samebits.judge.matrix import cells
from samebits.probe import engine as probe_engine
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


def scheduled(engine: invariance.Engine, say: str) -> dict[str, int]:
    """What a scheduler counts that does what the matrix asks for."""
    requests = engine.says[say]
    prompts = [len(r["prompt"]) for r in requests]
    one_by_one = all(r.get("after", 0) >= matrix.ONE_BY_ONE for r in requests)
    budget = engine.arguments["max_num_batched_tokens"]
    return {
        "steps": (sum if one_by_one else max)(r["answer"] for r in requests),
        "together": 1 if one_by_one else len(requests),
        "largest_step": max(prompts) if one_by_one else min(sum(prompts), budget),
        "preempted": int(engine.name == "small-cache"),
        "mixed_steps": int(say == "joined"),
        "chunked": int(not one_by_one and sum(prompts) > budget),
        "cached_tokens": 192 if say == "warm" else 0,
    }


def record(out: Path, quick: bool, arms: tuple[int, ...]) -> None:
    asked = invariance.Asked(arms=arms, dtypes=("float32",), quick=quick)
    for arm in arms:
        folder = out / "recordings" / f"arm{arm}-float32"
        folder.mkdir(parents=True)
        identity = {**runs.execution(arm), "command": invariance.command(asked)}
        provenance.write(out / "recordings" / f"arm{arm}.execution.json", identity)
        for engine in invariance.engines(quick):
            facts = {
                "process": f"{engine.name} {arm}",
                "threads": engine.threads,
                "compiled": int(not engine.arguments["enforce_eager"]),
                "foreign": [] if arm or engine.arguments["enforce_eager"] else ["aten::rsqrt"],
                "dtype": "float32",
                "arm": arm,
                "contract": "a contract" if arm else None,
                "device_name": None,
            }
            says = {
                say: {"facts": scheduled(engine, say), "requests": {r["id"]: imagine(r) for r in requests}}
                for say, requests in engine.says.items()
            }
            said = {"schema": "samebits.said/1", "engine": engine.name, "facts": facts, "seconds": {}, "says": says}
            (folder / f"{engine.name}.said.json").write_text(json.dumps(said))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("recorded")
    record(out, quick=True, arms=(0, 1))
    return out


@pytest.fixture
def out(recorded: Path, tmp_path: Path) -> Path:
    """Recordings of both arms in one dtype that pass."""
    return shutil.copytree(recorded, tmp_path / "out")


def judged(
    out: Path, quick: bool = True, arms: tuple[int, ...] = (0, 1), dtypes: tuple[str, ...] = ("float32",)
) -> dict[str, Any]:
    return judge_recordings(out, quick, arms, dtypes)


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
    document = judged(out)
    assert document["verdict"] == "pass" == rejudge_matrix(document), document["reasons"]
    assert len(document["cells"]) == 2 * len(cells(quick=True))
    assert all(c["compared"] > 0 and c["mismatched"] == 0 for c in document["cells"])
    head, rows = matrix_rows(document)
    assert head == ["cell", "BI=0 float32", "BI=1 float32"]
    assert all(text.startswith("0 of ") for row in rows for text in row[1:])


def test_the_whole_matrix_passes_too(tmp_path: Path) -> None:
    record(tmp_path, quick=False, arms=(1,))
    document = judged(tmp_path, quick=False, arms=(1,))
    assert document["verdict"] == "pass" == rejudge_matrix(document), document["reasons"]
    assert [c["compared"] for c in document["cells"]] == [c.positions for c in cells()]


@pytest.mark.parametrize(
    ("foreign", "what"),
    [(["aten::mul", "tl.exp"], "the compiler was left arithmetic: aten::mul, tl.exp"), (None, "facts/foreign")],
)
def test_what_the_compiler_computes_at_arm_1_is_no_pass(tmp_path: Path, foreign: list[str] | None, what: str) -> None:
    record(tmp_path, quick=False, arms=(1,))
    alter(tmp_path, 1, "compiled", lambda said: said["facts"].update(foreign=foreign))
    document = judged(tmp_path, quick=False, arms=(1,))
    assert document["verdict"] == "fail" == rejudge_matrix(document)
    assert any(what in str(reason) for reason in document["reasons"]), document["reasons"]


@pytest.mark.parametrize("quick", [True, False])
def test_the_probe_asks_what_the_cells_compare(quick: bool) -> None:
    made = {engine.name: engine for engine in invariance.engines(quick)}
    for one in cells(quick):
        sides = [{r["id"]: r for r in made[engine].says[say]} for engine, say in (one.left, one.right)]
        for pair in one.pairs:
            for asked, planned in zip(sides, pair, strict=True):
                assert len(asked[planned.id]["prompt"]) == planned.prompt, one.name
                assert asked[planned.id]["answer"] == planned.answer, one.name
        assert one.pairs and one.positions >= len(one.pairs)
        assert one.proofs or one.apart, one.name
    assert len({one.name for one in cells(quick)}) == len(cells(quick))
    assert made.keys() == {engine for one in cells(quick) for engine, _ in (one.left, one.right)}


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"device": "cuda", "dtypes": ("float32",)}, "--dtype float32: on cuda the contract has bfloat16"),
        ({"device": "cuda", "dtypes": ("bfloat16",), "hidden": 128}, "--hidden 128: give a multiple of 256"),
        ({"device": "cpu", "dtypes": ("bfloat16",), "hidden": 192}, "--hidden 192: give a multiple of 128"),
    ],
)
def test_a_model_that_a_device_has_no_rows_for_is_refused_before_anything_runs(
    tmp_path: Path, asked: dict[str, Any], what: str
) -> None:
    with pytest.raises(invariance.ModelError, match=what):
        invariance.record(invariance.Asked(arms=(1,), **asked), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_process_is_known_by_one_name_and_another_by_another() -> None:
    words = "from samebits.probe.engine import process; print(process())"
    other = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True).stdout.strip()
    assert probe_engine.process() == probe_engine.process() != other


def test_one_bit_at_arm_1_fails_and_names_the_token(out: Path) -> None:
    alter(out, 1, "base", flip("batch-8", "victim-20", 3))
    document = judged(out)
    assert document["verdict"] == "fail" == rejudge_matrix(document)
    (reason,) = document["reasons"]
    assert reason["where"] == "arm1-float32: alone, batch of 8"
    assert "1 of 18 logprobs differ" in reason["what"] and "victim-20, answer token" in reason["what"]
    assert cell(document, 1, "alone, batch of 8")["first"]["position"] == 23
    assert "at position 23" in matrix_summary(document)


def test_one_bit_at_arm_0_is_counted_and_does_not_fail(out: Path) -> None:
    alter(out, 0, "base", flip("batch-8", "victim-20"))
    document = judged(out)
    assert document["verdict"] == "pass"
    assert cell(document, 0, "alone, batch of 8")["mismatched"] == 1


def test_a_bit_of_a_decoded_token_is_a_mismatch_of_decode_against_prefill(out: Path) -> None:
    alter(out, 1, "base", flip("prompts", "prompt-31", -1))
    document = judged(out)
    found = {c["cell"]: c["mismatched"] for c in document["cells"] if c["mismatched"]}
    assert found == {"decode, prefill: prompts 31 to 33": 1, "prefill, prefill of a longer text": 1}


def test_nothing_is_compared_behind_the_first_other_token(out: Path) -> None:
    def change(said: dict[str, Any]) -> None:
        said["says"]["batch-2"]["requests"]["victim-20"]["tokens"][22] ^= 1

    alter(out, 1, "base", change)
    found = cell(judged(out), 1, "alone, batch of 2")
    assert (found["compared"], found["mismatched"], found["unreached"]) == (3, 1, 3)


def nan_in_both(said: dict[str, Any]) -> None:
    for say in ("alone", "batch-2", "batch-8", "batch-32", "joined"):
        said["says"][say]["requests"]["victim-20"]["bits"][0] = NAN


def constant(said: dict[str, Any]) -> None:
    for say in said["says"].values():
        for request in say["requests"].values():
            request["bits"] = [logprob_bits([1])] * len(request["bits"])


def fact(name: str, value: Any) -> Change:
    def change(said: dict[str, Any]) -> None:
        said["facts"][name] = value

    change.__name__ = f"{name} {value}"
    return change


def count(say: str, name: str, value: int) -> Change:
    def change(said: dict[str, Any]) -> None:
        said["says"][say]["facts"][name] = value

    change.__name__ = f"{say} {name} {value}"
    return change


def other_prompt(said: dict[str, Any]) -> None:
    said["says"]["batch-2"]["requests"]["victim-20"]["tokens"][3] ^= 1


def other_prompt_of_the_whole(said: dict[str, Any]) -> None:
    said["says"]["whole"]["requests"]["whole"]["tokens"][20] ^= 1


def other_contract(said: dict[str, Any]) -> None:
    said["facts"]["contract"] = "another"


def other_arm(said: dict[str, Any]) -> None:
    said["facts"]["arm"] = 1


def other_engine(said: dict[str, Any]) -> None:
    said["engine"] = "base"


def short(said: dict[str, Any]) -> None:
    said["says"]["sample"]["requests"]["sample-3"]["bits"].pop()


def cut(request: dict[str, Any], tokens: int) -> None:
    """Take the last tokens of an answer and their logprobs away."""
    if tokens:
        del request["tokens"][-tokens:], request["bits"][-tokens:]


def one_token_less(said: dict[str, Any]) -> None:
    cut(said["says"]["prompts"]["requests"]["prompt-31"], 1)


def answers_of_one_token(said: dict[str, Any]) -> None:
    for say in said["says"].values():
        for request in say["requests"].values():
            cut(request, len(request["tokens"]) - request["prompt"] - 1)


def no_logprobs_of_the_prompt(said: dict[str, Any]) -> None:
    for request in said["says"]["sample"]["requests"].values():
        del request["bits"][: request["prompt"] - request["start"]]
        request["start"] = request["prompt"]


def one_request_a_say(said: dict[str, Any]) -> None:
    for say in said["says"].values():
        say["requests"] = dict([*say["requests"].items()][-1:])


def no_victim(said: dict[str, Any]) -> None:
    del said["says"]["batch-8"]["requests"]["victim-20"]


def no_neighbour(said: dict[str, Any]) -> None:
    del said["says"]["batch-8"]["requests"]["neighbour-0"]


def no_whole(said: dict[str, Any]) -> None:
    said["says"]["whole"]["requests"].clear()


def no_say(said: dict[str, Any]) -> None:
    del said["says"]["whole"]


def another_say(said: dict[str, Any]) -> None:
    said["says"]["batch-3"] = said["says"]["batch-2"]


def another_request(said: dict[str, Any]) -> None:
    said["says"]["sample"]["requests"]["sample-4"] = said["says"]["sample"]["requests"]["sample-3"]


def same_order(said: dict[str, Any]) -> None:
    said["says"]["reversed"] = said["says"]["sample"]


def not_integers(said: dict[str, Any]) -> None:
    said["says"]["sample"]["requests"]["sample-3"]["bits"][0] = "0"


def extra_field(said: dict[str, Any]) -> None:
    said["verdict"] = "pass"


@pytest.mark.parametrize(
    ("engine", "change", "verdict", "what"),
    [
        ("base", nan_in_both, "fail", "infinite or NaN"),
        ("base", constant, "inconclusive", "every logprob is the same"),
        ("base", count("alone", "together", 2), "inconclusive", "base/alone: together is 2, more than 1"),
        ("base", count("batch-32", "together", 31), "inconclusive", "base/batch-32: together is 31, less than 32"),
        ("base", count("joined", "mixed_steps", 0), "inconclusive", "mixed_steps is 0, less than 1"),
        ("base", count("prompts", "together", 2), "inconclusive", "base/prompts: together is 2, more than 1"),
        ("base", count("prompts", "chunked", 1), "inconclusive", "base/prompts: chunked is 1, more than 0"),
        ("base", count("prompts", "cached_tokens", 8), "inconclusive", "base/prompts: cached_tokens is 8, more than 0"),
        ("base", count("prompts", "largest_step", 128), "inconclusive", "largest_step is 128, less than 129"),
        ("base", count("prompts", "steps", 35), "inconclusive", "steps is 35, less than 36"),
        ("base", count("whole", "largest_step", 132), "inconclusive", "base/whole: largest_step is 132, less than 133"),
        ("base", count("whole", "cached_tokens", 16), "inconclusive", "base/whole: cached_tokens is 16, more than 0"),
        ("base", count("sample", "chunked", 1), "inconclusive", "base/sample: chunked is 1, more than 0"),
        ("chunks-32", count("sample", "chunked", 0), "inconclusive", "chunks-32/sample: chunked is 0, less than 1"),
        ("base", count("prefixes", "cached_tokens", 32), "inconclusive", "base/prefixes: cached_tokens is 32, more"),
        ("prefix", count("cold", "cached_tokens", 32), "inconclusive", "prefix/cold: cached_tokens is 32, more than 0"),
        ("prefix", count("warm", "cached_tokens", 0), "inconclusive", "prefix/warm: cached_tokens is 0, less than 32"),
        ("base", count("crowd", "preempted", 1), "inconclusive", "base/crowd: preempted is 1, more than 0"),
        ("small-cache", count("crowd", "preempted", 0), "inconclusive", "preempted is 0, less than 1"),
        ("base", count("sample", "together", 2), "inconclusive", "base/sample: together is 2, less than 3"),
        ("base", count("reversed", "together", 2), "inconclusive", "base/reversed: together is 2, less than 3"),
        ("base", fact("threads", 4), "inconclusive", "base/sample: threads is 4, more than 2"),
        ("base", fact("threads", 1), "inconclusive", "base/sample: threads is 1, less than 2"),
        ("one-thread", fact("threads", 2), "inconclusive", "one-thread/sample: threads is 2, more than 1"),
        ("second", fact("process", "base 0"), "inconclusive", "do not differ in process"),
        ("base", other_prompt, "fail", "were not asked the same"),
        ("base", other_prompt_of_the_whole, "fail", "were not asked the same"),
        ("chunks-32", other_contract, "fail", "another contract"),
        ("second", other_arm, "fail", "ran arm 1"),
        ("second", other_engine, "fail", "is a recording of engine base"),
        ("second", short, "fail", "9 tokens, 7 logprobs"),
        ("second", not_integers, "fail", "not integers of 32 bits"),
        ("base", one_token_less, "fail", "prompts/prompt-31: prompt of 31, begins at 1, 34 tokens"),
        ("base", answers_of_one_token, "fail", "alone/victim-5: prompt of 5, begins at 5, 6 tokens, 1 logprobs"),
        ("second", no_logprobs_of_the_prompt, "fail", "sample/sample-3: prompt of 3, begins at 3"),
        ("base", one_request_a_say, "fail", "alone: 2 of 3 requests are missing: victim-5, victim-20"),
        ("base", no_victim, "fail", "batch-8: 1 of 8 requests are missing: victim-20"),
        ("base", no_neighbour, "fail", "batch-8: 1 of 8 requests are missing: neighbour-0"),
        ("base", no_whole, "fail", "whole: 1 of 1 requests are missing: whole"),
        ("base", no_say, "inconclusive", "there is no recording of 'whole'"),
        ("base", another_say, "fail", "batch-3: is not asked of this engine"),
        ("second", another_request, "fail", "sample: other requests, or in another order"),
        ("base", same_order, "fail", "reversed: other requests, or in another order"),
        ("base", extra_field, "fail", "verdict"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_planted_lie_is_no_pass(out: Path, engine: str, change: Change, verdict: str, what: str) -> None:
    alter(out, 0, engine, change)
    document = judged(out)
    assert document["verdict"] == verdict == rejudge_matrix(document)
    assert any(what in reason["what"] for reason in document["reasons"]), document["reasons"]


def test_a_recording_that_is_missing_or_cut_is_no_pass(out: Path) -> None:
    folder = out / "recordings" / "arm0-float32"
    (folder / "second.said.json").unlink()
    document = judged(out)
    assert document["verdict"] == "inconclusive" and cell(document, 0, "two processes")["compared"] == 0
    (folder / "base.said.json").write_text((folder / "base.said.json").read_text()[:-20])
    assert judged(out)["verdict"] == "fail"


def test_a_quick_recording_is_no_full_matrix(out: Path) -> None:
    document = judged(out, quick=False)
    assert document["verdict"] == "fail" == rejudge_matrix(document)
    assert cell(document, 1, "eager and compiled")["compared"] == 0


@pytest.mark.parametrize(
    ("arms", "dtypes", "where", "what"),
    [
        ((0, 1), ("bfloat16", "float32"), "arm0-bfloat16/base", "there is no recording"),
        ((0, 1), ("bfloat16", "float32"), "arm0", "asks for another matrix"),
        ((0,), ("float32",), "arm1-float32", "was not asked for"),
        ((0,), ("float32",), "arm0", "asks for another matrix"),
    ],
)
def test_the_columns_are_those_that_were_asked_for(
    out: Path, arms: tuple[int, ...], dtypes: tuple[str, ...], where: str, what: str
) -> None:
    document = judged(out, arms=arms, dtypes=dtypes)
    assert document["verdict"] == "fail" == rejudge_matrix(document)
    assert any(r["where"] == where and what in r["what"] for r in document["reasons"]), document["reasons"]


def test_a_whole_arm_does_not_vanish(out: Path) -> None:
    shutil.rmtree(out / "recordings" / "arm0-float32")
    (out / "recordings" / "arm0.execution.json").unlink()
    document = judged(out)
    assert document["verdict"] == "fail" == rejudge_matrix(document)
    assert cell(document, 0, "two processes")["missing"] == 3
    assert judged(out, arms=(1,))["verdict"] == "fail", "the other arm's command names it"


def test_a_recording_of_no_engine_of_the_matrix_is_no_pass(out: Path) -> None:
    said = json.loads((out / "recordings" / "arm0-float32" / "second.said.json").read_text())
    (out / "recordings" / "arm0-float32" / "third.said.json").write_text(json.dumps({**said, "engine": "third"}))
    (reason,) = judged(out)["reasons"]
    assert reason == {"verdict": "fail", "where": "arm0-float32/third", "what": "is no engine of the matrix"}


def test_no_recording_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(JudgeError, match="holds no recordings"):
        judged(tmp_path)


def resealed(document: dict[str, Any]) -> dict[str, Any]:
    return KIND.build(**{k: v for k, v in document.items() if k not in ("schema", "checksum")})


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
    document = judged(out)
    document["cells"].sort(key=lambda c: -c["mismatched"])
    change(document)
    with pytest.raises(JudgeError, match="contradicts itself"):
        rejudge_matrix(resealed(document))


def two_of_each(document: dict[str, Any]) -> None:
    for c in document["cells"]:
        c["compared"] = c["distinct"] = 2


def one_less(document: dict[str, Any]) -> None:
    document["cells"][-1]["compared"] -= 1


def not_reached(document: dict[str, Any]) -> None:
    """As if each answer of BI=0 had parted before its first token."""
    c = next(c for c in document["cells"] if c["arm"] == 0 and c["cell"] == "two processes")
    first = {"request": "sample-3", "against": "sample-3", "position": 1, "of": "prompt"}
    c.update(compared=2, distinct=2, unreached=c["compared"] - 2, mismatched=1)
    c["first"] = {**first, "tokens": [1, 1], "bits": ["00000001", "00000002"]}


def one_missing(document: dict[str, Any]) -> None:
    document["cells"][0]["missing"] = 1


def no_proof(document: dict[str, Any]) -> None:
    for c in document["cells"]:
        c["proof"] = {"left": {}, "right": {}}


def not_alone(document: dict[str, Any]) -> None:
    document["cells"][0]["proof"]["left"]["together"] = 2


def one_process(document: dict[str, Any]) -> None:
    next(c for c in document["cells"] if c["cell"] == "two processes")["apart"] = False


def no_arm_1(document: dict[str, Any]) -> None:
    document["cells"] = [c for c in document["cells"] if c["arm"] == 0]


def no_arm_1_and_never_asked_for(document: dict[str, Any]) -> None:
    no_arm_1(document)
    document["asked"]["arms"] = [0]
    for kept in (document["executions"], document["contracts"]):
        del kept["1"]
    document["recordings"] = {k: v for k, v in document["recordings"].items() if k.startswith("arm0")}


def another_dtype_asked_for(document: dict[str, Any]) -> None:
    document["asked"]["dtypes"] = ["bfloat16", "float32"]
    for identity in document["executions"].values():
        identity["command"] = [*identity["command"][:-1], "--dtype", "bfloat16", "--quick"]


def another_command(document: dict[str, Any]) -> None:
    document["executions"]["1"]["command"] = ["samebits", "check", "bits", "--out", "OUT"]


def called_whole(document: dict[str, Any]) -> None:
    document["quick"] = False


def no_digest(document: dict[str, Any]) -> None:
    del document["recordings"]["arm1-float32/second"]


def other_digest(document: dict[str, Any]) -> None:
    document["recordings"]["arm1-float32/third"] = "0" * 64


def no_identity(document: dict[str, Any]) -> None:
    del document["executions"]["0"]


LESS = [
    two_of_each,
    one_less,
    not_reached,
    one_missing,
    no_proof,
    not_alone,
    one_process,
    no_arm_1,
    no_arm_1_and_never_asked_for,
    another_dtype_asked_for,
    another_command,
    called_whole,
    no_digest,
    other_digest,
    no_identity,
]


@pytest.mark.parametrize("change", LESS)
def test_a_matrix_that_shows_less_than_was_asked_is_no_pass(out: Path, change: Change) -> None:
    document = judged(out)
    assert rejudge_matrix(resealed(document)) == "pass"
    change(document)
    with pytest.raises(JudgeError, match="not among the reasons"):
        rejudge_matrix(resealed(document))


def test_an_edited_matrix_breaks_its_checksum(out: Path, tmp_path: Path) -> None:
    document = judged(out)
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
