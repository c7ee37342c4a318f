"""Compiles the native libraries of patched wheels: pinned compiler, flags in manifests/native.toml, one set of bytes.

The compiler is clang in the ziglang wheel, with the C library's headers and names in it: the bytes depend on neither
the machine's compiler nor its libraries, nor on an installed torch. They are compared with the recorded sha256.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

from samebits.errors import SamebitsError
from samebits.sources.fetch import fetch
from samebits.sources.pins import ROOT, Artefact, Pins


class NativeError(SamebitsError):
    """A library cannot be built, or is not the recorded one. The message names file, cause and remedy."""


@dataclass(frozen=True)
class Compiler:
    """The pinned compiler: its release file, the target, and the flags of every object."""

    artefact: str
    target: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Object:
    """One compilation: a source file of the library's folder and its own flags, of which -mcpu comes first."""

    source: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Library:
    """A shared library: where it lies in which wheel (`upstream`, `local`), and its folder below patches/.

    `needs`: the libraries of others that it names, which are loaded already when it is.
    """

    upstream: str
    local: str
    file: str
    sources: str
    sha256: str
    needs: tuple[str, ...]
    objects: tuple[Object, ...]


def load_native(path: Path = ROOT / "manifests" / "native.toml") -> tuple[Compiler, tuple[Library, ...]]:
    """Read manifests/native.toml."""
    raw = tomllib.loads(path.read_text("utf-8"))
    said = raw["compiler"]
    compiler = Compiler(said["artefact"], said["target"], tuple(said["flags"]))
    libraries = []
    for table in raw["library"]:
        objects = tuple(Object(o["source"], tuple(o["flags"])) for o in table.pop("object"))
        libraries.append(Library(**{**table, "needs": tuple(table["needs"])}, objects=objects))
    return compiler, tuple(libraries)


def libraries_of(pins: Pins, artefact: Artefact, upstream: str, patches: Path, cache: Path) -> dict[str, bytes]:
    """The libraries that the patched wheel of `artefact` carries: name in the wheel -> bytes. Raises NativeError."""
    compiler, libraries = load_native()
    return {
        library.file: build_library(compiler, library, pins, patches, cache)
        for library in libraries
        if (library.upstream, library.local) == (upstream, artefact.local)
    }


def build_library(compiler: Compiler, library: Library, pins: Pins, patches: Path, cache: Path) -> bytes:
    """The bytes of a library, compiled unless `cache` has it from the same sources, flags and compiler.

    Raises NativeError: the compiler's error, or a sha256 other than the recorded one.
    """
    folder = patches / library.sources
    kept = cache / "native" / f"{_key(compiler, library, pins, folder)}.so"
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.is_file():
            data = compile_library(compiler, library, pins, folder, cache)
            partial = kept.with_suffix(f".partial-{os.getpid()}")
            partial.write_bytes(data)
            os.replace(partial, kept)
    data = kept.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != library.sha256:
        raise NativeError(
            f"{library.file}: its sha256 is {digest}, manifests/native.toml says {library.sha256 or 'nothing'}. "
            "Remedy: if sources, flags or compiler were changed, record the new one; else find out what differs here."
        )
    return data


def compile_library(compiler: Compiler, library: Library, pins: Pins, folder: Path, cache: Path) -> bytes:
    """Compile and link the sources in `folder`; nothing of where it happens is in the result. Raises NativeError."""
    zig = _unpacked(pins.by_file[compiler.artefact], cache) / "ziglang" / "zig"
    with tempfile.TemporaryDirectory(prefix="samebits-native-") as scratch:
        # Relative names only: a name that a message or an assertion keeps would be one of this machine.
        shutil.copytree(folder, Path(scratch) / "source")
        (Path(scratch) / "nothing.c").touch()
        objects = []
        for number, item in enumerate(library.objects):
            objects.append(f"{number}.o")
            flags = ["-target", compiler.target, *compiler.flags, *item.flags]
            _run([str(zig), "cc", *flags, "-c", f"source/{item.source}", "-o", objects[-1]], scratch, cache)
        link = [str(zig), "cc", "-target", compiler.target, "-shared", "-s"]
        for name in library.needs:  # of such a library the name alone is kept: an empty one serves
            _run([*link, f"-Wl,-soname,{name}", "nothing.c", "-o", name], scratch, cache)
        _run(
            [*link, *objects, "-Wl,--no-as-needed", *library.needs, "-Wl,-z,undefs", "-o", "library.so"], scratch, cache
        )
        return (Path(scratch) / "library.so").read_bytes()


def _key(compiler: Compiler, library: Library, pins: Pins, folder: Path) -> str:
    """What a library is made of, as one hash."""
    made_of = (compiler, library.objects, library.needs, pins.by_file[compiler.artefact].sha256)
    digest = hashlib.sha256(repr(made_of).encode())
    for path in sorted(folder.iterdir()):
        digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:24]


def _unpacked(artefact: Artefact, cache: Path) -> Path:
    """The compiler's folder, unpacked once from its verified wheel."""
    folder = cache / "compiler" / artefact.sha256[:24]
    if not folder.is_dir():
        wheel = fetch(artefact, cache)
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".partial-"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial)
        (partial / "ziglang" / "zig").chmod(0o755)
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
