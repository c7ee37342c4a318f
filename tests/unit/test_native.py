"""Native libraries: the recorded bytes, the same bytes twice, and an error for each thing that can be wrong."""

import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from samebits.sources.fetch import cache_folder
from samebits.sources.native import Library, NativeError, build_library, compile_library, libraries_of, load_native
from samebits.sources.nvrtc import CudaError
from samebits.sources.pins import ROOT, Artefact, load_pins

PINS = load_pins()
COMPILER, LIBRARIES = load_native()
PATCHES = ROOT / "patches"


def _artefact(local: str) -> Artefact:
    return next(a for a in PINS.upstreams["vllm"].artefact if a.local == local and a.base)


def _copied(library: Library, to: Path) -> list[Path]:
    return [shutil.copytree(PATCHES / name, to / str(number)) for number, name in enumerate(library.sources)]


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.file)
def test_a_build_elsewhere_has_the_recorded_bytes(library, tmp_path: Path) -> None:
    """`build_library` compares with the record; here a copy in another folder is compiled, no cache asked."""
    folders = _copied(library, tmp_path / "some where")
    recorded = build_library(COMPILER, library, PINS, PATCHES, cache_folder())
    assert compile_library(COMPILER, library, PINS, folders, cache_folder()) == recorded


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.file)
def test_no_contraction_and_no_fast_arithmetic(library) -> None:
    """Each object and image is compiled without leave to fuse, to reorder or to assume away a NaN."""
    assert "-ffp-contract=off" in COMPILER.flags and "--fmad=false" in COMPILER.cuda_flags
    assert not {"--use_fast_math", "--ftz=true", "--prec-div=false", "--prec-sqrt=false"} & set(COMPILER.cuda_flags)
    for flags in (COMPILER.flags, *(item.flags for item in library.objects)):
        assert not {"-ffast-math", "-Ofast", "-funsafe-math-optimizations", "-ffinite-math-only"} & set(flags)


CUDA = [f"vllm/batch_invariant_{name}.so" for name in ("linear", "sm90", "rows", "attention")]


def test_each_wheel_carries_its_own_libraries() -> None:
    assert list(libraries_of(PINS, _artefact("cpu"), "vllm", PATCHES, cache_folder())) == [
        "vllm/batch_invariant_cpu.so"
    ]
    assert list(libraries_of(PINS, _artefact(""), "vllm", PATCHES, cache_folder())) == CUDA
    assert libraries_of(PINS, _artefact("cpu"), "verl", PATCHES, cache_folder()) == {}


def test_a_series_that_ends_earlier_carries_what_its_patches_bring(tmp_path: Path) -> None:
    """The first CUDA commit alone is a series too: its wheel has the linear and nothing of what comes after."""
    patches = shutil.copytree(PATCHES, tmp_path / "patches")
    names = sorted(folder.name for folder in (patches / "vllm").iterdir())
    for later in names[names.index("0004-admitted-linear") + 1 :]:
        shutil.rmtree(patches / "vllm" / later)
    assert list(libraries_of(PINS, _artefact(""), "vllm", patches, cache_folder())) == CUDA[:1]


@pytest.mark.parametrize("name", CUDA)
def test_a_cuda_library_loads_without_a_gpu_and_asks_for_one_by_name(name: str) -> None:
    """Operators are there with their schemas; a tensor on the CPU is no argument of theirs."""
    library = next(library for library in LIBRARIES if library.file == name)
    data = build_library(COMPILER, library, PINS, PATCHES, cache_folder())
    script = """
import sys, torch
torch.ops.load_library(sys.argv[1])
names = torch._C._dispatch_get_all_op_names()
mine = sorted(n for n in names if n.startswith("batch_invariant::"))
print(*mine)
x = torch.zeros(2, 16, dtype=torch.bfloat16)
i = torch.zeros(2, 1, dtype=torch.int32)
attention = (x, x, x, x, x, i, i[0], i[0].long(), 1.0, x)
calls = {"reference_gemm": (x, x), "skinny_gemm": (x, x), "rms_norm": (x, x[0], 1e-6), "decode_attention": attention}
for call, arguments in calls.items():
    if "batch_invariant::" + call in mine:
        try:
            getattr(torch.ops.batch_invariant, call)(*arguments)
        except NotImplementedError as error:
            print("refused", "'CPU' backend" in str(error))
"""
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(data)
        file.flush()
        done = subprocess.run([sys.executable, "-c", script, file.name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    operators, refused = done.stdout.splitlines()
    assert refused == "refused True" and all(word.startswith("batch_invariant::") for word in operators.split())


def test_other_bytes_than_the_recorded_are_refused() -> None:
    forged = replace(LIBRARIES[0], sha256="0" * 64)
    with pytest.raises(NativeError, match=r"sha256 is [0-9a-f]{64}, manifests/native\.toml says 0{64}\. Remedy"):
        build_library(COMPILER, forged, PINS, PATCHES, cache_folder())


def test_a_source_that_does_not_compile_is_named(tmp_path: Path) -> None:
    folders = _copied(LIBRARIES[0], tmp_path)
    with (folders[0] / "cpu" / "library.cpp").open("a") as file:
        file.write("int unused = ;\n")
    only = replace(LIBRARIES[0], objects=LIBRARIES[0].objects[-1:])
    with pytest.raises(NativeError, match=r"library\.cpp: the compiler says:\n(.|\n)*expected expression(.|\n)*Remedy"):
        compile_library(COMPILER, only, PINS, folders, cache_folder())


def test_a_kernel_that_does_not_compile_or_spills_is_named(tmp_path: Path) -> None:
    library = next(library for library in LIBRARIES if library.file == CUDA[0])
    folders = _copied(library, tmp_path)
    source = folders[-1] / "cuda" / "reference.cu"
    good = source.read_text()
    source.write_text(good + "int unused = ;\n")
    with pytest.raises(CudaError, match=r"reference\.cu: the CUDA compiler says:\n(.|\n)*expected an expression"):
        compile_library(COMPILER, library, PINS, folders, cache_folder())
    # An array that is indexed by what only the run knows lies in memory, not in registers.
    source.write_text(
        good + 'extern "C" __global__ void wanders(int* p) {\n'
        "  int held[64];\n  for (int i = 0; i < 64; ++i) held[i] = p[i] * i;\n"
        "  for (int i = 0; i < 64; ++i) p[i] = held[p[i] & 63];\n}\n"
    )
    machine = replace(library, images=tuple(replace(image, architecture="sm_90a") for image in library.images))
    with pytest.raises(CudaError, match="wanders: registers are spilled"):
        compile_library(COMPILER, machine, PINS, folders, cache_folder())
