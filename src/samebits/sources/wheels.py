"""Rebuilds a release wheel with our patch series in it: the same files, the series, a local version, a correct RECORD.

The bytes depend on the release file and the patches alone: sorted names, one fixed time, two fixed permissions, no
compression (whose output differs between zlib builds). The upstream's own version constants stay as they were released,
so that a patched tree is release plus series and nothing else; the local version stands in the distribution's metadata.
"""

import base64
import csv
import email.parser
import hashlib
import io
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samebits.errors import SamebitsError
from samebits.sources.fetch import cache_folder, fetch
from samebits.sources.native import libraries_of
from samebits.sources.patching import Read, plan_series
from samebits.sources.pins import Artefact, Pins, Upstream
from samebits.sources.records import FileChange, file_changes

TIME = (1980, 1, 1, 0, 0, 0)
PLAIN, EXECUTABLE = 0o100644, 0o100755


class WheelError(SamebitsError):
    """A release wheel is not what the rebuild expects. The message names file, place and remedy."""


@dataclass(frozen=True)
class Built:
    """A rebuilt wheel, and the files in it that the series touched."""

    path: Path
    distribution: str
    version: str
    sha256: str
    changes: tuple[FileChange, ...]


def read_wheel(wheel: zipfile.ZipFile) -> Read:
    """A `read` over a wheel's members; a path that does not exist gives None."""
    names = set(wheel.namelist())
    return lambda path: wheel.read(path) if path in names else None


def local_version(artefact: Artefact, upstream: Upstream) -> str:
    """E.g. 0.26.0+samebits.1, or 0.26.0+cpu.samebits.1 for a CPU build."""
    return f"{artefact.version}+{artefact.local + '.' if artefact.local else ''}samebits.{upstream.series}"


def build_wheel(
    source: Path,
    artefact: Artefact,
    upstream: Upstream,
    patches_root: Path,
    out: Path,
    libraries: Mapping[str, bytes] | None = None,
) -> Built:
    """Write the patched wheel of the release file `source` into the folder `out`, atomically.

    libraries: native libraries of ours, name in the wheel -> bytes.
    Raises PatchError or WheelError, and then has written nothing.
    """
    distribution, version = artefact.distribution or artefact.name, local_version(artefact, upstream)
    stem = distribution.replace("-", "_")
    with zipfile.ZipFile(source) as wheel:
        read = read_wheel(wheel)
        steps = plan_series(read, upstream.key, artefact.base, patches_root, upstream.packages)
        changed = {path: data for _, step in steps for path, data in step.items()}
        for name, data in (libraries or {}).items():
            if read(name) is not None or name in changed:
                raise WheelError(f"{source.name}: it has a {name} already. Remedy: give our library another name.")
            changed[name] = data
        old_info = f"{artefact.name.replace('-', '_')}-{artefact.version}.dist-info"
        new_info = f"{stem}-{version}.dist-info"
        metadata = read(f"{old_info}/METADATA")
        if metadata is None:
            raise WheelError(
                f"{source.name}: it has no {old_info}/METADATA. Remedy: correct name or version in the pins."
            )
        changed[f"{old_info}/METADATA"] = new_metadata(metadata, distribution, version, artefact)
        modes = {i.filename: EXECUTABLE if i.external_attr >> 16 & 0o111 else PLAIN for i in wheel.infolist()}
        names = {name for name in modes if not name.endswith("/")} - {f"{old_info}/RECORD"} | set(changed)

        def content(name: str) -> bytes:
            return changed[name] if name in changed else wheel.read(name)

        out.mkdir(parents=True, exist_ok=True)
        tags = artefact.file.removesuffix(".whl").split("-", 2)[2]
        path = out / f"{stem}-{version}-{tags}.whl"
        partial = path.with_suffix(f".partial-{os.getpid()}")
        try:
            renamed = {name: name.replace(f"{old_info}/", f"{new_info}/", 1) for name in names}
            _write(partial, sorted((renamed[n], n, modes.get(n, PLAIN)) for n in names), content, f"{new_info}/RECORD")
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        changes = tuple(file_changes(read, steps))
    with path.open("rb") as file:
        return Built(path, distribution, version, hashlib.file_digest(file, "sha256").hexdigest(), changes)


def pack_extension(
    artefact: Artefact,
    upstream: Upstream,
    tags: str,
    libraries: Mapping[str, bytes],
    texts: Mapping[str, bytes],
    out: Path,
) -> Built:
    """Write the wheel of a compiled extension into the folder `out`, atomically.

    tags: of the wheel's file name. libraries: name in the wheel -> bytes. texts: PKG-INFO and LICENSE of its sources.
    Raises WheelError.
    """
    stem, version = artefact.name.replace("-", "_"), local_version(artefact, upstream)
    info = f"{stem}-{version}.dist-info"
    wheel = f"Wheel-Version: 1.0\nGenerator: samebits\nRoot-Is-Purelib: false\nTag: {tags}\n"
    files = {
        **libraries,
        f"{info}/METADATA": new_metadata(texts["PKG-INFO"], artefact.name, version, artefact),
        f"{info}/WHEEL": wheel.encode(),
        f"{info}/licenses/LICENSE": texts["LICENSE"],
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{stem}-{version}-{tags}.whl"
    partial = path.with_suffix(f".partial-{os.getpid()}")
    members = sorted((name, name, EXECUTABLE if name in libraries else PLAIN) for name in files)
    try:
        _write(partial, members, files.__getitem__, f"{info}/RECORD")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return Built(path, artefact.name, version, hashlib.sha256(path.read_bytes()).hexdigest(), ())


def _write(path: Path, members: Sequence[tuple[str, str, int]], content: Callable[[str], bytes], record: str) -> None:
    """Write the archive: packages first, then the dist-info folder, whose RECORD comes last."""
    folder = record.partition("/")[0] + "/"
    rows = io.StringIO()
    table = csv.writer(rows, lineterminator="\n")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, old_name, mode in sorted(members, key=lambda m: (m[0].startswith(folder), m[0])):
            data = content(old_name)
            table.writerow((name, record_hash(data), len(data)))
            archive.writestr(_member(name, mode), data)
        table.writerow((record, "", ""))
        archive.writestr(_member(record, PLAIN), rows.getvalue())


def record_hash(data: bytes) -> str:
    """The hash of a file as RECORD writes it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _member(name: str, mode: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, TIME)
    info.create_system, info.external_attr = 3, mode << 16
    return info


def new_metadata(metadata: bytes, distribution: str, version: str, artefact: Artefact) -> bytes:
    """METADATA with Name, Version and the header lines of `artefact.metadata` replaced; the rest as it was."""
    headers, gap, description = metadata.decode("utf-8").replace("\r\n", "\n").partition("\n\n")
    said = email.parser.Parser().parsestr(headers)
    lines = headers.split("\n")
    replacements = {
        f"Name: {said['Name']}": f"Name: {distribution}",
        f"Version: {said['Version']}": f"Version: {version}",
        **artefact.metadata,
    }
    for old, new in replacements.items():
        if lines.count(old) != 1:
            raise WheelError(
                f"{artefact.file}: METADATA has {lines.count(old)} lines {old!r}, one is expected. "
                "Remedy: correct `metadata` in manifests/upstreams.toml."
            )
        lines = [new if line == old else line for line in lines if line != old or new]
    return ("\n".join(lines) + gap + description).encode("utf-8")


def check_record(path: Path) -> None:
    """Prove that a wheel's RECORD names each of its files with its sha256 and size. Raises WheelError."""
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith("/")]
        record = next((n for n in names if n.count("/") == 1 and n.endswith(".dist-info/RECORD")), None)
        if record is None or len(names) != len(set(names)):
            raise WheelError(f"{path.name}: it has no RECORD, or a file twice. Remedy: build it again.")
        rows = {name: said for name, *said in csv.reader(wheel.read(record).decode().splitlines())}
        for name in names:
            data = wheel.read(name)
            if rows.pop(name, None) != (["", ""] if name == record else [record_hash(data), str(len(data))]):
                raise WheelError(f"{path.name}: {name} is not as RECORD says. Remedy: build it again.")
    if rows:
        raise WheelError(f"{path.name}: RECORD names {sorted(rows)[0]}, which is missing. Remedy: build it again.")


def artefacts_of(pins: Pins, profile: str, python: tuple[int, int]) -> list[tuple[Upstream, Artefact]]:
    """The release wheels that a profile installs, patched, on CPython `python`."""
    return [
        (upstream, artefact)
        for upstream in pins.patched()
        for artefact in upstream.artefact
        if artefact.base and profile in artefact.profiles and artefact.fits(python)
    ]


def build_profile(
    pins: Pins, profile: str, python: tuple[int, int], patches_root: Path, out: Path, cache: Path | None = None
) -> Iterator[Built]:
    """Fetch and rebuild each wheel of a profile into `out`, which then holds these and their requirements.txt alone.

    requirements.txt has exact versions and hashes, for an install from `out` without an index; it is written last.
    Raises FetchError, PatchError or WheelError.
    """
    requirements = out / "requirements.txt"
    requirements.unlink(missing_ok=True)
    built = []
    for upstream, artefact in artefacts_of(pins, profile, python):
        libraries = libraries_of(pins, artefact, upstream.key, patches_root, cache or cache_folder())
        built.append(build_wheel(fetch(artefact, cache), artefact, upstream, patches_root, out, libraries))
        yield built[-1]
    for stale in {*out.glob("*.whl")} - {b.path for b in built}:
        stale.unlink()
    partial = requirements.with_suffix(f".partial-{os.getpid()}")
    partial.write_text("".join(f"{b.distribution}=={b.version} --hash=sha256:{b.sha256}\n" for b in built))
    os.replace(partial, requirements)
