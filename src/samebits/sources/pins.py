"""The pins: manifests/upstreams.toml as frozen dataclasses, the one place that knows the upstream versions.

Unknown keys, unknown bases and malformed hashes are errors here, so that nothing downstream needs to check them.
"""

import re
import tomllib
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from samebits.errors import SamebitsError

PROFILES = ("cpu", "gpu")
ROOT = Path(__file__).resolve().parents[3]  # the repository; samebits is installed in editable mode


class PinError(SamebitsError):
    """manifests/upstreams.toml says something that cannot be."""


@dataclass(frozen=True)
class Artefact:
    """A release file on the package index. `base` is "" for a file that is not patched."""

    name: str
    version: str
    file: str
    sha256: str
    profiles: tuple[str, ...]
    base: str = ""
    distribution: str = ""
    local: str = ""
    metadata: dict[str, str] = field(default_factory=dict)

    def fits(self, python: tuple[int, int]) -> bool:
        """Whether this wheel installs on CPython `python`, e.g. (3, 12)."""
        from packaging.utils import parse_wheel_filename

        tags = parse_wheel_filename(self.file)[3] if self.file.endswith(".whl") else frozenset()
        ours = {f"cp{python[0]}{python[1]}", f"py{python[0]}"}
        return any(tag.interpreter in ours or tag.abi == "abi3" for tag in tags)


@dataclass(frozen=True)
class Base:
    """A version that the patch series is proven on: a release, or (with `commit`) a checkout."""

    name: str
    ships: bool = False
    commit: str = ""


@dataclass(frozen=True)
class Upstream:
    """An upstream project. `packages`: the top folders of its wheels; `series`: N of the local version.

    title: of the pull request.
    """

    key: str
    repository: str
    path: str = ""
    branch: str = ""
    commit: str = ""
    title: str = ""
    packages: tuple[str, ...] = ()
    series: int = 0
    base: tuple[Base, ...] = ()
    artefact: tuple[Artefact, ...] = ()

    def artefacts_of(self, base: str) -> list[Artefact]:
        return [artefact for artefact in self.artefact if artefact.base == base]


@dataclass(frozen=True)
class Same:
    """Two release files with equal Python sources but for `unlike` and `absent` (names; a trailing / is a folder)."""

    file: str
    reference: str
    unlike: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


@dataclass(frozen=True)
class Commit:
    """Author and date of the commits that an exported series becomes."""

    author: str
    email: str
    date: str


@dataclass(frozen=True)
class Pins:
    """All of manifests/upstreams.toml."""

    commit: Commit
    upstreams: dict[str, Upstream]
    same: tuple[Same, ...]

    @cached_property
    def by_file(self) -> dict[str, Artefact]:
        return {artefact.file: artefact for upstream in self.upstreams.values() for artefact in upstream.artefact}

    def patched(self) -> list[Upstream]:
        """The upstreams that carry patches."""
        return [upstream for upstream in self.upstreams.values() if upstream.base]


def load_pins(path: Path = ROOT / "manifests" / "upstreams.toml") -> Pins:
    """Read and check the pins. Raises PinError."""
    raw = tomllib.loads(path.read_text("utf-8"))
    upstreams = {}
    for key, table in raw.get("upstream", {}).items():
        bases = tuple(_make(Base, base, f"{key} base") for base in table.pop("base", []))
        artefacts = tuple(_make(Artefact, artefact, f"{key} artefact") for artefact in table.pop("artefact", []))
        upstream = _make(Upstream, {"key": key, "base": bases, "artefact": artefacts, **table}, key)
        for artefact in artefacts:
            if not re.fullmatch("[0-9a-f]{64}", artefact.sha256):
                raise PinError(f"{path.name}: {artefact.file}: its sha256 is not 64 hexadecimal digits")
            if artefact.base and artefact.base not in {base.name for base in bases}:
                raise PinError(f"{path.name}: {artefact.file}: {key} has no base {artefact.base!r}")
            if not set(artefact.profiles) <= set(PROFILES):
                raise PinError(f"{path.name}: {artefact.file}: profiles are {', '.join(PROFILES)}")
        for base in bases:
            if bool(base.commit) == bool(upstream.artefacts_of(base.name)):
                raise PinError(f"{path.name}: {key} {base.name}: a base needs either a commit or artefacts")
        upstreams[key] = upstream
    same = tuple(_make(Same, table, "same") for table in raw.get("same", []))
    pins = Pins(_make(Commit, raw.get("commit", {}), "commit"), upstreams, same)
    for pair in same:
        for file in (pair.file, pair.reference):
            if file not in pins.by_file:
                raise PinError(f"{path.name}: [[same]] names {file}, which is no artefact")
    return pins


def _make[T](kind: type[T], table: dict[str, Any], what: str) -> T:
    unknown = set(table) - {f.name for f in fields(kind)}  # type: ignore[arg-type]
    if unknown:
        raise PinError(f"upstreams.toml: {what}: unknown {', '.join(sorted(unknown))}")
    try:
        return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in table.items()})
    except TypeError as error:
        raise PinError(f"upstreams.toml: {what}: {error}") from None
