"""What a GPU's measurements say without a GPU: arms and cases as typed, the documents, the tables, the bits."""

import hashlib
import io
import json
import os
import pathlib
import subprocess
import sys
import zipfile
from typing import Any

import pytest
from rich.console import Console

from samebits.bench import card, gemm
from samebits.evidence.measurement import ENGINES, GEMM, MeasurementError
from samebits.evidence.provenance import ProvenanceError
from samebits.judge import products as plan
from samebits.sources.pins import ROOT
from samebits.sources.tree import NOTE

CARD = {"name": "a card", "torch": "2.11.0", "cuda": "13.0", "driver": "580"}


def test_an_arm_is_a_name_a_switch_and_a_tree() -> None:
    assert card.Arm.parse("bi0=0") == card.Arm("bi0", 0)
    assert card.Arm.parse("first=1@/a/tree") == card.Arm("first", 1, pathlib.Path("/a/tree"))


@pytest.mark.parametrize("text", ["bi0", "=1", "bi2=2", "bi1=1x@/a"])
def test_what_is_no_arm_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(card.CardError, match="give NAME=0 or NAME=1"):
        card.Arm.parse(text)


@pytest.mark.parametrize("text", ["1024", "1024,128", "1024,128,0", "a,b,c", "1,2,3,4"])
def test_what_is_no_case_is_refused(text: str) -> None:
    with pytest.raises(card.CardError, match=f"--case {text}"):
        card.Case.parse(text)


def test_a_run_needs_a_model_that_is_known_and_names_that_differ(tmp_path: pathlib.Path) -> None:
    case = card.Case(8, 8, 1)
    with pytest.raises(card.CardError, match=r"--model 9B: give one of 0\.6B"):
        card.measure("9B", [card.Arm("a", 0)], [case], 1, False, False, print, tmp_path)
    with pytest.raises(card.CardError, match="a name of its own"):
        card.measure("8B", [card.Arm("a", 0), card.Arm("a", 1)], [case], 1, False, False, print, tmp_path)


@pytest.mark.parametrize("name", card.MODELS)
def test_each_geometry_is_a_qwen3(name: str) -> None:
    from transformers import Qwen3Config

    geometry = card.MODELS[name]
    config = Qwen3Config(**card.config(geometry, 4096))
    assert config.num_attention_heads % config.num_key_value_heads == 0 and config.head_dim == 128
    assert (config.hidden_size, config.vocab_size) == (geometry.hidden, geometry.vocabulary)
    assert geometry.cache_bytes == config.num_hidden_layers * 2 * config.num_key_value_heads * 128 * 2


def test_a_tree_is_that_of_its_wheel_or_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "a.py").write_text("one\n")
    note = {"wheel": "vllm-1.whl", "sha256": "1" * 64, "git_commit": "2" * 40}
    files = {"vllm/a.py": hashlib.sha256(b"one\n").hexdigest()}
    (tmp_path / NOTE).write_text(json.dumps({**note, "files": files}))
    arm = card.Arm("a", 1, tmp_path)
    assert card._tree(arm) == note and card._tree(card.Arm("b", 0)) == {"wheel": card.RELEASE}
    (tmp_path / "vllm" / "a.py").write_text("two\n")
    with pytest.raises(ProvenanceError, match=r"vllm/a\.py beside .* is not that of vllm-1\.whl"):
        card._tree(arm)
    started: list[str] = []
    with pytest.raises(ProvenanceError, match=r"vllm/a\.py beside"):
        card.measure("8B", [arm], [card.Case(8, 8, 1)], 1, False, False, started.append, tmp_path / "logs")
    assert not started  # refused before minutes of a card are spent on it


def engines(fast: list[float], differ: int) -> dict[str, Any]:
    tree = {"bi": 0, "tree": {"wheel": card.RELEASE}, "vllm": "0.26.0", "admitted": {}}
    case = {"prompt": 1024, "answer": 128, "requests": 1}
    none = {"tokens": 0, "logprobs": 0}
    return ENGINES.build(
        command="samebits bench engine",
        date="2026-01-31",
        card=CARD,
        model={"name": "Qwen3-8B", "layers": 36, "hidden": 4096},
        eager=False,
        rounds=3,
        arms={"bi0": tree, "bi1": {**tree, "bi": 1}},
        rows=[{"case": case, "unit": "tokens/s", "values": {"bi0": [100.0, 100.0, 100.0], "bi1": fast}}],
        said=[{"pair": ["bi0", "bi1"], "tokens": 0, "logprobs": differ, "of": 800, "alone": {**none, "of": 700}}],
    )


def drawn(table: Any) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table)
    return "\n".join(" ".join(line.split()) for line in console.export_text().splitlines())


def test_the_tables_say_medians_spread_ratios_and_what_differs() -> None:
    speed, same = card.tables(engines([102.0, 103.0, 108.0], 7))
    assert "1024 128 1 100 ±0% 103 ±3% 1.030 ±3%" in drawn(speed)
    assert "bi0 and bi1 together 0 7 of 800" in drawn(same) and "bi0 and bi1 each alone 0 0 of 700" in drawn(same)


def test_what_two_arms_said_is_compared_token_by_token_and_bit_by_bit() -> None:
    a, b = {"tokens": [1, 2], "bits": [5, 6, 7]}, {"tokens": [1, 3], "bits": [5, 0, 7]}
    one, other = {"together": a, "alone": a}, {"together": b, "alone": a}
    none = {"tokens": 0, "logprobs": 0, "of": 3}
    found = {"pair": ["a", "b"], "tokens": 1, "logprobs": 1, "of": 3, "alone": none}
    assert card._compared("a", one, "b", other) == found
    with pytest.raises(ValueError, match="shorter"):
        card._compared("a", one, "b", {**other, "alone": {**b, "bits": [5]}})


def products(**microseconds: float) -> dict[str, Any]:
    times = {"cublas": 10.0, "skinny": 8.0, "cublaslt": 10.0, "vllm": 50.0, "persistent": 20.0, **microseconds}
    row = {
        "model": "8B",
        "n": 8192,
        "k": 4096,
        "m": 1,
        "served": "skinny",
        "microseconds": times,
        "spread": {name: 0.4 for name in times},
        "widths": {"48": 8.0},
    }
    bits = [{"n": 8192, "k": 4096, "implementation": "skinny", "differ": 0, "of": 100}]
    return GEMM.build(
        command="samebits bench gemm",
        date="2026-01-31",
        card=CARD,
        libraries={"a.so": "0" * 64, "b.so": "1" * 64},
        rows=[row, {**row, "m": 32, "served": "cublaslt"}],
        copy_tb_s=8192 * 4096 * 2 / 8.0 / 1e6 * 2,
        bits=bits,
    )


def test_the_figures_are_of_what_serves() -> None:
    found = plan.summary(products())
    assert found["geometric mean"] == pytest.approx(1.25**0.5) and found["worst"] == 1.0
    assert found["share of the copy's bandwidth"] == pytest.approx(0.5)  # of the row of few rows alone
    assert "8B 8192 4096 1 10.0 50.0 20.0 10.0 8.0 1.25 5% 8.39" in drawn(gemm.table(products()))


def test_the_product_of_one_tile_is_a_product() -> None:
    """In Triton's interpreter: ragged rows, columns and depth, more tiles than programs."""
    script = """
import torch
from samebits.bench.persistent import product
x, weight = torch.randn(3, 70), torch.randn(290, 70)
assert torch.allclose(product(x, weight, 2), x @ weight.t(), rtol=1e-4, atol=1e-4)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=120)


def test_an_edited_measurement_is_refused(tmp_path: pathlib.Path) -> None:
    for kind, document in ((GEMM, products()), (ENGINES, engines([1.0, 1.0, 1.0], 0))):
        path = tmp_path / "found.json"
        kind.write(path, document)
        assert kind.read(path) == document
        path.write_text(path.read_text().replace('"2026-01-31"', '"2026-02-01"'))
        with pytest.raises(MeasurementError, match="edited"):
            kind.read(path)


def test_every_shape_that_is_measured_is_of_a_model() -> None:
    for name, shapes in plan.SHAPES.items():
        g = card.MODELS[name]
        queries, keys = g.heads * 128, g.kv_heads * 128
        assert shapes == (
            (queries + 2 * keys, g.hidden),
            (g.hidden, queries),
            (2 * g.intermediate, g.hidden),
            (g.hidden, g.intermediate),
            (g.vocabulary, g.hidden),
        )


def test_the_commands_on_record_are_of_this_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_DETERMINISTIC", raising=False)
    words = card._command("8B", [card.Arm("a", 0, ROOT)], [card.Case(8, 8, 1)], 3, True, True)
    assert words[:3] == ["samebits", "bench", "engine"] and words[-2:] == ["--eager", "--apart"]
    assert str(ROOT) not in " ".join(words)
    monkeypatch.setenv("TORCHINDUCTOR_DETERMINISTIC", "1")
    chosen = card._command("8B", [card.Arm("a", 0, ROOT)], [card.Case(8, 8, 1)], 3, True, True)
    assert chosen == ["TORCHINDUCTOR_DETERMINISTIC=1", *words]


def test_where_nothing_is_chosen_by_its_time_kernels_are_not_combined_by_theirs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Inductor refuses there to time what vLLM has it time, and a release does not start (torch 2.11.0)."""

    class Started(Exception):
        pass

    class Child:
        def __init__(self, what: str, module: str, job: dict[str, Any], *_: Any) -> None:
            raise Started(job["engine"].get("compilation_config"))

    monkeypatch.setattr(card, "Child", Child)
    for said, config in (("1", {"inductor_compile_config": {"combo_kernels": False}}), ("0", None)):
        monkeypatch.setenv(card.DETERMINISTIC, said)
        with pytest.raises(Started) as started:
            card.measure("8B", [card.Arm("a", 0)], [card.Case(8, 8, 1)], 1, False, False, lambda _: None, tmp_path)
        assert started.value.args == (config,)


def test_an_arm_that_is_called_the_release_holds_its_files(tmp_path: pathlib.Path) -> None:
    """The files that our series changes, by the hashes that it expects to find; what it adds must not be there."""
    from samebits.bench import engine
    from samebits.sources.fetch import fetch
    from samebits.sources.pins import load_pins

    artefact = next(a for a in load_pins().upstreams["vllm"].artefact if a.base == "0.26.0" and "gpu" not in a.profiles)
    known = json.loads((ROOT / "manifests" / "patched" / "vllm-0.26.0.json").read_text())["files"]
    with zipfile.ZipFile(fetch(artefact)) as wheel:
        wheel.extractall(tmp_path, [name for name, hashes in known.items() if hashes["before"]])
    engine.refuse_patched(tmp_path, "0.26.0")
    changed = next(name for name, hashes in known.items() if hashes["before"])
    added = next(name for name, hashes in known.items() if not hashes["before"])
    for name in (added, changed):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("ours")
        with pytest.raises(SystemExit, match=f"is not the release: {name} differs"):
            engine.refuse_patched(tmp_path, "0.26.0")
        (tmp_path / name).unlink()
