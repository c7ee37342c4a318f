"""Compiles CUDA sources to what a GPU runs, with NVIDIA's runtime compiler from its pinned wheel.

It is nvcc's own compiler as a library: it needs neither a GPU nor a compiler for the host, reads no file but those it
is given, and so its result depends on nothing of this machine.
"""

import ctypes
import re
from pathlib import Path

from samebits.errors import SamebitsError


class CudaError(SamebitsError):
    """A source does not compile, or a kernel spills registers. The message holds the compiler's words and a remedy."""


def compile_image(wheel_folder: Path, name: str, sources: dict[str, bytes], flags: tuple[str, ...]) -> bytes:
    """The cubin (flag --gpu-architecture=sm_*) or PTX (compute_*) of source `name`.

    `wheel_folder`: the unpacked nvidia-cuda-nvrtc wheel. `sources`: every file by its name in an #include.
    Raises CudaError.
    """
    folder = wheel_folder / "nvidia" / "cu13" / "lib"
    for library in sorted(folder.glob("libnvrtc-builtins.so.*")):  # the compiler asks for it by name alone
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(str(next(folder.glob("libnvrtc.so.*"))))
    program = ctypes.c_void_p()
    headers = {key: value for key, value in sources.items() if key != name}
    _check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program),
            sources[name],
            name.encode(),
            len(headers),
            _strings(list(headers.values())),
            _strings([key.encode() for key in headers]),
        ),
        name,
    )
    failed = nvrtc.nvrtcCompileProgram(program, len(flags), _strings([flag.encode() for flag in flags]))
    log = _result(nvrtc, program, "ProgramLog").rstrip(b"\0").decode()
    if failed:
        raise CudaError(f"{name}: the CUDA compiler says:\n{log[-3000:]}\nRemedy: correct the source or its flags.")
    if spilled := spills(log):
        raise CudaError(
            f"{name}: {', '.join(spilled)}: registers are spilled to memory. Remedy: smaller tiles, or fewer threads."
        )
    machine_code = any(flag.startswith("--gpu-architecture=sm_") for flag in flags)
    image = _result(nvrtc, program, "CUBIN" if machine_code else "PTX")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return image


def spills(log: str) -> list[str]:
    """The kernels that a ptxas report (--ptxas-options=-v) says to spill registers or to use local memory."""
    said = re.findall(
        r"Function properties for (\S+)\s+ptxas[ .:]+(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads",
        log,
    )
    return [name for name, *numbers in said if any(int(number) for number in numbers)]


def _strings(values: list[bytes]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(values))(*values)


def _result(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer), what)
    return buffer.raw


def _check(error: int, what: str) -> None:
    if error:
        raise CudaError(f"{what}: the CUDA compiler returned error {error}. Remedy: report it, with its source.")
