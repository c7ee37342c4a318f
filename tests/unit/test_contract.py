"""The catalogue of operators: the page is of the table, the table of the library's sources and of the tests."""

import pathlib
import re

import pytest

from samebits.judge import backward_contract, contract
from samebits.judge.backward_contract import BACKWARD
from samebits.judge.contract import Catalogue, ContractError
from samebits.judge.modules import MODULES
from samebits.judge.quantized import MODES
from samebits.sources.pins import ROOT

DOCUMENT = ROOT / "docs" / "numerical-contract.md"
SOURCES = ROOT / "patches" / "vllm" / "0003-batch-invariant-cpu" / "files" / "csrc" / "batch_invariant" / "cpu"


@pytest.mark.parametrize("catalogue", [contract.NUMERICAL, BACKWARD], ids=lambda one: one.file)
def test_the_page_and_the_tests_are_those_of_the_table(catalogue: Catalogue) -> None:
    contract.check(ROOT / "docs" / catalogue.file, ROOT, catalogue)


def test_every_module_class_that_layer_1_judges_has_a_row() -> None:
    rows = " ".join(row.module for row in backward_contract.ROWS)
    judged = {name.partition(",")[0] for name in MODULES} - {"linear with bias", "merged attention", "masked loss"}
    assert "quantized linear" in judged and not [name for name in judged if name.split()[0] not in rows]
    assert [mode for mode in MODES if f"quantized linear, `{mode}`" not in rows] == []


def test_every_operator_of_the_librarys_sources_has_a_row() -> None:
    text = "\n".join(path.read_text() for path in sorted(SOURCES.glob("*.cpp")))
    defined = set(re.findall(r'\{"(\w+)",', text))
    assert "linear" in defined and f'"{contract.NAME}"' in text
    operators = {name for name in defined if not name.startswith("reference_")} - contract.NOT_ARITHMETIC
    assert operators == {row.operator for row in contract.ROWS}


def test_every_operator_of_the_cards_libraries_has_a_row() -> None:
    sources = sorted(ROOT.glob("patches/vllm/*/files/csrc/batch_invariant/cuda/*.cpp"))
    text = "\n".join(path.read_text() for path in sources)
    defined = set(re.findall(r'\{?"(\w+)(?:\(|", *\n? *"\()(?:Tensor|int|\))', text))
    assert {"linear", "rms_norm", "decode_attention", "contract"} <= defined and f'"{contract.CUDA_NAME}"' in text
    operators = {name for name in defined if not name.startswith("reference_")} - contract.NOT_ARITHMETIC
    assert operators == {row.operator for row in contract.CUDA_ROWS}


@pytest.fixture
def page(tmp_path: pathlib.Path) -> pathlib.Path:
    copy = tmp_path / "page.md"
    copy.write_text(DOCUMENT.read_text())
    return copy


def test_a_stale_page_is_refused_and_mended_by_write(page: pathlib.Path) -> None:
    fresh = page.read_text()
    page.write_text(fresh.replace("16 lanes", "8 lanes"))
    with pytest.raises(ContractError, match="check contract --write"):
        contract.check(page, ROOT)
    contract.write(page)
    contract.check(page, ROOT)
    assert "16 lanes" in page.read_text()
    page.write_text(fresh.replace(contract.END, ""))
    with pytest.raises(ContractError, match="put them back"):
        contract.write(page)


def test_a_test_that_is_not_there_is_named(page: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert contract.missing_tests(ROOT) == []
    with pytest.raises(ContractError, match=r"linear: tests/integration/test_operators_cpu\.py::test_a_row"):
        contract.check(page, tmp_path)
