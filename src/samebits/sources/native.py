"""Compiles the native libraries of patched wheels: pinned compilers, flags in manifests/native.toml, one set of bytes.

The compiler is clang in the ziglang wheel, with the C library's headers and names in it: the bytes depend on neither
the machine's compiler nor its libraries, nor on an installed torch. CUDA kernels are compiled first, and lie in the
library as data. The bytes are compared with the recorded sha256.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.errors import SamebitsError
from samebits.sources import nvrtc
from samebits.sources.fetch import fetch
from samebits.sources.pins import ROOT, Artefact, Pins


class NativeError(SamebitsError):
    """A library cannot be built, or is not the recorded one. The message names file, cause and remedy."""


@dataclass(frozen=True)
class Compiler:
    """The pinned compilers: their release files, the target, and the flags of every object and of every image."""

    artefact: str
    target: str
    flags: tuple[str, ...]
    cuda_artefact: str
    cuda_flags: tuple[str, ...]


@dataclass(frozen=True)
class Object:
    """One compilation: a source file among the library's and its own flags, of which -mcpu comes first."""

    source: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Image:
    """CUDA kernels, compiled before the objects, which embed `file` from beside `source`."""

    source: str
    architecture: str

    @property
    def file(self) -> str:
        return str(Path(self.source).with_suffix(".cubin" if self.architecture.startswith("sm_") else ".ptx"))


@dataclass(frozen=True)
class Library:
    """A shared library: where it lies in which wheel (`upstream`, `local`: any of them), made of which patches.

    `sources`: folders below patches/ that are laid over one another. `needs`: the libraries of others that it names,
    which are loaded already when it is.
    """

    upstream: str
    local: str
    file: str
    sources: tuple[str, ...]
    sha256: str
    needs: tuple[str, ...]
    objects: tuple[Object, ...]
    images: tuple[Image, ...] = ()


def load_native(path: Path = ROOT / "manifests" / "native.toml") -> tuple[Compiler, tuple[Library, ...]]:
    """Read manifests/native.toml."""
    raw = tomllib.loads(path.read_text("utf-8"))
    said: dict[str, Any] = raw["compiler"]
    compiler = Compiler(**{**said, "flags": tuple(said["flags"]), "cuda_flags": tuple(said["cuda_flags"])})
    libraries = []
    for table in raw["library"]:
        objects = tuple(Object(o["source"], tuple(o["flags"])) for o in table.pop("object"))
        images = tuple(Image(**image) for image in table.pop("image", []))
        lists = {key: tuple(table[key]) for key in ("sources", "needs")}
        libraries.append(Library(**{**table, **lists}, objects=objects, images=images))
    return compiler, tuple(libraries)


def libraries_of(pins: Pins, artefact: Artefact, upstream: str, patches: Path, cache: Path) -> dict[str, bytes]:
    """The libraries that the patched wheel of `artefact` carries: name in the wheel -> bytes. Raises NativeError.

    A library comes with the last of its patches: a series that ends before has no part of it.
    """
    compiler, libraries = load_native()
    return {
        library.file: build_library(compiler, library, pins, patches, cache)
        for library in libraries
        if (library.upstream, library.local) == (upstream, artefact.local)
        and all((patches / folder).is_dir() for folder in library.sources)
    }


def build_library(compiler: Compiler, library: Library, pins: Pins, patches: Path, cache: Path) -> bytes:
    """The bytes of a library, compiled unless `cache` has it from the same sources, flags and compiler.

    Raises NativeError: the compiler's error, or a sha256 other than the recorded one.
    """
    folders = [patches / name for name in library.sources]
    key = _key(compiler, library, pins, folders)
    data = compiled_once(cache, key, lambda: compile_library(compiler, library, pins, folders, cache)).read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != library.sha256:
        raise NativeError(
            f"{library.file}: its sha256 is {digest}, manifests/native.toml says {library.sha256 or 'nothing'}. "
            "Remedy: if sources, flags or compiler were changed, record the new one; else find out what differs here."
        )
    return data


def compiled_once(cache: Path, key: str, compile_it: Callable[[], bytes]) -> Path:
    """The library that the cache has under a key; compiled now, by one process alone, if it has none."""
    kept = cache / "native" / f"{key}.so"
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.is_file():
            data = compile_it()
            partial = kept.with_suffix(f".partial-{os.getpid()}")
            partial.write_bytes(data)
            os.replace(partial, kept)
    return kept


def compile_library(compiler: Compiler, library: Library, pins: Pins, folders: list[Path], cache: Path) -> bytes:
    """Compile and link the sources in `folders`; nothing of where it happens is in the result.

    Raises NativeError, CudaError.
    """
    zig = _unpacked(pins.by_file[compiler.artefact], cache) / "ziglang" / "zig"
    zig.chmod(0o755)
    with tempfile.TemporaryDirectory(prefix="samebits-native-") as scratch:
        # Relative names only: a name that a message or an assertion keeps would be one of this machine.
        for folder in folders:
            shutil.copytree(folder, Path(scratch) / "source", dirs_exist_ok=True)
        (Path(scratch) / "nothing.c").touch()
        for image in library.images:
            source = Path(scratch) / "source" / image.source
            beside = {path.name: path.read_bytes() for path in source.parent.iterdir() if path.suffix in (".cu", ".h")}
            flags = (f"--gpu-architecture={image.architecture}", *compiler.cuda_flags)
            wheel = _unpacked(pins.by_file[compiler.cuda_artefact], cache)
            made = nvrtc.compile_image(wheel, source.name, beside, flags)
            (Path(scratch) / "source" / image.file).write_bytes(made)
        objects = []
        for number, item in enumerate(library.objects):
            objects.append(f"{number}.o")
            options = ["-target", compiler.target, *compiler.flags, *item.flags]
            _run([str(zig), "cc", *options, "-c", f"source/{item.source}", "-o", objects[-1]], scratch, cache)
        link = [str(zig), "cc", "-target", compiler.target, "-shared", "-s"]
        for name in library.needs:  # of such a library the name alone is kept: an empty one serves
            _run([*link, f"-Wl,-soname,{name}", "nothing.c", "-o", name], scratch, cache)
        _run(
            [*link, *objects, "-Wl,--no-as-needed", *library.needs, "-Wl,-z,undefs", "-o", "library.so"], scratch, cache
        )
        return (Path(scratch) / "library.so").read_bytes()


def _key(compiler: Compiler, library: Library, pins: Pins, folders: list[Path]) -> str:
    """What a library is made of, as one hash."""
    compilers = [pins.by_file[name].sha256 for name in (compiler.artefact, compiler.cuda_artefact)]
    digest = hashlib.sha256(repr((compiler, library.objects, library.images, library.needs, compilers)).encode())
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                name = path.relative_to(folder).as_posix()
                digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:24]


def _unpacked(artefact: Artefact, cache: Path) -> Path:
    """A compiler's folder, unpacked once from its verified wheel."""
    folder = cache / "compiler" / artefact.sha256[:24]
    if not folder.is_dir():
        wheel = fetch(artefact, cache)
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".partial-"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial)
        try:
            partial.rename(folder)
        except OSError:  # another process was quicker
            shutil.rmtree(partial)
    return folder


def _run(command: list[str], folder: str, cache: Path) -> None:
    environment = {"PATH": os.environ.get("PATH", ""), "HOME": folder, "LC_ALL": "C"}
    environment |= {f"ZIG_{kind}_CACHE_DIR": str(cache / "compiler" / "cache") for kind in ("GLOBAL", "LOCAL")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise NativeError(
            f"{command[-3] if '-c' in command else command[-1]}: the compiler says:\n{done.stderr[-3000:]}\n"
            "Remedy: correct the source, or its flags in manifests/native.toml."
        )
