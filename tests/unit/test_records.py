"""Records of patched files: they prove a base; a stale, damaged or missing one is an error that names the command."""

import dataclasses
import subprocess
from pathlib import Path

import pytest
import toy

from samebits.sources import records
from samebits.sources.patchset import Kind, PatchError
from samebits.sources.pins import Pins
from samebits.sources.records import RecordError


class Base:
    """Toy's tree, series and record of its base 1.0."""

    def __init__(self, root: Path) -> None:
        self.tree, self.records, self.patches = root / "tree", root / "records", toy.series(root / "patches")
        (self.tree / "toy").mkdir(parents=True)
        (self.tree / "toy" / "mod.py").write_text(toy.FILES["toy/mod.py"])
        self.upstream = toy.upstream()
        self.base = self.upstream.base[0]

    def check(self, record: bool = False) -> None:
        changes = records.prove(toy.read_folder(self.tree), self.upstream, self.base, self.patches)
        if record:
            records.write(self.records, self.upstream, self.base, self.patches, changes)
        recorded = records.load(self.records, self.upstream, self.base, self.patches)
        records.verify(changes, recorded, self.upstream, self.base)


@pytest.fixture
def base(tmp_path: Path) -> Base:
    base = Base(tmp_path)
    base.check(record=True)
    return base


def test_a_recorded_base_passes(base: Base) -> None:
    base.check()
    text = (base.records / "toy-1.0.json").read_text()
    assert '"toy/new.py": {\n   "before": null' in text
    assert "tests/test_new.py" not in text, "a release holds its package alone"


def test_an_upstream_file_that_changed_is_named_with_its_hashes(base: Base) -> None:
    (base.tree / "toy" / "mod.py").write_text(toy.FILES["toy/mod.py"] + "# more\n")
    with pytest.raises(PatchError, match=r"toy 1\.0: .*toy/mod\.py: .*recorded .* found .*Remedy") as caught:
        base.check()
    assert caught.value.kind is Kind.FILE_HASH_UNLIKE


@pytest.mark.parametrize("part", ["MESSAGE.md", "edits.toml"])
def test_a_record_of_other_patches_is_stale(base: Base, part: str) -> None:
    path = base.patches / "toy" / "0001-answer-two" / part
    path.write_text(path.read_text() + "\n")
    with pytest.raises(RecordError, match=r"stale.*samebits patch check --record"):
        base.check()


def test_a_missing_record_names_the_command(base: Base) -> None:
    (base.records / "toy-1.0.json").unlink()
    with pytest.raises(RecordError, match=r"does not exist.*samebits patch check --record"):
        base.check()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"series": "", "files": {"a": {}}}'])
def test_a_damaged_record_is_refused(base: Base, text: str) -> None:
    (base.records / "toy-1.0.json").write_text(text)
    with pytest.raises(RecordError, match="damaged"):
        base.check()


def test_a_record_of_another_commit_is_stale(base: Base) -> None:
    upstream = toy.upstream(commit="1" * 40)
    main = upstream.base[1]
    records.write(base.records, upstream, main, base.patches, [])
    assert records.load(base.records, upstream, main, base.patches) == []
    with pytest.raises(RecordError, match=r"stale.*--checkout PATH"):
        records.load(base.records, upstream, dataclasses.replace(main, commit="2" * 40), base.patches)


def test_an_edit_for_a_base_that_nobody_pins_is_refused(base: Base) -> None:
    edits = base.patches / "toy" / "0001-answer-two" / "edits.toml"
    edits.write_text(edits.read_text() + 'bases = ["1.O"]\n')
    with pytest.raises(PatchError, match=r"names 1\.O.*the bases of toy are 1\.0"):
        base.check(record=True)


def test_a_checkout_is_read_at_its_pinned_commit(base: Base, tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments]
        return subprocess.run(command, cwd=base.tree, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    git("add", "--all")
    git("commit", "--quiet", "--message", "one")
    commit = git("rev-parse", "HEAD")
    (base.tree / "toy" / "mod.py").write_text("changed since\n")
    pins = Pins(toy.COMMIT, {"toy": toy.upstream(commit=commit)}, ())
    assert [(u.key, b.name) for u, b in records.match_checkout(pins, base.tree)] == [("toy", "main")]
    read = records.read_commit(base.tree, commit)
    assert read("toy/mod.py") == toy.FILES["toy/mod.py"].encode()
    assert read("toy/gone.py") is None
    changes = records.prove(read, pins.upstreams["toy"], pins.upstreams["toy"].base[1], base.patches)
    assert [c.path for c in changes] == ["tests/test_new.py", "toy/mod.py", "toy/new.py"]


def test_a_checkout_without_a_pinned_commit_is_refused(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    with pytest.raises(RecordError, match="holds none of toy 111111111111"):
        records.match_checkout(Pins(toy.COMMIT, {"toy": toy.upstream(commit="1" * 40)}, ()), tmp_path)


def test_each_patch_folder_has_a_hash_of_its_own(tmp_path: Path) -> None:
    patches = toy.series(tmp_path / "patches")
    before = records.patch_hashes(patches, "toy")
    assert list(before) == ["0001-answer-two", "0002-add-files"]
    (patches / "toy" / "0002-add-files" / "MESSAGE.md").write_text("Add other files")
    after = records.patch_hashes(patches, "toy")
    assert [name for name in before if before[name] != after[name]] == ["0002-add-files"]
    assert records.patch_hashes(patches, "an upstream without patches") == {}
