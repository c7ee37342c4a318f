"""`samebits check gradients` whole, with one seed: every module passes, every fault is named, no lie gets through."""

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from samebits import cli
from samebits.evidence.gradients import KIND, GradientsError
from samebits.judge.gradients import COTANGENTS, LEAST_UNSEEN, MEGATRON, MODELS, missed
from samebits.judge.modules import MODULES

Document = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    out = tmp_path_factory.mktemp("gradients") / "out"
    done = CliRunner().invoke(cli.app, ["check", "gradients", "--out", str(out), "--seeds", "1"])
    assert done.exit_code == 0, done.output
    return out


@pytest.fixture(scope="module")
def document(folder: pathlib.Path) -> Document:
    return KIND.read(folder / "gradients.json")


def test_nothing_is_missed_and_the_page_is_there(folder: pathlib.Path, document: Document) -> None:
    assert missed(document, None) == []
    assert missed(document) == ["1 seeds, fewer than 100"]
    page = (folder / "gradients.html").read_text()
    assert "save_original_input overrides the mode" in page and "not covered: CUDA graphs" in page
    assert "http" not in page.replace("http://www.w3.org", "")


@pytest.mark.parametrize("module", MEGATRON)
def test_a_module_of_the_aligned_model_is_right_in_both_dtypes(document: Document, module: str) -> None:
    rows = [row for row in document["rows"] if (row["of"], row["module"]) == ("Megatron Core", module)]
    assert {row["dtype"] for row in rows} == {"bfloat16", "float32"}
    for row in rows:
        worst = row["worst"]
        floors = worst["relative"] / worst["floor"]
        print(f"{module} {row['dtype']} {row['tensor']}: {worst['relative']:.2e}, {floors:.1f} floors")
        assert row["wrong"] == 0 and row["compared"] >= len(MODULES[module].cases) * len(COTANGENTS)


@pytest.mark.parametrize("module", MODELS)
def test_gradients_and_one_step_updates_of_the_model_are_the_references(document: Document, module: str) -> None:
    """Two micro batches added up in FP32, Megatron's DDP and optimizer; in bf16 also recomputed."""
    rows = [row for row in document["rows"] if row["module"] == module]
    tensors = {row["tensor"] for row in rows}
    assert "embedding.word_embeddings.weight" in tensors and ("output_layer.weight" in tensors) != ("tied" in module)
    assert {row["dtype"] for row in rows} == {"bfloat16", "float32"} and not any(row["wrong"] for row in rows)


def test_faults_in_a_models_training_step_are_named_by_module_and_tensor(document: Document) -> None:
    for row in document["in_place"]:
        assert row["named"] == sorted(f"{row['module']}: {tensor}" for tensor in row["tensors"])


def test_a_sum_alone_misses_some(document: Document) -> None:
    unseen = [row["fault"] for row in document["faults"] if row["by_sum"] == 0]
    print(f"missed by y.sum().backward(): {', '.join(unseen)}; faults: {len(document['faults'])}")
    assert len(unseen) >= LEAST_UNSEEN and all(row["caught"] for row in document["faults"])


def _of(document: Document, key: str) -> Any:
    return document[key][0]


LIES: dict[str, tuple[Callable[[Document], object], str]] = {
    "a wrong gradient": (lambda d: _of(d, "rows").update(wrong=1, first_wrong="off"), "1 of .* gradients are wrong"),
    "an error above": (lambda d: _of(d, "rows")["worst"].update(relative=1.0), "an error of 1, .* is the most"),
    "no module": (lambda d: d["rows"].__delitem__(slice(0, 2)), "Megatron Core, linear, bfloat16: was not asked"),
    "no cotangent": (lambda d: _of(d, "rows")["cotangents"].remove("sparse"), "without cotangents sparse"),
    "nothing recorded": (lambda d: _of(d, "rows")["cotangents"].remove("recorded"), "without cotangents recorded"),
    "no case": (lambda d: _of(d, "rows")["cases"].remove("one row"), "without the cases one row"),
    "not recomputed": (lambda d: _of(d, "rows")["ways"].remove("recomputed"), "linear, bfloat16, x: not recomputed"),
    "nothing told": (lambda d: _of(d, "rows").update(worst=None), "no comparison tells anything"),
    "an unnamed fault": (lambda d: _of(d, "faults").update(named=[]), "named nothing, it is weight"),
    "one tensor too many": (lambda d: _of(d, "faults").update(named=["weight", "x"]), "named weight, x, it is weight"),
    "few faults": (lambda d: d["faults"].__delitem__(slice(5, None)), "5 faults were planted, fewer than 15"),
    "sums see all": (lambda d: [r.update(by_sum=1) for r in d["faults"]], "misses 0 faults"),
    "another module": (lambda d: _of(d, "in_place").update(named=["loss: x"]), "named loss: x, it is decoder"),
    "nothing in place": (lambda d: d.update(in_place=[]), "no fault was planted into a training step"),
    "another forward": (lambda d: _of(d, "forwards").update(error=1.0), "its forward is not the surrogate's"),
    "no forward": (lambda d: d.update(forwards=[]), "no forward of attention"),
    "a wrong reference": (lambda d: _of(d, "differences").update(error=0.1), "off from finite differences by 0.1"),
    "no differences": (lambda d: d.update(differences=[]), "no finite differences of attention"),
}


@pytest.mark.parametrize("name", list(LIES))
def test_a_document_that_lacks_something_is_no_pass(document: Document, name: str) -> None:
    lie, said = LIES[name]
    lying = copy.deepcopy(document)
    lie(lying)
    with pytest.raises(AssertionError, match=said):
        assert not missed(lying, None), "; ".join(missed(lying, None))


def test_an_edited_document_is_refused(document: Document, tmp_path: pathlib.Path) -> None:
    edited = copy.deepcopy(document)
    edited["rows"][0]["compared"] += 1
    with pytest.raises(GradientsError, match=r"edited: .*run `samebits check gradients` again"):
        KIND.validate(edited, "gradients.json")


def test_a_folder_that_holds_something_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "kept").write_text("")
    done = CliRunner().invoke(cli.app, ["check", "gradients", "--out", str(tmp_path)])
    assert done.exit_code == 1 and "is not empty: name a new folder" in done.output
