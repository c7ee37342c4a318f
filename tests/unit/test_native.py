"""Native libraries: the recorded bytes, the same bytes twice, and an error for each thing that can be wrong."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from samebits.sources.fetch import cache_folder
from samebits.sources.native import NativeError, build_library, compile_library, libraries_of, load_native
from samebits.sources.pins import ROOT, Artefact, load_pins

PINS = load_pins()
COMPILER, LIBRARIES = load_native()
PATCHES = ROOT / "patches"


def _artefact(local: str) -> Artefact:
    return next(a for a in PINS.upstreams["vllm"].artefact if a.local == local and a.base)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.file)
def test_a_build_elsewhere_has_the_recorded_bytes(library, tmp_path: Path) -> None:
    """`build_library` compares with the record; here a copy in another folder is compiled, no cache asked."""
    folder = shutil.copytree(PATCHES / library.sources, tmp_path / "some where" / "else")
    recorded = build_library(COMPILER, library, PINS, PATCHES, cache_folder())
    assert compile_library(COMPILER, library, PINS, folder, cache_folder()) == recorded


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.file)
def test_no_contraction_and_no_fast_arithmetic(library) -> None:
    """Each object is compiled without leave to fuse, to reorder or to assume away a NaN."""
    assert "-ffp-contract=off" in COMPILER.flags
    for flags in (COMPILER.flags, *(item.flags for item in library.objects)):
        assert not {"-ffast-math", "-Ofast", "-funsafe-math-optimizations", "-ffinite-math-only"} & set(flags)


def test_the_cpu_wheel_carries_its_library_and_no_other() -> None:
    assert list(libraries_of(PINS, _artefact("cpu"), "vllm", PATCHES, cache_folder())) == [
        "vllm/batch_invariant_cpu.so"
    ]
    assert libraries_of(PINS, _artefact(""), "vllm", PATCHES, cache_folder()) == {}
    assert libraries_of(PINS, _artefact("cpu"), "verl", PATCHES, cache_folder()) == {}


def test_other_bytes_than_the_recorded_are_refused() -> None:
    forged = replace(LIBRARIES[0], sha256="0" * 64)
    with pytest.raises(NativeError, match=r"sha256 is [0-9a-f]{64}, manifests/native\.toml says 0{64}\. Remedy"):
        build_library(COMPILER, forged, PINS, PATCHES, cache_folder())


def test_a_source_that_does_not_compile_is_named(tmp_path: Path) -> None:
    folder = shutil.copytree(PATCHES / LIBRARIES[0].sources, tmp_path / "broken")
    with (folder / "library.cpp").open("a") as file:
        file.write("int unused = ;\n")
    only = replace(LIBRARIES[0], objects=LIBRARIES[0].objects[-1:])
    with pytest.raises(NativeError, match=r"library\.cpp: the compiler says:\n(.|\n)*expected expression(.|\n)*Remedy"):
        compile_library(COMPILER, only, PINS, folder, cache_folder())
