"""A small made-up upstream for the tests of the sources: its release wheel, its pins, and a patch series for it."""

import zipfile
from pathlib import Path

from samebits.sources.fetch import file_sha256
from samebits.sources.patching import Read, plan_series
from samebits.sources.pins import Artefact, Base, Commit, Upstream
from samebits.sources.records import FileChange, file_changes

COMMIT = Commit("samebits authors", "samebits@localhost", "2026-01-01T00:00:00+0000")
METADATA = """\
Metadata-Version: 2.4
Name: toy-cpu
Version: 1.0
Requires-Dist: torch==2.0+cpu
Requires-Dist: setuptools==1

Version: 1.0 of a toy.
"""
FILES = {
    "toy/__init__.py": '__version__ = "1.0"\n',
    "toy/a,b.json": "{}\n",
    "toy/mod.py": "import os\n\n\ndef size():\n    return 1\n",
    "toy/run.sh": "#!/bin/sh\n",
    "toy_cpu-1.0.dist-info/METADATA": METADATA,
    "toy_cpu-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: toy\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "toy_cpu-1.0.dist-info/RECORD": "",
}
EDITS = """\
[[edit]]
file = "toy/mod.py"
symbol = "size"
op = "insert"
where = "body-start"
guard = "os.sep"
text = "return 2"
"""


def release(folder: Path, files: dict[str, str] | None = None, name: str = "toy_cpu") -> tuple[Path, Artefact]:
    """Write toy's release wheel and return it with its pin."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file, text in (files or FILES).items():
            info = zipfile.ZipInfo(file, (2001, 2, 3, 4, 5, 6))
            info.external_attr = (0o100777 if file.endswith(".sh") else 0o100600) << 16
            wheel.writestr(info, text)
    metadata = {"Requires-Dist: torch==2.0+cpu": "Requires-Dist: torch==2.0", "Requires-Dist: setuptools==1": ""}
    pin = Artefact("toy-cpu", "1.0", path.name, file_sha256(path), ("cpu",), "1.0", "toy", "cpu", metadata)
    return path, pin


def upstream(*artefacts: Artefact, commit: str = "") -> Upstream:
    """Toy, with the base 1.0 of its releases and, given a commit, the base main."""
    bases = (Base("1.0", ships=True), *([Base("main", commit=commit)] if commit else []))
    return Upstream("toy", "https://example.org/toy", packages=("toy",), series=3, base=bases, artefact=artefacts)


def series(patches_root: Path) -> Path:
    """Write a series of two patches for toy and return `patches_root`."""
    one, two = (patches_root / "toy" / name for name in ("0001-answer-two", "0002-add-files"))
    for folder in (one, two):
        folder.mkdir(parents=True)
    (one / "MESSAGE.md").write_text("[Toy] Answer two\n\nOne was too few.\n")
    (one / "edits.toml").write_text(EDITS)
    (two / "MESSAGE.md").write_text("Add files")
    for path in ("toy/new.py", "tests/test_new.py"):
        (two / "files" / path).parent.mkdir(parents=True, exist_ok=True)
        (two / "files" / path).write_text("y = 1\n")
    return patches_root


def read_folder(tree: Path) -> Read:
    """A `read` over a folder; a path that does not exist gives None."""
    return lambda path: (tree / path).read_bytes() if (tree / path).is_file() else None


def apply_series(tree: Path, upstream: str, base: str, patches_root: Path) -> list[FileChange]:
    """Put the series of `patches_root/upstream` onto the source folder `tree` of version `base`, in place."""
    steps = plan_series(read_folder(tree), upstream, base, patches_root)
    changes = file_changes(read_folder(tree), steps)
    for _, changed in steps:
        for path, data in changed.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(data)
    return changes
