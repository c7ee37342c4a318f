"""The compiled extension of an upstream: keyed by all that decides its bytes, recorded, and packed as a wheel."""

import dataclasses
import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy_image import archive

from samebits.image import extension
from samebits.image.plan import Extension, Image, ImageError, Wheel, load_image, load_wheels
from samebits.sources.pins import ROOT, Artefact, Commit, Pins, Upstream, load_pins
from samebits.sources.wheels import artefacts_of, check_record

LIBRARY = b"\x7fELF, as if compiled"
TORCH = Wheel("torch", "2.0", "1" * 64, "torch-2.0-py3-none-any.whl")


def toy(cache: Path, **changes: Any) -> tuple[Image, Pins]:
    """The image's description with an extension of a toy, and the toy's pins."""
    pin = archive(cache)
    pins = Pins(Commit("toys", "toys@localhost", ""), {"toy": Upstream("toy", "", series=3, artefact=(pin,))}, ())
    said = {"sha256": hashlib.sha256(LIBRARY).hexdigest(), "flags": ("-O3", "-fPIC"), **changes}
    described = Extension("toy", pin.file, "toy/lib/toy_torch", wheels=("torch",), include=(), needs=(), **said)
    return dataclasses.replace(load_image(ROOT), extension=described), pins


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands for the compiler; says what it was asked for."""
    asked: list[str] = []

    def compile_extension(image: Image, artefact: Artefact, *_: object) -> bytes:
        asked.append(artefact.file)
        return LIBRARY

    monkeypatch.setattr(extension, "compile_extension", compile_extension)
    return asked


def test_it_is_a_wheel_of_the_images_python_with_the_series_version(tmp_path: Path, compiled: list[str]) -> None:
    image, pins = toy(tmp_path / "cache")
    arguments = (image, pins, [TORCH], "base", lambda: tmp_path / "blob")
    one = extension.build_extension(*arguments, tmp_path / "one", tmp_path / "cache")
    two = extension.build_extension(*arguments, tmp_path / "deeper" / "two", tmp_path / "cache")
    assert one.path.name == "toy_torch-1.0+samebits.3-cp313-cp313-linux_x86_64.whl"
    assert one.sha256 == two.sha256 and one.path.read_bytes() == two.path.read_bytes()
    assert compiled == ["toy_torch-1.0.tar.gz"], "the second time it came from the cache"
    check_record(one.path)
    with zipfile.ZipFile(one.path) as wheel:
        assert wheel.read("toy/lib/toy_torch.cpython-313-x86_64-linux-gnu.so") == LIBRARY
        said = wheel.read("toy_torch-1.0+samebits.3.dist-info/METADATA").decode()
        assert wheel.read("toy_torch-1.0+samebits.3.dist-info/licenses/LICENSE") == b"a licence\n"
    assert "Version: 1.0+samebits.3\nRequires-Dist: torch\n" in said and "onnx" not in said


def test_a_library_that_is_not_the_recorded_one_is_refused(tmp_path: Path, compiled: list[str]) -> None:
    image, pins = toy(tmp_path / "cache", sha256="0" * 64)
    with pytest.raises(ImageError, match=r"toy_torch\.cpython-313.*: its sha256 is .*, image\.toml says 0000"):
        extension.build_extension(image, pins, [TORCH], "base", Path, tmp_path / "out", tmp_path / "cache")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda image, pins: (image, pins, [TORCH], "another base"),
        lambda image, pins: (image, pins, [dataclasses.replace(TORCH, sha256="2" * 64)], "base"),
        lambda image, pins: (dataclasses.replace(image, python="3.14"), pins, [TORCH], "base"),
        lambda image, pins: (changed(image, flags=("-O2",)), pins, [TORCH], "base"),
        lambda image, pins: (changed(image, include=("/usr/include",)), pins, [TORCH], "base"),
        lambda image, pins: (image, with_archive(pins, "3" * 64), [TORCH], "base"),
    ],
    ids=["base", "headers", "python", "flags", "folders", "sources"],
)
def test_what_decides_its_bytes_gives_it_another_key(
    tmp_path: Path, change: Callable[[Image, Pins], tuple[Image, Pins, list[Wheel], str]]
) -> None:
    image, pins = toy(tmp_path)
    assert extension.extension_key(*change(image, pins)) != extension.extension_key(image, pins, [TORCH], "base")
    other = Wheel("helper", "1.0", "4" * 64, "helper-1.0-py3-none-any.whl")
    assert extension.extension_key(image, pins, [TORCH, other], "base") == extension.extension_key(
        image, pins, [TORCH], "base"
    ), "a wheel whose headers it does not include"


def changed(image: Image, **changes: Any) -> Image:
    return dataclasses.replace(image, extension=dataclasses.replace(image.extension, **changes))


def with_archive(pins: Pins, sha256: str) -> Pins:
    upstream = pins.upstreams["toy"]
    artefact = dataclasses.replace(upstream.artefact[0], sha256=sha256)
    return dataclasses.replace(pins, upstreams={"toy": dataclasses.replace(upstream, artefact=(artefact,))})


def test_headers_of_a_wheel_that_is_not_locked_are_refused(tmp_path: Path) -> None:
    image, _ = toy(tmp_path)
    with pytest.raises(ImageError, match="extension: torch is not locked"):
        extension.headers_of(image.extension, [])


def test_transformer_engines_extension_has_the_version_of_the_wheels_that_it_is_used_with() -> None:
    """Transformer Engine compares the three at its start."""
    image, pins = load_image(ROOT), load_pins()
    said, pin = image.extension, pins.by_file[image.extension.artefact]
    beside = [a for u, a in artefacts_of(pins, "gpu", image.python_version) if u.key == said.upstream]
    assert {a.version for a in beside} == {pin.version} and len(beside) == 2
    assert len(extension.headers_of(said, load_wheels(ROOT, "gpu"))) == len(said.wheels)
