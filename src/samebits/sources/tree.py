"""The files in which a patched GPU wheel differs from its release, to be laid over an unpacked release.

A machine with a card is often lent, bare, and far from an index: the release travels once, what changes again and again
is a megabyte. A note beside the files says which wheel they are of and what each must hash to.
"""

import hashlib
import importlib.util
import json
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from samebits.errors import SamebitsError
from samebits.sources.fetch import fetch
from samebits.sources.native import libraries_of
from samebits.sources.pins import ROOT, Pins
from samebits.sources.wheels import build_wheel

NOTE = "samebits-tree.json"


class TreeError(SamebitsError):
    """A tree that cannot be written."""


def write_tree(
    pins: Pins, patches: Path, cache: Path, out: Path, through: str | None = None, trainer: bool = False
) -> str:
    """Write the tree of the patched vllm for GPUs into the new folder `out`; returns the wheel's name.

    through: the last patch of the series that it has; all without. trainer: also what the trainer runs on, the patched
    megatron-core (of CPython 3.12) and verl. Raises TreeError, and what a wheel's build raises.
    """
    if out.exists():
        raise TreeError(f"{out} is there already: choose another --out, or remove it")
    with tempfile.TemporaryDirectory() as scratch:
        series = patches
        if through is not None:
            # What names a test of this repository, a replacement, is not in vllm's series.
            series = Path(shutil.copytree(patches, Path(scratch) / "patches"))
            names = sorted(folder.name for folder in (series / "vllm").iterdir())
            if through not in names:
                raise TreeError(f"--through {through}: vllm's patches are {', '.join(names)}")
            for later in names[names.index(through) + 1 :]:
                shutil.rmtree(series / "vllm" / later)
        partial = Path(tempfile.mkdtemp(dir=_made(out.parent), prefix=f".{out.name}-"))
        files: dict[str, str] = {}
        built = []
        for name in ("vllm", "Megatron-LM", "verl") if trainer else ("vllm",):
            upstream = pins.upstreams[name]
            artefact = next(a for a in upstream.artefact if a.base and "gpu" in a.profiles and "cp313" not in a.file)
            libraries = libraries_of(pins, artefact, name, series, cache)
            wheel = build_wheel(fetch(artefact, cache), artefact, upstream, series, Path(scratch) / "wheel", libraries)
            built.append(wheel)
            files |= _lay(fetch(artefact, cache), wheel.path, upstream.packages, partial)
    note = {"wheel": built[0].path.name, "sha256": built[0].sha256, "git_commit": _commit(), "files": files}
    if trainer:
        note["wheels"] = {wheel.path.name: wheel.sha256 for wheel in built}
    (partial / NOTE).write_text(json.dumps(note, indent=1) + "\n")
    partial.chmod(0o755)
    partial.rename(out)
    return built[0].path.name


def _lay(release: Path, patched: Path, packages: Sequence[str], out: Path) -> dict[str, str]:
    """Write the files below `packages` in which two wheels differ; their names and hashes."""
    with zipfile.ZipFile(release) as before, zipfile.ZipFile(patched) as after:
        known = {item.filename: item.CRC for item in before.infolist()}
        folders = tuple(f"{name}/" for name in packages)
        changed = [
            i.filename for i in after.infolist() if i.filename.startswith(folders) and known.get(i.filename) != i.CRC
        ]
        after.extractall(out, changed)
        return {name: hashlib.sha256(after.read(name)).hexdigest() for name in changed}


def installed_note() -> Path | None:
    """The note beside the vllm package of this process, if a tree of ours was laid over a release."""
    found = importlib.util.find_spec("vllm")
    folders = (found and found.submodule_search_locations) or []
    return next((note for folder in folders if (note := Path(folder).parent / NOTE).is_file()), None)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _commit() -> str:
    """The commit of this repository; with "-dirty" where files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
