"""The tree of a patched vllm: what differs from the release and nothing else, whole or through a patch."""

import hashlib
import json
import pathlib
import zipfile

import pytest

from samebits.sources.fetch import cache_folder, fetch
from samebits.sources.pins import ROOT, load_pins
from samebits.sources.tree import NOTE, TreeError, write_tree

PINS, PATCHES = load_pins(), ROOT / "patches"


@pytest.mark.parametrize("through", [None, "0004-admitted-linear"])
def test_a_tree_holds_what_the_series_changed_and_its_note_is_true(tmp_path: pathlib.Path, through: str | None) -> None:
    write_tree(PINS, PATCHES, cache_folder(), tmp_path / "tree", through)
    note = json.loads((tmp_path / "tree" / NOTE).read_text())
    found = {p.relative_to(tmp_path / "tree").as_posix(): p for p in (tmp_path / "tree").rglob("*") if p.is_file()}
    del found[NOTE]
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()} == note["files"]
    artefact = next(a for a in PINS.upstreams["vllm"].artefact if "gpu" in a.profiles)
    with zipfile.ZipFile(fetch(artefact)) as release:
        names = set(release.namelist())
        assert all(name not in names or release.read(name) != path.read_bytes() for name, path in found.items())
    assert ("vllm/batch_invariant_rows.so" in found) == (through is None)
    assert "vllm/batch_invariant_linear.so" in found and "vllm/batch_invariant_cpu.so" not in found


def test_a_patch_that_is_not_there_and_a_folder_that_is_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(TreeError, match="--through 0009-none: vllm's patches are 0001-"):
        write_tree(PINS, PATCHES, cache_folder(), tmp_path / "tree", "0009-none")
    with pytest.raises(TreeError, match="is there already"):
        write_tree(PINS, PATCHES, cache_folder(), tmp_path)
