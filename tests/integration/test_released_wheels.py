"""The patch series on the real releases: it applies as recorded, and the wheels come out the same each time."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from samebits.sources import records
from samebits.sources.compare import differences
from samebits.sources.fetch import fetch
from samebits.sources.patching import plan_series
from samebits.sources.pins import ROOT, Artefact, Base, Same, Upstream, load_pins
from samebits.sources.series import apply_to_checkout, export
from samebits.sources.wheels import artefacts_of, build_wheel, check_record, read_wheel

PINS = load_pins()
PATCHES, RECORDS = ROOT / "patches", ROOT / "manifests" / "patched"
RELEASED = [(u, b, a) for u in PINS.patched() for b in u.base for a in u.artefacts_of(b.name)]
COMMITS = [(u, b) for u in PINS.patched() for b in u.base if b.commit]
INSTALLED = artefacts_of(PINS, "cpu", sys.version_info[:2])


def name(value: object) -> str:
    return getattr(value, "file", None) or getattr(value, "key", None) or getattr(value, "name", None) or repr(value)


@pytest.mark.parametrize(("upstream", "base", "artefact"), RELEASED, ids=name)
def test_the_series_is_as_recorded_on_the_release(upstream: Upstream, base: Base, artefact: Artefact) -> None:
    with zipfile.ZipFile(fetch(artefact)) as wheel:
        changes = records.prove(read_wheel(wheel), upstream, base, PATCHES)
    records.verify(changes, records.load(RECORDS, upstream, base, PATCHES), upstream, base)


@pytest.mark.parametrize(("upstream", "base"), COMMITS, ids=name)
def test_the_record_of_a_commit_is_of_the_present_patches(upstream: Upstream, base: Base) -> None:
    records.load(RECORDS, upstream, base, PATCHES)


@pytest.mark.parametrize(("upstream", "artefact"), INSTALLED, ids=name)
def test_two_builds_in_different_folders_are_identical(upstream: Upstream, artefact: Artefact, tmp_path: Path) -> None:
    source = fetch(artefact)
    one = build_wheel(source, artefact, upstream, PATCHES, tmp_path / "one")
    two = build_wheel(source, artefact, upstream, PATCHES, tmp_path / "deeper" / "two")
    assert one.sha256 == two.sha256
    check_record(one.path)
    one.path.unlink()
    two.path.unlink()


@pytest.mark.parametrize("same", PINS.same, ids=name)
def test_the_cpu_build_has_the_releases_python_sources(same: Same) -> None:
    assert differences(fetch(PINS.by_file[same.file]), fetch(PINS.by_file[same.reference]), same) == []


@pytest.mark.parametrize("upstream", PINS.patched(), ids=name)
def test_the_exported_series_goes_through_git_am(upstream: Upstream, tmp_path: Path) -> None:
    base = next(base for base in upstream.base if base.ships)
    checkout = tmp_path / "checkout"
    with zipfile.ZipFile(fetch(upstream.artefacts_of(base.name)[0])) as wheel:
        read = read_wheel(wheel)
        steps = plan_series(read, upstream.key, base.name, PATCHES, upstream.packages)
        files = export(read, steps, PINS.commit, tmp_path / "series")
        assert len(files) == sum(bool(changed) for _, changed in steps)
        wheel.extractall(checkout, [n for n in wheel.namelist() if n.endswith(".py")])
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "release"]):
        identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "gc.auto=0"]
        subprocess.run(["git", *identity, *command], cwd=checkout, check=True)
    tree = tmp_path / "tree"
    apply_to_checkout(checkout, "HEAD", "samebits", files, PINS.commit, tree)
    final = {path: data for _, changed in steps for path, data in changed.items()}
    assert {path: (tree / path).read_bytes() for path in final} == final
    log = subprocess.run(["git", "log", "--format=%s"], cwd=tree, check=True, capture_output=True, text=True).stdout
    subjects = [patch.message.splitlines()[0] for patch, changed in steps if changed]
    assert log.splitlines() == [*reversed(subjects), "release"]
