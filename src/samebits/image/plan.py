"""What goes into an image: image/image.toml and the locks beside it, as frozen dataclasses.

A lock has one line a file: its name, version and sha256, and no address. `check` holds the wheels of an image against
manifests/locks, which the environment of a checkout is made from: an image takes from it, and adds nothing.
"""

import fnmatch
import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from samebits.errors import SamebitsError
from samebits.sources.pins import PROFILES

AGAIN = "samebits image lock"


class ImageError(SamebitsError):
    """An image that cannot be composed, or is not what it is said to be. The message names thing, place and remedy."""


@dataclass(frozen=True)
class Extension:
    """A C++ extension of an upstream that was released as sources alone (`artefact`), and how it is compiled.

    name: its place in the wheel, up to the Python that it is for. sha256: of the result. wheels: the locked ones whose
    headers it includes. include: their folders, and those of the sources. needs: the libraries that it names.
    """

    upstream: str
    artefact: str
    name: str
    sha256: str
    wheels: tuple[str, ...]
    include: tuple[str, ...]
    needs: tuple[str, ...]
    flags: tuple[str, ...]

    def file(self, python: str) -> str:
        """The library's place in the wheel for a Python, e.g. "3.13"."""
        return f"{self.name}.cpython-{python.replace('.', '')}-x86_64-linux-gnu.so"


@dataclass(frozen=True)
class Image:
    """image/image.toml. `lacking`: per profile what keeps it from being a delivery, "" if nothing does."""

    epoch: int
    suite: str
    python: str
    glibc: int
    packages: tuple[str, ...]
    leave_out: tuple[str, ...]
    stray: tuple[str, ...]
    torch: tuple[str, ...]
    files: tuple[str, ...]
    environment: tuple[str, ...]
    command: tuple[str, ...]
    extension: Extension
    lacking: dict[str, str]

    @property
    def site(self) -> str:
        """Where Debian's Python finds what was installed beside Debian's packages; without a leading slash."""
        return f"usr/local/lib/python{self.python}/dist-packages"

    @property
    def python_version(self) -> tuple[int, int]:
        major, minor = self.python.split(".")
        return int(major), int(minor)

    def layer_of(self, name: str) -> str:
        """The layer of a locked wheel, by the name of its distribution."""
        return "torch" if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.torch) else "dependencies"


@dataclass(frozen=True, order=True)
class Deb:
    """A locked Debian package."""

    name: str
    version: str
    architecture: str
    sha256: str

    @property
    def file(self) -> str:
        """As apt names it on disk."""
        return f"{self.name}_{self.version.replace(':', '%3a')}_{self.architecture}.deb"


@dataclass(frozen=True, order=True)
class Wheel:
    """A locked release file: a wheel, or a source archive that becomes one."""

    name: str
    version: str
    sha256: str
    file: str


def load_image(root: Path) -> Image:
    """Read image/image.toml below `root`, a repository. Raises ImageError."""
    path = root / "image" / "image.toml"
    said = tomllib.loads(path.read_text("utf-8"))
    known = {field.name for field in fields(Image)}
    if wrong := sorted(known ^ set(said)):
        raise ImageError(f"{path.name}: {', '.join(wrong)}: missing or unknown. Remedy: correct it.")
    if set(said["lacking"]) != set(PROFILES):
        raise ImageError(f"{path.name}: lacking has other profiles than {', '.join(PROFILES)}. Remedy: correct it.")
    extension = said.pop("extension")
    if wrong := sorted({field.name for field in fields(Extension)} ^ set(extension)):
        raise ImageError(f"{path.name}: extension: {', '.join(wrong)}: missing or unknown. Remedy: correct it.")
    return Image(extension=Extension(**_tuples(extension)), **_tuples(said))


def _tuples(table: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


def load_debs(root: Path) -> list[Deb]:
    """The locked Debian packages. Raises ImageError for a line that is none."""
    return sorted(Deb(*words) for words in _lines(root / "image" / "debian.lock", 4, 3))


def load_wheels(root: Path, profile: str) -> list[Wheel]:
    """The locked release files of a profile, without the upstreams that are patched. Raises ImageError."""
    return sorted(Wheel(*words) for words in _lines(root / "image" / f"{profile}.lock", 4, 2))


def write_lock(path: Path, rows: list[tuple[str, ...]], what: str) -> None:
    """Write a lock: sorted, one line a file."""
    lines = [f"# {what}\n", f"# Made by `{AGAIN}`.\n", *(" ".join(row) + "\n" for row in sorted(rows))]
    path.write_text("".join(lines))


def _lines(path: Path, count: int, digest: int) -> list[list[str]]:
    if not path.is_file():
        raise ImageError(f"{path.name} does not exist. Remedy: `{AGAIN}`.")
    rows = [line.split() for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    for row in rows:
        if len(row) != count or not re.fullmatch("[0-9a-f]{64}", row[digest]):
            raise ImageError(f"{path.name}: {' '.join(row)[:120]!r} is no locked file. Remedy: `{AGAIN}`.")
    names = [row[0] for row in rows]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ImageError(f"{path.name}: {twice[0]} is locked twice. Remedy: `{AGAIN}`.")
    return rows


def locked_packages(root: Path, profile: str) -> dict[str, tuple[str, frozenset[str]]]:
    """manifests/locks/PROFILE.txt: name -> (version, sha256 of each of its release files)."""
    text = (root / "manifests" / "locks" / f"{profile}.txt").read_text("utf-8")
    found = re.findall(
        r"^([a-z0-9._-]+)==([^ ;]+)((?: --hash=sha256:[0-9a-f]{64})+)$", text.replace(" \\\n   ", ""), re.M
    )
    return {name: (version, frozenset(re.findall("sha256:([0-9a-f]{64})", hashes))) for name, version, hashes in found}


def check(root: Path, profile: str, image: Image, wheels: list[Wheel]) -> None:
    """Refuse an image's lock that has other files than manifests/locks allows, or lacks one. Raises ImageError."""
    allowed, lock = locked_packages(root, profile), f"image/{profile}.lock"
    for wheel in wheels:
        version, hashes = allowed.get(wheel.name, ("", frozenset()))
        if wheel.version != version or wheel.sha256 not in hashes or wheel.name in image.leave_out:
            what = f"manifests/locks/{profile}.txt has {version or 'no such package'}"
            if wheel.version == version:
                what = "its sha256 is not in manifests/locks" if wheel.name not in image.leave_out else "it is left out"
            raise ImageError(f"{lock}: {wheel.name} {wheel.version}: {what}. Remedy: `{AGAIN}`.")
    if lost := sorted(set(allowed) - {wheel.name for wheel in wheels} - set(image.leave_out)):
        raise ImageError(f"{lock}: {lost[0]} of manifests/locks/{profile}.txt is missing. Remedy: `{AGAIN}`.")
