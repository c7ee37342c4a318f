"""Rebuilt wheels: valid, installable, and the same bytes wherever, whenever and by whomever they are built."""

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st

from samebits.sources.patchset import PatchError
from samebits.sources.pins import Pins
from samebits.sources.wheels import WheelError, build_profile, build_wheel, check_record


@pytest.fixture
def any_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def test_two_builds_in_different_folders_are_identical(tmp_path: Path, any_umask: None) -> None:
    source, pin = toy.release(tmp_path)
    patches = toy.series(tmp_path / "patches")
    one = build_wheel(source, pin, toy.upstream(pin), patches, tmp_path / "one")
    for path in patches.rglob("*"):
        os.utime(path, (0, 0))
    os.umask(0o000)
    two = build_wheel(source, pin, toy.upstream(pin), patches, tmp_path / "deeper" / "two")
    assert one.sha256 == two.sha256
    assert one.path.read_bytes() == two.path.read_bytes()


def test_the_wheel_is_the_release_and_the_series(tmp_path: Path) -> None:
    source, pin = toy.release(tmp_path)
    built = build_wheel(source, pin, toy.upstream(pin), toy.series(tmp_path / "patches"), tmp_path / "out")
    assert built.path.name == "toy-1.0+cpu.samebits.3-py3-none-any.whl"
    assert (built.distribution, built.version) == ("toy", "1.0+cpu.samebits.3")
    assert [c.path for c in built.changes] == ["toy/mod.py", "toy/new.py"]
    check_record(built.path)
    with zipfile.ZipFile(built.path) as wheel:
        info = "toy-1.0+cpu.samebits.3.dist-info"
        expected = {n.replace("toy_cpu-1.0.dist-info", info) for n in toy.FILES} | {"toy/new.py"}
        assert set(wheel.namelist()) == expected, "what lies outside of the package, such as tests/, is left out"
        assert wheel.namelist()[-1] == f"{info}/RECORD"
        assert "if os.sep:\n        return 2\n    return 1" in wheel.read("toy/mod.py").decode()
        assert wheel.read(f"{info}/METADATA").decode() == (
            "Metadata-Version: 2.4\nName: toy\nVersion: 1.0+cpu.samebits.3\nRequires-Dist: torch==2.0\n\n"
            "Version: 1.0 of a toy.\n"
        )
        assert wheel.read(f"{info}/WHEEL").decode() == toy.FILES["toy_cpu-1.0.dist-info/WHEEL"]
        modes = {i.filename: i.external_attr >> 16 for i in wheel.infolist()}
        assert {m for n, m in modes.items() if n != "toy/run.sh"} == {0o100644} and modes["toy/run.sh"] == 0o100755


def test_the_wheel_installs(tmp_path: Path) -> None:
    source, pin = toy.release(tmp_path)
    pins = Pins(toy.COMMIT, {"toy": toy.upstream(pin)}, ())
    cached = tmp_path / "cache" / pin.sha256 / pin.file
    cached.parent.mkdir(parents=True)
    source.rename(cached)
    out = tmp_path / "out"
    out.mkdir()
    (out / "toy-0.9+cpu.samebits.2-py3-none-any.whl").write_bytes(b"of an earlier build")
    built = list(build_profile(pins, "cpu", (3, 12), toy.series(tmp_path / "patches"), out, tmp_path / "cache"))
    assert {p.name for p in out.iterdir()} == {"requirements.txt", built[0].path.name}
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--require-hashes"]
    command += [
        "--find-links",
        str(out),
        "--requirement",
        str(out / "requirements.txt"),
        "--target",
        str(tmp_path / "t"),
    ]
    subprocess.run(command, check=True)
    code = "import toy.mod, importlib.metadata as m; print(toy.mod.size(), toy.__version__, m.version('toy'))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "t")}
    said = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert said.stdout == "2 1.0 1.0+cpu.samebits.3\n", "the code states the release, the distribution the build"


file_names = st.from_regex(r"toy/[a-zA-Zé,\"' ]{1,6}\.txt", fullmatch=True)


@given(st.dictionaries(file_names, st.text(max_size=20), max_size=5), st.randoms(use_true_random=False))
def test_the_order_of_the_release_does_not_matter(extra: dict[str, str], random: object) -> None:
    files = {**toy.FILES, **extra}
    shuffled = list(files.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        built = []
        for name, content in (("one", files), ("two", dict(shuffled))):
            source, pin = toy.release(Path(folder) / name, content)
            built.append(build_wheel(source, pin, toy.upstream(pin), Path(folder), Path(folder) / name / "out"))
            check_record(built[-1].path)
        assert built[0].sha256 == built[1].sha256


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    source, pin = toy.release(tmp_path / "in")
    patches = toy.series(tmp_path / "patches")
    (patches / "toy" / "0001-answer-two" / "edits.toml").write_text(toy.EDITS.replace('"size"', '"gone"'))
    with pytest.raises(PatchError, match=r"toy 1\.0: .*gone"):
        build_wheel(source, pin, toy.upstream(pin), patches, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


def test_metadata_that_is_not_as_expected_is_refused(tmp_path: Path) -> None:
    metadata = toy.METADATA.replace("torch==2.0+cpu", "torch==2.1+cpu")
    source, pin = toy.release(tmp_path, {**toy.FILES, "toy_cpu-1.0.dist-info/METADATA": metadata})
    with pytest.raises(WheelError, match=r"0 lines 'Requires-Dist: torch==2\.0\+cpu'.*Remedy"):
        build_wheel(source, pin, toy.upstream(pin), tmp_path, tmp_path / "out")


@pytest.mark.parametrize("fault", ["altered", "added", "removed"])
def test_a_record_that_is_not_of_its_wheel_is_refused(tmp_path: Path, fault: str) -> None:
    source, pin = toy.release(tmp_path)
    built = build_wheel(source, pin, toy.upstream(pin), tmp_path, tmp_path / "out")
    spoilt = tmp_path / built.path.name
    with zipfile.ZipFile(built.path) as good, zipfile.ZipFile(spoilt, "w") as bad:
        for name in good.namelist():
            if not (fault == "removed" and name == "toy/mod.py"):
                altered = fault == "altered" and name == "toy/mod.py"
                bad.writestr(name, good.read(name) + (b"#" if altered else b""))
        if fault == "added":
            bad.writestr("toy/extra.py", b"")
    with pytest.raises(WheelError, match="Remedy"):
        check_record(spoilt)
