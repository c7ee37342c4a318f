"""What a measurement of operators on a card must hold, without a card: planted lies, bits, exit codes."""

import copy
import importlib.util
import io
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from samebits import cli
from samebits.bench import card, operators
from samebits.bench.graph import Counted
from samebits.evidence.measurement import OPERATORS, MeasurementError
from samebits.judge import missed_operators
from samebits.judge import operators as plan
from samebits.sources.pins import ROOT

FA3 = "patches/vllm/0008-attention-neighbours/files/vllm/model_executor/layers/batch_invariant_fa3.py"


def count(of: int, differ: int = 0) -> dict[str, int]:
    return {"differ": differ, "of": of}


def fields() -> dict[str, Any]:
    """What a flawless run finds, without its schema and checksum."""
    size = {name: operator.elements for name, operator in plan.ROW_OPERATORS.items()}
    row_bits = [
        {
            "operator": name,
            "m": m,
            "alone": count(min(m, 3) * size[name]),
            "repeated": count(20 * m * size[name]),
            "graph": count(m * size[name]),
        }
        for name in size
        for m in (1, 2, 17, 64, 255, 256, 257, 1024)
    ]
    row_times = [
        {"operator": name, "m": m, "microseconds": {"vllm": 3.0, "ours": 2.0}}
        for name in size
        for m in (1, 16, 64, 1024)
    ]
    attention_bits = [
        {
            "heads": heads,
            "kv_heads": kv_heads,
            "page": page,
            "scale": scale,
            "told_1": count(17 * heads * 128),
            "told_5": count(17 * heads * 128),
            "scheduled": count(17 * heads * 128),
            "served": count(17 * heads * 128),
            "cache": count(17 * 8192 * kv_heads * 256),
            "repeated": count(20 * 17 * heads * 128),
        }
        for heads, kv_heads, page, scale in plan.ATTENTION_CASES
    ]
    attention_times = [
        {
            "requests": requests,
            "context": context,
            "bytes": requests * context * 4096,
            "microseconds": {"bi0": 10.0, "bi1": 20.0, "ours": 8.0},
        }
        for requests, context in plan.STEPS
    ]
    neighbours = [
        {
            "head": head,
            "page": page,
            "neighbour": neighbour,
            "refused": (head, page) == (96, 144),
            "true": count(8 * head, 5 if (head == 64 or (head, page) == (96, 144)) and neighbour > 16 else 0),
            "told": count(8 * head, 5 if (head, page) == (96, 144) and neighbour > 16 else 0),
        }
        for head, page, neighbour in plan.NEIGHBOUR_CASES
    ]
    return {
        "command": "samebits bench operators",
        "date": "2026-01-31",
        "card": {"name": "a card", "torch": "2.11.0", "cuda": "13.0", "driver": "580"},
        "libraries": {"batch_invariant_rows.so": "0" * 64, "batch_invariant_attention.so": "1" * 64},
        "rows": {
            "bits": row_bits,
            "errors": [{"operator": name, "ours": 1e-6, "vllm": 1e-6} for name in size],
            "times": row_times,
        },
        "attention": {"bits": attention_bits, "times": attention_times},
        "neighbours": neighbours,
    }


@pytest.fixture
def found() -> dict[str, Any]:
    return fields()


def test_a_flawless_run_lacks_nothing(found: dict[str, Any]) -> None:
    assert missed_operators(OPERATORS.build(**found)) == []


def case(rows: list[dict[str, Any]], **at: Any) -> dict[str, Any]:
    """The one row that has these values."""
    (row,) = (row for row in rows if all(row[key] == value for key, value in at.items()))
    return row


LIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a row alone differs": (
        lambda d: case(d["rows"]["bits"], operator="rms_norm", m=257)["alone"].update(differ=1),
        "rms_norm, 257 rows, alone: 1 of 12288 elements differ",
    ),
    "a repetition differs": (
        lambda d: case(d["rows"]["bits"], operator="log_softmax", m=64)["repeated"].update(differ=2),
        "log_softmax, 64 rows, repeated: 2 of",
    ),
    "a replay differs": (
        lambda d: case(d["rows"]["bits"], operator="silu_and_mul", m=1)["graph"].update(differ=3),
        "silu_and_mul, 1 rows, graph: 3 of 12288",
    ),
    "fewer rows alone than three": (
        lambda d: case(d["rows"]["bits"], operator="rms_norm", m=17)["alone"].update(of=4096),
        "rms_norm, 17 rows, alone: 4096 elements were compared, 12288 must be",
    ),
    "one repetition instead of twenty": (
        lambda d: case(d["rows"]["bits"], operator="add_rms_norm", m=2)["repeated"].update(of=2 * 2 * 4096),
        "add_rms_norm, 2 rows, repeated: 16384 elements were compared, 327680 must be",
    ),
    "a number of rows is missing": (
        lambda d: d["rows"]["bits"].remove(case(d["rows"]["bits"], operator="rms_norm", m=255)),
        "operator rms_norm, m 255: is not measured",
    ),
    "a number of rows stands twice": (
        lambda d: d["rows"]["bits"].append(d["rows"]["bits"][0]),
        "operator rms_norm, m 1: is listed twice",
    ),
    "an operator of another name": (
        lambda d: d["rows"]["errors"][0].update(operator="layer_norm"),
        "operator layer_norm: is none of the cases",
    ),
    "an operator was not compared with fp64": (
        lambda d: d["rows"]["errors"].pop(),
        "operator selected_log_softmax: is not measured",
    ),
    "an error of a norm": (
        lambda d: case(d["rows"]["errors"], operator="rms_norm").update(ours=0.0045),
        "rms_norm: an error of 0.0045, 0.0043 is the most",
    ),
    "an error of a logprob": (
        lambda d: case(d["rows"]["errors"], operator="log_softmax").update(ours=1e-4),
        "log_softmax: an error of 0.0001, 3.65e-05 is the most",
    ),
    "a time is missing": (
        lambda d: d["rows"]["times"].pop(),
        "operator selected_log_softmax, m 1024: is not measured",
    ),
    "attention differs": (
        lambda d: case(d["attention"]["bits"], heads=40, page=32, scale=8)["told_1"].update(differ=1),
        "attention of 40 heads on 8, pages of 32, queries by 8, told_1: 1 of 87040 elements differ",
    ),
    "attention differs from what longer queries get": (
        lambda d: case(d["attention"]["bits"], heads=4, page=16, scale=0)["told_5"].update(differ=1),
        "pages of 16, queries by 0, told_5: 1 of",
    ),
    "a schedule changes bits": (
        lambda d: case(d["attention"]["bits"], heads=8, page=16, scale=1)["scheduled"].update(differ=3),
        "scheduled: 3 of",
    ),
    "attention differs in the steps that are served": (
        lambda d: case(d["attention"]["bits"], heads=64, page=32, scale=1)["served"].update(differ=9),
        "served: 9 of",
    ),
    "the cache differs": (
        lambda d: case(d["attention"]["bits"], heads=8, page=128, scale=1)["cache"].update(differ=256),
        "cache: 256 of",
    ),
    "one length instead of seventeen": (
        lambda d: case(d["attention"]["bits"], heads=32, page=16, scale=1)["told_1"].update(of=32 * 128),
        "told_1: 4096 elements were compared, 69632 must be",
    ),
    "attention was not repeated": (
        lambda d: case(d["attention"]["bits"], heads=32, page=16, scale=1)["repeated"].update(of=1),
        "repeated: 1 elements were compared, 1392640 must be",
    ),
    "a kind of heads is missing": (
        lambda d: d["attention"].update(bits=[row for row in d["attention"]["bits"] if row["heads"] != 64]),
        "heads 64, kv_heads 8, page 16, scale 1: is not measured",
    ),
    "a step is missing": (
        lambda d: d["attention"]["times"].pop(),
        "requests 8, context 8704: is not measured",
    ),
    "more bytes than a step reads": (
        lambda d: d["attention"]["times"][0].update(bytes=10**9),
        "1 requests of 1088: 1000000000 bytes, they are 4456448",
    ),
    "a neighbour changes bits": (
        lambda d: case(d["neighbours"], head=128, page=16, neighbour=300)["told"].update(differ=1),
        "heads of 128, pages of 16, a neighbour of 300, told: 1 of 1024 elements differ",
    ),
    "what differs is called refused": (
        lambda d: [row.update(refused=True) for row in d["neighbours"] if (row["head"], row["page"]) == (64, 16)],
        "heads of 64, pages of 16, a neighbour of 0: vLLM refuses it",
    ),
    "what vLLM refuses is called served": (
        lambda d: [row.update(refused=False) for row in d["neighbours"]],
        "heads of 96, pages of 144, a neighbour of 0: vLLM does not refuse it",
    ),
    "a neighbour is missing": (
        lambda d: d["neighbours"].remove(case(d["neighbours"], head=256, page=144, neighbour=9)),
        "head 256, page 144, neighbour 9: is not measured",
    ),
    "half a head was compared": (
        lambda d: case(d["neighbours"], head=256, page=16, neighbour=9)["true"].update(of=1024),
        "a neighbour of 9, true: 1024 elements were compared, 2048 must be",
    ),
    "more differ than there are": (
        lambda d: case(d["neighbours"], head=64, page=16, neighbour=300)["true"].update(differ=513),
        "true: 513 of 512 elements differ, more than there are",
    ),
    "a comparison that sees nothing": (
        lambda d: [row["true"].update(differ=0) for row in d["neighbours"]],
        "heads of 64: no neighbour changes a bit",
    ),
    "the hash of another library": (
        lambda d: d.update(libraries={"batch_invariant_rows.so": "0" * 64, "b.so": "1" * 64}),
        "batch_invariant_attention.so: its hash is not there",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_planted_lie_is_named(name: str, found: dict[str, Any]) -> None:
    lie, named = LIES[name]
    lie(found)
    assert any(named in text for text in missed_operators(OPERATORS.build(**found)))


BROKEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no rows": lambda d: d["rows"].update(bits=[]),
    "no attention": lambda d: d.pop("attention"),
    "no neighbours": lambda d: d.update(neighbours=[]),
    "nothing was compared": lambda d: d["rows"]["bits"][0]["alone"].update(of=0),
    "a count without its whole": lambda d: d["attention"]["bits"][0]["cache"].pop("of"),
    "a time of zero": lambda d: d["rows"]["times"][0]["microseconds"].update(ours=0),
    "a way is missing": lambda d: d["attention"]["times"][0]["microseconds"].pop("bi0"),
    "an error of zero": lambda d: d["rows"]["errors"][0].update(ours=0),
    "a library without a hash": lambda d: d["libraries"].update({"batch_invariant_rows.so": ""}),
    "a field of its own": lambda d: d["neighbours"][0].update(note="as expected"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_the_schema_is_no_document(name: str, found: dict[str, Any]) -> None:
    BROKEN[name](found)
    with pytest.raises(MeasurementError, match=r"breaks samebits\.operators/1"):
        OPERATORS.build(**found)


def test_an_edited_document_is_refused(tmp_path: pathlib.Path, found: dict[str, Any]) -> None:
    path, document = tmp_path / "operators.json", OPERATORS.build(**found)
    OPERATORS.write(path, document)
    assert OPERATORS.read(path) == document
    path.write_text(path.read_text().replace('"2026-01-31"', '"2026-02-01"'))
    with pytest.raises(MeasurementError, match="edited"):
        OPERATORS.read(path)


def test_the_sizes_are_those_of_the_model() -> None:
    g = card.MODELS["8B"]
    sizes = (plan.HIDDEN, plan.INTERMEDIATE, plan.HEADS, plan.KV_HEADS, plan.VOCABULARY)
    assert sizes == (g.hidden, g.intermediate, g.heads, g.kv_heads, g.vocabulary)


def test_what_is_refused_is_what_the_patch_refuses() -> None:
    spec = importlib.util.spec_from_file_location("batch_invariant_fa3", ROOT / FA3)
    assert spec and spec.loader
    fa3 = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fa3)
    refused = set()
    for head in plan.NEIGHBOUR_HEADS:
        for page in plan.NEIGHBOUR_PAGES:
            try:
                fa3.check_tiles(head, page)
            except ValueError:
                refused.add((head, page))
    assert refused == plan.REFUSED and plan.SEEN <= fa3.SMALL_HEAD


def test_elements_are_counted_by_their_bits() -> None:
    counted, nan = Counted(), math.nan
    counted.compare(torch.tensor([1.0, -0.0, nan, 2.0]), torch.tensor([1.0, 0.0, nan, 3.0]))
    assert (counted.differ, counted.of) == (2, 4)
    one = torch.tensor([[1.0, nan]], dtype=torch.bfloat16)
    counted.compare(one, torch.tensor([[1.0078125, 1.0]], dtype=torch.bfloat16))
    assert (counted.differ, counted.of) == (4, 6)
    with pytest.raises(ValueError, match="cannot be compared"):
        counted.compare(one, one[:, :1])
    with pytest.raises(ValueError, match="cannot be compared"):
        counted.compare(one, one.float())


def test_an_error_is_relative_to_its_row_or_absolute() -> None:
    exact = torch.tensor([[1.0, 4.0], [8.0, 2.0]], dtype=torch.float64)
    out = torch.tensor([[1.5, 4.0], [8.0, 2.5]])
    assert operators._error("x", (out,), (exact,), "rms_norm") == 0.125
    assert operators._error("x", (out,), (exact, exact), "log_softmax") == 0.5
    with pytest.raises(MeasurementError, match="x: an output is no number"):
        operators._error("x", (out * math.nan,), (exact,), "rms_norm")


@pytest.mark.parametrize("page", [16, 32])
def test_a_new_token_goes_to_the_last_place_of_its_request(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "DEVICE", "cpu")
    lengths = (1, 16, 17, 60)
    step = operators._Step.draw(4, 2, page, lengths, 64)
    for i, length in enumerate(lengths):
        table = step.table[i].tolist()
        assert divmod(int(step.slots[i]), page) == (table[(length - 1) // page], (length - 1) % page)
    assert sorted(step.table.flatten().tolist()) == list(range(step.cache.shape[0]))
    keys, values = operators._keys_and_values(step.cache)
    assert keys.shape == values.shape == (step.cache.shape[0], page, 2, 128)
    assert torch.equal(torch.cat((keys, values), -1).transpose(1, 2), step.cache)
    assert step.value.stride() == ((4 + 2 * 2) * 128, 128, 1)


def drawn(table: Any) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table)
    return "\n".join(" ".join(line.split()) for line in console.export_text().splitlines())


def test_the_tables_and_figures_are_of_the_document(found: dict[str, Any]) -> None:
    document = OPERATORS.build(**found)
    rows, steps, neighbours = map(drawn, operators.tables(document))
    assert "norm_rotary_embedding 16 3.0 2.0 1.50 1e-06 1e-06" in rows
    assert "8 8704 10.0 20.0 8.0 1.25 28.52 35.65" in steps
    assert "64 16 6 0 served" in neighbours and "96 144 6 6 refused" in neighbours
    figures = operators.summary(document)
    assert figures["row operators, vLLM's ÷ ours, geometric mean"] == pytest.approx(1.5)
    assert figures["attention, BI=0 ÷ ours, worst"] == 1.25
    assert figures["elements that differ"] == 0
    found["attention"]["bits"][0]["cache"]["differ"] = 7
    assert operators.summary(OPERATORS.build(**found))["elements that differ"] == 7


def test_the_command_fails_on_what_must_not_differ_and_still_writes_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any]
) -> None:
    good = OPERATORS.build(**copy.deepcopy(found))
    found["attention"]["bits"][0]["told_1"]["differ"] = 1
    for document, code in ((good, 0), (OPERATORS.build(**found), 1)):
        monkeypatch.setattr(operators, "document", lambda _, document=document: document)
        path = tmp_path / f"{code}.json"
        done = CliRunner().invoke(cli.app, ["bench", "operators", "--out", str(path)])
        assert done.exit_code == code and json.loads(path.read_text()) == document
        assert ("told_1: 1 of 69632 elements differ" in done.output) == bool(code)
