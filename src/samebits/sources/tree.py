"""The files in which a patched GPU wheel differs from its release, to be laid over an unpacked release.

A machine with a card is often lent, bare, and far from an index: the release travels once, what changes again and again
is a megabyte. A note beside the files says which wheel they are of and what each must hash to.
"""

import hashlib
import json
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

from samebits.errors import SamebitsError
from samebits.sources.fetch import fetch
from samebits.sources.native import libraries_of
from samebits.sources.pins import ROOT, Pins
from samebits.sources.wheels import build_wheel

NOTE = "samebits-tree.json"


class TreeError(SamebitsError):
    """A tree that cannot be written."""


def write_tree(pins: Pins, patches: Path, cache: Path, out: Path, through: str | None = None) -> str:
    """Write the tree of the patched vllm for GPUs into the new folder `out`; returns the wheel's name.

    through: the last patch of the series that it has; all without. Raises TreeError, and what a wheel's build raises.
    """
    upstream = pins.upstreams["vllm"]
    artefact = next(a for a in upstream.artefact if a.base and "gpu" in a.profiles)
    if out.exists():
        raise TreeError(f"{out} is there already: choose another --out, or remove it")
    with tempfile.TemporaryDirectory() as scratch:
        series = Path(scratch) / "patches"
        shutil.copytree(patches, series)
        if through is not None:
            names = sorted(folder.name for folder in (series / "vllm").iterdir())
            if through not in names:
                raise TreeError(f"--through {through}: vllm's patches are {', '.join(names)}")
            for later in names[names.index(through) + 1 :]:
                shutil.rmtree(series / "vllm" / later)
        libraries = libraries_of(pins, artefact, "vllm", series, cache)
        built = build_wheel(fetch(artefact, cache), artefact, upstream, series, Path(scratch) / "wheel", libraries)
        with zipfile.ZipFile(fetch(artefact, cache)) as release, zipfile.ZipFile(built.path) as patched:
            before = {item.filename: item.CRC for item in release.infolist()}
            folders = tuple(f"{name}/" for name in upstream.packages)
            changed = [
                item.filename
                for item in patched.infolist()
                if item.filename.startswith(folders) and before.get(item.filename) != item.CRC
            ]
            partial = Path(tempfile.mkdtemp(dir=_made(out.parent), prefix=f".{out.name}-"))
            patched.extractall(partial, changed)
            files = {name: hashlib.sha256(patched.read(name)).hexdigest() for name in changed}
    note = {"wheel": built.path.name, "sha256": built.sha256, "git_commit": _commit(), "files": files}
    (partial / NOTE).write_text(json.dumps(note, indent=1) + "\n")
    partial.chmod(0o755)
    partial.rename(out)
    return built.path.name


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _commit() -> str:
    """The commit of this repository; with "-dirty" where files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
