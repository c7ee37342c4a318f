"""The record of what each patch series does to each base: sha256 before and after of every touched file, committed.

`verify` proves a base against its record: drift upstream, in the patches or in the engine becomes an error that names
the file. A record also holds the hash of the patch folder, so that one of a base not at hand is known to be stale.
"""

import hashlib
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samebits.errors import SamebitsError
from samebits.sources.patching import Read, Steps, plan_series
from samebits.sources.patchset import Kind, PatchError, Where, load_series
from samebits.sources.pins import Base, Pins, Upstream


class RecordError(SamebitsError):
    """A record is missing, stale or damaged, or a checkout is none of ours. The message names the remedy."""


@dataclass(frozen=True)
class FileChange:
    """A touched file's sha256 before (None: the file is new) and after."""

    path: str
    before: str | None
    after: str


def file_changes(read: Read, steps: Steps) -> list[FileChange]:
    """What the steps of `plan_series` do to each file, by path."""
    final = {path: data for _, changed in steps for path, data in changed.items()}
    changes = []
    for path, data in sorted(final.items()):
        before = read(path)
        digest = None if before is None else hashlib.sha256(before).hexdigest()
        changes.append(FileChange(path, digest, hashlib.sha256(data).hexdigest()))
    return changes


def series_sha256(patches_root: Path, upstream: str) -> str:
    """One hash for all that stands in the patch folders of an upstream: message, edits and files."""
    digest = hashlib.sha256()
    folder = patches_root / upstream
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        digest.update(
            f"{path.relative_to(folder).as_posix()}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode()
        )
    return digest.hexdigest()


def patch_hashes(patches_root: Path, upstream: str) -> dict[str, str]:
    """One hash for each patch folder of an upstream, as `series_sha256` has one for all."""
    names = sorted(path.name for path in (patches_root / upstream).glob("*") if path.is_dir())
    return {name: series_sha256(patches_root / upstream, name) for name in names}


def check_bases(upstream: Upstream, patches_root: Path) -> None:
    """Refuse an edit that is limited to a base which the pins do not know: it would never apply. Raises PatchError."""
    known = {base.name for base in upstream.base}
    for patch in load_series(patches_root, upstream.key):
        for edit in patch.edits:
            if unknown := set(edit.bases) - known:
                remedy = f"the bases of {upstream.key} are {', '.join(sorted(known))}"
                what = f"bases names {', '.join(sorted(unknown))}"
                raise PatchError(Kind.BAD_PATCH, edit.where, what, remedy)


def read_commit(checkout: Path, commit: str) -> Read:
    """A `read` over a commit of a git checkout, whatever its work tree holds."""

    def read(path: str) -> bytes | None:
        done = _git(checkout, "cat-file", "blob", f"{commit}:{path}")
        return done.stdout if done.returncode == 0 else None

    return read


def match_checkout(pins: Pins, checkout: Path) -> list[tuple[Upstream, Base]]:
    """The bases whose pinned commit a checkout holds. Raises RecordError if it holds none."""
    found = [
        (upstream, base)
        for upstream in pins.patched()
        for base in upstream.base
        if base.commit and _git(checkout, "cat-file", "-e", f"{base.commit}^{{commit}}").returncode == 0
    ]
    if not found:
        commits = ", ".join(f"{u.key} {b.commit[:12]}" for u in pins.patched() for b in u.base if b.commit)
        raise RecordError(f"{checkout}: it holds none of {commits}. Remedy: fetch the pinned commit into it.")
    return found


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, stdin=subprocess.DEVNULL)


def prove(read: Read, upstream: Upstream, base: Base, patches_root: Path) -> list[FileChange]:
    """Apply the series to what `read` gives and return what it changed. Raises PatchError."""
    check_bases(upstream, patches_root)
    folders = () if base.commit else upstream.packages
    return file_changes(read, plan_series(read, upstream.key, base.name, patches_root, folders))


def record_path(records: Path, upstream: Upstream, base: Base) -> Path:
    return records / f"{upstream.key}-{base.name}.json"


def write(records: Path, upstream: Upstream, base: Base, patches_root: Path, changes: Sequence[FileChange]) -> None:
    """Write the record of a base."""
    document = {
        "upstream": upstream.key,
        "base": base.name,
        **({"commit": base.commit} if base.commit else {}),
        "series": series_sha256(patches_root, upstream.key),
        "files": {change.path: {"before": change.before, "after": change.after} for change in changes},
    }
    records.mkdir(parents=True, exist_ok=True)
    record_path(records, upstream, base).write_text(json.dumps(document, indent=1) + "\n")


def load(records: Path, upstream: Upstream, base: Base, patches_root: Path) -> list[FileChange]:
    """The recorded changes of a base, if the record is of the present patches and commit. Raises RecordError."""
    path = record_path(records, upstream, base)
    again = f"samebits patch check --record{' --checkout PATH' if base.commit else ''}"
    name = f"{upstream.key} {base.name}: {path.name}"
    try:
        document = json.loads(path.read_text("utf-8"))
        changes = [FileChange(file, h["before"], h["after"]) for file, h in document["files"].items()]
        series, commit = document["series"], document.get("commit", "")
    except FileNotFoundError:
        raise RecordError(f"{name} does not exist. Remedy: {again}.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RecordError(f"{name} is damaged. Remedy: {again}.") from None
    if series != series_sha256(patches_root, upstream.key) or commit != base.commit:
        raise RecordError(f"{name} is stale: it is of other patches or another commit. Remedy: {again}.")
    return changes


def verify(changes: Sequence[FileChange], recorded: Sequence[FileChange], upstream: Upstream, base: Base) -> None:
    """Compare what the series changed with the record. Raises PatchError for the first file that differs."""
    now, then = ({change.path: change for change in some} for some in (changes, recorded))
    for path in sorted(now.keys() | then.keys()):
        if now.get(path) != then.get(path):
            what = "is unlike its record: " + "; ".join(
                f"{side} {'not touched' if c is None else f'{c.before or "new"} -> {c.after}'}"
                for side, c in (("recorded", then.get(path)), ("found", now.get(path)))
            )
            raise PatchError(Kind.FILE_HASH_UNLIKE, Where(upstream.key, base.name, file=path), what)
