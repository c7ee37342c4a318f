"""Layers: what one is made of (a key), and its bytes: a tar of fixed times and owners, compressed by zstd.

The bytes depend on the content alone: one time, numeric owner 0, permissions 644 or 755, entries in the order of their
writing, zstd in its multi-threaded mode, whose output does not depend on the number of threads. With each layer goes a
listing, one line a path, by which a difference can be named later.
"""

import base64
import configparser
import csv
import hashlib
import io
import posixpath
import re
import tarfile
import zipfile
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import quote

from samebits.image.plan import ImageError

LEVEL = 3
INTERPRETER = "/usr/bin/python3"
MEDIA_TYPE = "application/vnd.oci.image.layer.v1.tar+zstd"


@dataclass(frozen=True)
class Layer:
    """A layer before it is made. key: the hash of all that decides its bytes. write: puts its entries, and
    returns the files that it was made of, name -> sha256."""

    name: str
    key: str
    write: Callable[["Writer"], dict[str, str]]


@dataclass(frozen=True)
class Made:
    """A layer's blob: sha256 of the compressed bytes, of the tar and of the listing; both sizes in bytes.

    parts: the files that it was made of, name -> sha256.
    """

    name: str
    key: str
    digest: str
    diff_id: str
    listing: str
    size: int
    unpacked: int
    parts: dict[str, str]


def key_of(*facts: object) -> str:
    """One hash for facts whose repr says all of them, and for what writes layers: two packages and this file."""
    import installer
    import zstandard

    ours = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    tools = (ours, installer.__version__, zstandard.__version__, zstandard.ZSTD_VERSION)
    return hashlib.sha256(repr((tools, facts)).encode()).hexdigest()


@dataclass
class _Sink:
    """Counts and hashes what passes through."""

    target: Any
    size: int = 0
    sha256: Any = field(default_factory=hashlib.sha256)

    def write(self, data: bytes) -> int:
        self.size += len(data)
        self.sha256.update(data)
        self.target.write(data)
        return len(data)

    def tell(self) -> int:
        return self.size


class Writer:
    """Writes the entries of one layer. Raises ImageError for a path that comes twice with other content."""

    def __init__(self, tar: tarfile.TarFile, epoch: int, layer: str) -> None:
        self._tar, self._epoch, self._layer = tar, epoch, layer
        self._paths: dict[str, str] = {}

    def file(self, path: str, data: bytes, executable: bool = False) -> bytes:
        """A plain file at `path`, which is relative to the root; its folders come by themselves. Returns its sha256."""
        info, digest = tarfile.TarInfo(path), hashlib.sha256(data).digest()
        info.mode, info.size = 0o755 if executable else 0o644, len(data)
        if self._is_new(path, f"{digest.hex()} {info.mode:o}"):
            self.folder(posixpath.dirname(path))
            self._add(info, io.BytesIO(data))
        return digest

    def folder(self, path: str) -> None:
        """A folder and those above it."""
        if path and path not in self._paths:
            self.folder(posixpath.dirname(path))
            info = tarfile.TarInfo(path)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            self._paths[path] = what_is(info, b"")
            self._add(info)

    def entry(self, path: str, info: tarfile.TarInfo, data: bytes) -> None:
        """An entry of another tar, with its type, link and permissions, but none of its times and owners' names."""
        clean = tarfile.TarInfo(path)
        clean.type, clean.mode, clean.linkname = info.type, info.mode, info.linkname
        clean.uid, clean.gid, clean.size = info.uid, info.gid, len(data)
        if self._is_new(path, what_is(info, data)):
            self._add(clean, io.BytesIO(data))

    def listing(self) -> str:
        """A line a path: what it is (a file's sha256), its permissions, its name."""
        return "".join(f"{what} {path}\n" for path, what in sorted(self._paths.items()))

    def _is_new(self, path: str, what: str) -> bool:
        if self._paths.get(path, what) != what:
            raise ImageError(
                f"layer {self._layer}: {path} comes twice, and not the same. Remedy: leave one of the packages out."
            )
        is_new = path not in self._paths
        self._paths[path] = what
        return is_new

    def _add(self, info: tarfile.TarInfo, data: BinaryIO | None = None) -> None:
        info.mtime = self._epoch
        self._tar.addfile(info, data)


def what_is(info: tarfile.TarInfo, data: bytes) -> str:
    """What a listing says of an entry: a file's sha256, "folder", "->TARGET" or "=TARGET", and its permissions."""
    links = {tarfile.SYMTYPE: "->", tarfile.LNKTYPE: "="}
    if info.type in links:
        what = links[info.type] + quote(info.linkname)
    else:
        what = "folder" if info.isdir() else hashlib.sha256(data).hexdigest()
    return f"{what} {info.mode:o}"


def make(layer: Layer, epoch: int, blob: Path, listing: Path) -> Made:
    """Write the layer's blob and listing to these paths."""
    import zstandard

    with blob.open("wb") as file:
        outer = _Sink(file)
        compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True, write_content_size=False, threads=2)
        with compressor.stream_writer(cast(BinaryIO, outer), closefd=False) as stream:
            inner = _Sink(stream)
            with tarfile.open(fileobj=cast(BinaryIO, inner), mode="w", format=tarfile.PAX_FORMAT) as tar:
                writer = Writer(tar, epoch, layer.name)
                parts = layer.write(writer)
    text = writer.listing().encode()
    listing.write_bytes(text)
    digests = (outer.sha256.hexdigest(), inner.sha256.hexdigest(), hashlib.sha256(text).hexdigest())
    return Made(layer.name, layer.key, *digests, outer.size, inner.size, parts)


def write_wheel(writer: Writer, path: Path, site: str, stray: Collection[str] = ()) -> None:
    """Install a wheel into the layer as pip would, without bytecode and the files that are named in `stray`.

    Raises ImageError for a wheel that is none.
    """
    from installer import install
    from installer.exceptions import InstallerError
    from installer.sources import WheelFile

    try:
        with WheelFile.open(path) as source:
            install(
                source, cast(Any, _Destination(writer, site, stray)), additional_metadata={"INSTALLER": b"samebits\n"}
            )
    except (InstallerError, zipfile.BadZipFile, configparser.Error) as error:
        raise ImageError(f"{path.name}: {error}. Remedy: lock another version.") from error


class _Destination:
    """Where `installer` puts a wheel's files: into a layer. Implements installer's WheelDestination."""

    def __init__(self, writer: Writer, site: str, stray: Collection[str]) -> None:
        self._writer, self._site, self._stray = writer, site, stray
        prefix = site.partition("/lib/")[0]
        self._schemes = {"purelib": site, "platlib": site, "scripts": f"{prefix}/bin", "data": prefix}
        self._schemes["headers"] = f"{prefix}/include"

    def write_script(self, name: str, module: str, attr: str, section: Any) -> Any:
        from installer.records import RecordEntry
        from installer.scripts import Script

        name, data = Script(name, module, attr, section).generate(INTERPRETER, "posix")
        self._writer.file(f"{self._schemes['scripts']}/{name}", data, True)
        return RecordEntry(name, None, len(data))

    def write_file(self, scheme: str, path: Any, stream: BinaryIO, is_executable: bool) -> Any:
        from installer.records import Hash, RecordEntry
        from installer.utils import fix_shebang

        if scheme == "scripts":
            with fix_shebang(stream, INTERPRETER) as fixed:
                data = fixed.read()
        else:
            data = stream.read()
        if str(path) in self._stray:
            return RecordEntry(str(path), None, None)
        digest = self._writer.file(f"{self._schemes[scheme]}/{path}", data, is_executable or scheme == "scripts")
        return RecordEntry(str(path), Hash("sha256", base64.urlsafe_b64encode(digest).rstrip(b"=").decode()), len(data))

    def finalize_installation(self, scheme: str, record_file_path: str, records: Iterable[tuple[str, Any]]) -> None:
        rows = []
        for of, entry in records:
            if entry.path in self._stray:
                continue
            path = posixpath.relpath(f"{self._schemes[of]}/{entry.path}", self._site)
            said = f"sha256={entry.hash_.value}" if entry.hash_ else ""
            rows.append((path, said, "" if entry.size is None else str(entry.size)))
        rows.append((record_file_path, "", ""))
        self._writer.file(f"{self._site}/{record_file_path}", _csv(rows))


def _csv(rows: Iterable[tuple[str, ...]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(sorted(rows))
    return text.getvalue().encode()


def write_tar(writer: Writer, path: Path, emptied: Collection[str], dropped: str) -> None:
    """Copy another tool's tar into the layer. emptied: files of which the names stay; dropped: a pattern of paths."""
    with tarfile.open(path) as tar:
        for info in tar:
            name = posixpath.normpath(info.name).lstrip("/")
            if name == "." or re.match(dropped, name):
                continue
            stream = tar.extractfile(info) if info.isreg() and name not in emptied else None
            if info.islnk():
                info.linkname = posixpath.normpath(info.linkname)
            writer.entry(name, info, stream.read() if stream else b"")
