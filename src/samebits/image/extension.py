"""Transformer Engine's torch extension: released as C++ alone, compiled by the image's own g++ in its own base layer.

The compiler, the C and C++ libraries and Python's headers are the base's, locked by image/debian.lock; torch's and
CUDA's headers come out of the locked wheels, the sources out of the pinned archive. All of it lies in a folder that the
compiler takes for the root: no path, library or setting of the machine is in the result, whose sha256 is recorded.
There is no device code in it: that is in the released wheel of Transformer Engine's core.
"""

import dataclasses
import hashlib
import os
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, cast

from samebits.image.layers import key_of
from samebits.image.plan import Extension, Image, ImageError, Wheel
from samebits.image.store import fetch_all, verified
from samebits.sources.fetch import fetch
from samebits.sources.native import compiled_once
from samebits.sources.pins import Artefact, Pins
from samebits.sources.wheels import Built, pack_extension

BUILD = "build"  # the folder in the root; relative paths alone reach the compiler


def extension_key(image: Image, pins: Pins, wheels: Sequence[Wheel], base: str) -> str:
    """The hash of all that decides the extension's bytes. base: the key of the base layer."""
    said = image.extension
    made = dataclasses.replace(said, sha256="")
    return key_of(
        "extension", made, image.python, base, pins.by_file[said.artefact].sha256, tuple(headers_of(said, wheels))
    )


def headers_of(extension: Extension, wheels: Sequence[Wheel]) -> list[Wheel]:
    """The locked wheels whose headers are included. Raises ImageError for one that is not locked."""
    found = [wheel for wheel in wheels if wheel.name in extension.wheels]
    if lost := sorted(set(extension.wheels) - {wheel.name for wheel in found}):
        raise ImageError(f"image.toml: extension: {lost[0]} is not locked. Remedy: correct `wheels`, or lock it.")
    return found


def build_extension(
    image: Image, pins: Pins, wheels: Sequence[Wheel], base: str, blob: Callable[[], Path], out: Path, cache: Path
) -> Built:
    """The extension's wheel, written into `out`; the library is compiled unless the cache has it from the same things.

    base: the key of the base layer. blob: gives the layer's blob; asked for if there is something to compile.
    Raises ImageError: the compiler's error, or a sha256 other than the recorded one.
    """
    said = image.extension
    artefact, upstream = pins.by_file[said.artefact], pins.upstreams[said.upstream]
    key = extension_key(image, pins, wheels, base)[:24]
    kept = compiled_once(
        cache, key, lambda: compile_extension(image, artefact, headers_of(said, wheels), blob(), cache)
    )
    library = kept.read_bytes()
    digest = hashlib.sha256(library).hexdigest()
    if digest != said.sha256:
        raise ImageError(
            f"{said.file(image.python)}: its sha256 is {digest}, image.toml says {said.sha256 or 'nothing'}. "
            "Remedy: if sources, headers, flags or base were changed, record the new one; "
            f"else remove {kept}, and find out what differs here."
        )
    texts = _texts(fetch(artefact, cache), ("PKG-INFO", "LICENSE"))
    abi = f"cp{image.python.replace('.', '')}"
    name = said.file(image.python)
    return pack_extension(artefact, upstream, f"{abi}-{abi}-linux_x86_64", {name: library}, texts, out)


def compile_extension(image: Image, artefact: Artefact, headers: Sequence[Wheel], blob: Path, cache: Path) -> bytes:
    """Compile and link every C++ file of the archive. blob: of the base layer. Raises ImageError."""
    said = image.extension
    fetch_all(image, headers, cache)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".extension-") as scratch:
        root = Path(scratch) / "root"
        _unpack_base(blob, root)
        build = root / BUILD
        build.mkdir()
        for wheel in headers:
            with zipfile.ZipFile(verified(cache, wheel)) as archive:
                archive.extractall(build, [name for name in archive.namelist() if "/include/" in name])
        with tarfile.open(fetch(artefact, cache)) as tar:
            tar.extractall(build, filter="data")
        (folder,) = build.glob(f"{artefact.name.replace('-', '_')}-*")
        folder.rename(build / "source")
        for name in said.needs:  # of such a library the name alone is kept: an empty one serves
            (build / "nothing.cpp").touch()
            _run(root, ["g++", "-shared", f"-Wl,-soname,{name}", "nothing.cpp", "-o", name])
        sources = sorted(path.relative_to(build).as_posix() for path in (build / "source" / "csrc").rglob("*.cpp"))
        options = [*said.flags, *(f"-isystem{folder}" for folder in said.include)]
        objects = [f"{number}.o" for number in range(len(sources))]

        def compile_one(source: str, target: str) -> None:
            _run(root, ["g++", *options, f"-frandom-seed={source}", "-c", source, "-o", target])

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, sources, objects))
        link = ["g++", "-shared", "-s", "-Wl,--build-id=none", *objects, "-Wl,--no-as-needed", *said.needs]
        _run(root, [*link, "-o", "library.so"])
        return (build / "library.so").read_bytes()


def _unpack_base(blob: Path, root: Path) -> None:
    import zstandard

    root.mkdir()
    with (
        blob.open("rb") as file,
        zstandard.ZstdDecompressor().stream_reader(file) as plain,
        tarfile.open(fileobj=cast(BinaryIO, plain), mode="r|") as tar,
    ):
        tar.extractall(root, filter="tar")


def _run(root: Path, command: Sequence[str]) -> None:
    """Run a command in /build below `root`, by chroot: as root, or in a user namespace of its own."""
    within = ["chroot", str(root), "/bin/sh", "-c", f'cd /{BUILD} && exec "$@"', "sh", *command]
    prefix = [] if os.geteuid() == 0 else ["unshare", "--map-root-user"]
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "TMPDIR": "/tmp"}
    done = subprocess.run(
        [*prefix, *within], env=environment, capture_output=True, text=True, umask=0o022, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise ImageError(
            f"{command[-3] if '-c' in command else command[-1]}: the compiler says:\n{done.stderr[-3000:]}\n"
            "Remedy: correct `extension` in image.toml; if chroot is refused, run as root or allow user namespaces."
        )


def _texts(archive: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Files of the top folder of a source archive. Raises ImageError for one that it lacks."""
    found = {}
    with tarfile.open(archive) as tar:
        for info in tar:
            name = info.name.partition("/")[2]
            stream = tar.extractfile(info) if name in names and info.isreg() else None
            if stream:
                found[name] = stream.read()
    if lost := sorted(set(names) - set(found)):
        raise ImageError(f"{archive.name}: it has no {lost[0]}. Remedy: correct its pin.")
    return found
