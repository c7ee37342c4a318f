"""A capsule is whole and untouched, or it is refused with the folder, the file and the remedy."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import execution, half_true, make_run, reseal, rewrite, sha, step, sync
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from samebits.evidence import provenance, schema, strictjson
from samebits.evidence.capsule import Capsule, CapsuleError, Tensor, read_capsule, write_capsule


@pytest.fixture
def parts() -> tuple[dict[str, Any], dict[str, Any]]:
    return step(1, 0, np.random.default_rng(0))


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small sync capsule that the property tests copy and damage."""
    folder = tmp_path_factory.mktemp("capsule") / "sync-0000"
    write_capsule(folder, *sync("sync", 0, 0))
    return folder


def test_what_is_written_is_read_back(tmp_path: Path, parts: tuple[dict[str, Any], dict[str, Any]]) -> None:
    meta, tensors = parts
    write_capsule(tmp_path / "step-0001", meta, tensors)
    capsule = read_capsule(tmp_path / "step-0001")
    assert capsule.meta == meta
    for name, array in tensors.items():
        assert capsule.tensors[name].dtype == array.dtype.name
        assert capsule.tensors[name].read().tobytes() == array.tobytes()
    assert [p.name for p in tmp_path.iterdir()] == ["step-0001"]


def test_sums_are_what_sha256sum_checks(sealed: Path) -> None:
    lines = (sealed / "SHA256SUMS").read_text().splitlines()
    assert lines == [
        f"{hashlib.sha256((sealed / name).read_bytes()).hexdigest()}  {name}"
        for name in ("capsule.json", "tensors.safetensors")
    ]


def test_a_piece_of_a_tensor_can_be_read_alone(sealed: Path) -> None:
    tensor = read_capsule(sealed).tensors["probe_log_probs"]
    assert tensor.flat(5, 11).tobytes() == tensor.read().reshape(-1)[5:11].tobytes()


def test_bfloat16_travels_as_its_bits(tmp_path: Path, parts: tuple[dict[str, Any], dict[str, Any]]) -> None:
    meta, tensors = parts
    bits = np.random.default_rng(1).integers(0, 2**16, tensors["rollout"].shape).astype(np.uint16)
    tensors = {**tensors, **{path: Tensor.of(bits, "bfloat16") for path in ("rollout", "recompute", "actor")}}
    write_capsule(tmp_path / "c", meta, tensors)
    read = read_capsule(tmp_path / "c").tensors["rollout"]
    assert read.dtype == "bfloat16"
    assert read.read().tobytes() == bits.tobytes()
    with safe_open(tmp_path / "c/tensors.safetensors", framework="np") as file:
        assert file.get_slice("rollout").get_dtype() == "BF16"


def test_the_library_reads_what_we_write_and_we_read_what_it_writes(sealed: Path, tmp_path: Path) -> None:
    theirs = load_file(sealed / "tensors.safetensors")
    shutil.copytree(sealed, tmp_path / "c")
    save_file(theirs, tmp_path / "c/tensors.safetensors", metadata={"format": "pt"})
    reseal(tmp_path / "c")
    ours = read_capsule(tmp_path / "c").tensors
    assert {name: t.read().tobytes() for name, t in ours.items()} == {n: a.tobytes() for n, a in theirs.items()}


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_flipped_bit_is_refused(
    sealed: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    copy = tmp_path_factory.mktemp("flip") / "c"
    shutil.copytree(sealed, copy)
    path = copy / data.draw(st.sampled_from(["capsule.json", "tensors.safetensors", "SHA256SUMS"]))
    content = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    read_capsule(copy)  # the control: untouched, it is read
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    with pytest.raises(CapsuleError):
        read_capsule(copy)
    shutil.rmtree(copy)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_any_truncation_is_refused(sealed: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    copy = tmp_path_factory.mktemp("cut") / "c"
    shutil.copytree(sealed, copy)
    path = copy / data.draw(st.sampled_from(["capsule.json", "tensors.safetensors", "SHA256SUMS"]))
    path.write_bytes(path.read_bytes()[: data.draw(st.integers(0, path.stat().st_size - 1))])
    with pytest.raises(CapsuleError):
        read_capsule(copy)
    shutil.rmtree(copy)


@given(st.binary(max_size=300), st.sampled_from(["capsule.json", "tensors.safetensors", "SHA256SUMS"]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_no_content_crashes_the_reader(
    sealed: Path, tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str, sums_fit: bool
) -> None:
    copy = tmp_path_factory.mktemp("any") / "c"
    shutil.copytree(sealed, copy)
    (copy / name).write_bytes(content)
    if sums_fit and name != "SHA256SUMS":
        reseal(copy)
    with pytest.raises(CapsuleError):
        read_capsule(copy)
    shutil.rmtree(copy)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(["kind", "sync", "weights", "execution", "exported", "loaded", "schema"]), JSON)
@settings(max_examples=150, deadline=None)
def test_no_field_crashes_the_reader(
    sealed: Path, tmp_path_factory: pytest.TempPathFactory, field: str, value: Any
) -> None:
    copy = tmp_path_factory.mktemp("field") / "c"
    shutil.copytree(sealed, copy)
    meta = strictjson.loads((copy / "capsule.json").read_bytes())
    (copy / "capsule.json").write_text(json.dumps({**meta, field: value}))
    reseal(copy)
    try:
        capsule = read_capsule(copy)
    except CapsuleError:
        pass
    else:
        assert isinstance(capsule, Capsule) and not schema.problems(capsule.meta, "capsule-sync-1")
    shutil.rmtree(copy)


@pytest.mark.parametrize("name", ["capsule.json", "tensors.safetensors", "SHA256SUMS"])
def test_a_missing_file_is_named(sealed: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(sealed, tmp_path / "c")
    (tmp_path / "c" / name).unlink()
    with pytest.raises(CapsuleError, match=rf"c: {name}: missing.*; record the run again"):
        read_capsule(tmp_path / "c")


def test_a_file_too_many_is_refused(sealed: Path, tmp_path: Path) -> None:
    shutil.copytree(sealed, tmp_path / "c")
    (tmp_path / "c/notes.txt").write_text("hello")
    with pytest.raises(CapsuleError, match=r"notes\.txt: not listed"):
        read_capsule(tmp_path / "c")


def test_a_link_is_not_a_file(sealed: Path, tmp_path: Path) -> None:
    shutil.copytree(sealed, tmp_path / "c")
    (tmp_path / "c/capsule.json").unlink()
    (tmp_path / "c/capsule.json").symlink_to(sealed / "capsule.json")
    with pytest.raises(CapsuleError, match="not a regular file"):
        read_capsule(tmp_path / "c")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, t: t.pop("seed"), "tensor seed is missing"),
        (lambda m, t: t.update(more=t["seed"]), "tensor more does not belong"),
        (lambda m, t: t.update(reward=t["reward"].astype(np.float64)), "tensor reward is float64, not float32"),
        (lambda m, t: t.update(reward=t["reward"][1:]), r"tensor reward has shape \[15\]"),
        (lambda m, t: t.update({k: v[:0] for k, v in t.items()}), "empty"),
        (lambda m, t: m.update(kind="other"), "kind is 'other'"),
        (lambda m, t: m.pop("update"), "'update' is a required property"),
        (lambda m, t: m.update(step=1.0), r"step: 1\.0 is not of type 'integer'"),
        (lambda m, t: m["update"].update(grad_norm=float("nan")), "grad_norm|not JSON"),
    ],
)
def test_the_contract_binds_writer_and_reader(
    tmp_path: Path, parts: tuple[dict[str, Any], dict[str, Any]], change: Any, message: str
) -> None:
    meta, tensors = parts
    write_capsule(tmp_path / "control", meta, tensors)
    change(meta, tensors)
    with pytest.raises((CapsuleError, ValueError), match=message):
        write_capsule(tmp_path / "c", meta, tensors)
    assert [p.name for p in tmp_path.iterdir()] == ["control"], "nothing half-written is left behind"


@pytest.mark.parametrize("token", ["NaN", "Infinity", "1e999", "9" * 30])
def test_a_number_that_is_none_is_refused(sealed: Path, tmp_path: Path, token: str) -> None:
    shutil.copytree(sealed, tmp_path / "c")
    text = (sealed / "capsule.json").read_text()
    (tmp_path / "c/capsule.json").write_text(text.replace('"sync": 0', f'"sync": {token}'))
    reseal(tmp_path / "c")
    with pytest.raises(CapsuleError, match="not JSON"):
        read_capsule(tmp_path / "c")


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '"\\ud800"', "[" * 100_000, "", "\xff"])
def test_json_that_two_readers_see_differently_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        strictjson.loads(text.encode("latin-1"))


def test_a_bool_is_zero_or_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    half_true(run)
    folder = run / "capsules/step-0001"
    with pytest.raises(CapsuleError, match="neither true nor false"):
        read_capsule(folder).tensors["valid"].read()


def test_a_capsule_is_never_overwritten(sealed: Path) -> None:
    with pytest.raises(CapsuleError, match="exists already; choose an empty folder"):
        write_capsule(sealed, *sync("sync", 0, 0))


def test_a_writer_that_dies_leaves_no_capsule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("samebits.evidence.capsule._flush", full)
    with pytest.raises(CapsuleError, match="No space left"):
        write_capsule(tmp_path / "c", *sync("sync", 0, 0))
    assert not list(tmp_path.iterdir())


def test_rewriting_is_the_identity_when_nothing_changes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    before = read_capsule(run / "capsules/step-0002").sha256
    rewrite(run, "step-0002", lambda meta, tensors: None)
    assert read_capsule(run / "capsules/step-0002").sha256 == before


# The execution identity


def wheel(folder: Path, content: bytes) -> Path:
    """The requirements.txt of one wheel, samebits_unit_test 1.0, that lies beside it."""
    path = folder / "samebits_unit_test-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("samebits_unit_test-1.0.dist-info/RECORD", content)
    requirements = folder / "requirements.txt"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    requirements.write_text(f"samebits-unit-test==1.0 --hash=sha256:{digest}\n")
    return requirements


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    info = tmp_path / "site/samebits_unit_test-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: samebits-unit-test\nVersion: 1.0\n")
    (info / "RECORD").write_text("a.py,sha256=abc,3\nINSTALLER,sha256=x,2\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path


def test_the_identity_names_sources_wheels_and_processor(installed: Path) -> None:
    requirements = wheel(installed, b"a.py,sha256=abc,3\nsamebits_unit_test-1.0.dist-info/RECORD,,\n")
    (installed / "cpu.txt").write_text("torch==2.11.0\n")
    identity = provenance.collect(
        root=installed,
        lock=installed / "cpu.txt",
        requirements=requirements,
        arm=0,
        runner="v1",
        config_sha256=sha("config"),
        model=execution()["model"],
        command=["samebits", "run", "rl"],
        environment={"OMP_NUM_THREADS": "2", "VLLM_API_KEY": "secret", "HOME": "/home/me"},
    )
    assert identity["switches"] == {"OMP_NUM_THREADS": "2", "VLLM_BATCH_INVARIANT": "0"}
    assert identity["wheels"] == {"samebits_unit_test-1.0-py3-none-any.whl": requirements.read_text()[-65:-1]}
    assert identity["lock"]["sha256"] == hashlib.sha256(b"torch==2.11.0\n").hexdigest()
    assert str(installed) not in str(identity)
    provenance.write(installed / "execution.json", identity)
    assert provenance.read(installed / "execution.json") == identity


@pytest.mark.parametrize(("suffix", "dirty"), [("", False), ("-dirty", True)])
def test_where_a_tree_lies_over_a_release_its_note_names_wheel_and_commit(
    tmp_path: Path, suffix: str, dirty: bool
) -> None:
    (tmp_path / "gpu.txt").write_text("torch==2.11.0\n")
    (tmp_path / "a.py").write_text("one\n")
    files = {"a.py": sha("one\n")}
    note = {"wheel": "vllm-1.whl", "sha256": sha("wheel"), "git_commit": "2" * 40 + suffix, "files": files}
    (tmp_path / "samebits-tree.json").write_text(json.dumps(note))
    identity = provenance.collect(
        root=tmp_path,
        lock=tmp_path / "gpu.txt",
        requirements=tmp_path / "none.txt",
        tree=tmp_path / "samebits-tree.json",
        arm=0,
        runner="v2",
        config_sha256=sha("config"),
        model=execution()["model"],
        command=["samebits", "check", "bits"],
        environment={},
    )
    assert (identity["git_commit"], identity["git_dirty"]) == ("2" * 40, dirty)
    assert identity["wheels"] == {"vllm-1.whl": sha("wheel")}


def test_a_wheel_that_is_not_the_installed_one_is_refused(installed: Path) -> None:
    assert provenance.installed_wheels(wheel(installed, b"a.py,sha256=abc,3\n"))
    with pytest.raises(provenance.ProvenanceError, match="not what is installed in this environment; run `make env`"):
        provenance.installed_wheels(wheel(installed, b"a.py,sha256=abd,3\n"))


def test_an_edited_wheel_is_refused(installed: Path) -> None:
    requirements = wheel(installed, b"a.py,sha256=abc,3\n")
    next(installed.glob("*.whl")).write_bytes(b"something else")
    with pytest.raises(provenance.ProvenanceError, match=r"no wheel beside requirements\.txt is the one"):
        provenance.installed_wheels(requirements)
    with pytest.raises(provenance.ProvenanceError, match="missing or lists no wheel; run `make env`"):
        provenance.installed_wheels(installed / "none.txt")


def test_arm_and_switch_must_agree(tmp_path: Path) -> None:
    with pytest.raises(provenance.ProvenanceError, match="arm 0 and VLLM_BATCH_INVARIANT=1 contradict"):
        provenance.collect(
            root=tmp_path,
            lock=tmp_path / "cpu.txt",
            requirements=tmp_path / "requirements.txt",
            arm=0,
            runner="v1",
            config_sha256=sha("config"),
            model={},
            command=[],
            environment={"VLLM_BATCH_INVARIANT": "1"},
        )


def test_instruction_sets_are_those_of_every_processor(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu avx2 avx512f amx_bf16\n\nflags\t\t: fpu avx2 avx512f sse\n")
    assert provenance.instruction_set(tmp_path / "cpuinfo") == ["avx2", "avx512f"]
    (tmp_path / "cpuinfo").write_text("Features\t: fp asimd bf16 sve\n")
    assert provenance.instruction_set(tmp_path / "cpuinfo") == ["asimd", "bf16", "sve"]
