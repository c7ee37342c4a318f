"""A series as git sees it: the exported files go through `git am` and give the tree that the engine gives."""

import subprocess
from pathlib import Path

import pytest
import toy

from samebits.sources.patching import plan_series
from samebits.sources.series import SeriesError, apply_to_checkout, export


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of toy whose only commit is its release."""
    folder = tmp_path / "checkout"
    (folder / "toy").mkdir(parents=True)
    for name in ("toy/__init__.py", "toy/mod.py", "toy/run.sh"):
        (folder / name).write_text(toy.FILES[name])
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", "--all")
    git(folder, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "--message", "release")
    return folder


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def exported(tree: Path, patches: Path, out: Path) -> list[Path]:
    read = toy.read_folder(tree)
    return export(read, plan_series(read, "toy", "1.0", patches), toy.COMMIT, out)


def test_one_file_a_patch_and_the_same_bytes_each_time(checkout: Path, tmp_path: Path) -> None:
    patches = toy.series(tmp_path / "patches")
    one, two = (exported(checkout, patches, tmp_path / name) for name in ("one", "two"))
    assert [path.name for path in one] == ["0001-Toy-Answer-two.patch", "0002-Add-files.patch"]
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]
    text = one[0].read_text()
    assert "From: samebits authors <samebits@localhost>" in text and "\nOne was too few.\n" in text


def test_git_am_gives_the_tree_that_the_engine_gives(checkout: Path, tmp_path: Path) -> None:
    patches = toy.series(tmp_path / "patches")
    series = exported(checkout, patches, tmp_path / "out")
    tree = tmp_path / "worktree"
    apply_to_checkout(checkout, "main", "samebits", series, toy.COMMIT, tree)
    log = git(tree, "log", "--format=%s|%an|%cn|%at|%ct", "main..samebits").splitlines()
    assert log == [
        f"{s}|samebits authors|samebits authors|1767225600|1767225600" for s in ("Add files", "[Toy] Answer two")
    ]
    assert git(tree, "status", "--porcelain") == ""
    assert git(checkout, "status", "--porcelain") == "", "the checkout's own work tree is as it was"
    toy.apply_series(checkout, "toy", "1.0", patches)
    names = git(tree, "ls-files").split()
    assert "tests/test_new.py" in names
    for name in names:
        assert (tree / name).read_bytes() == (checkout / name).read_bytes()


def test_the_commits_are_the_same_each_time(checkout: Path, tmp_path: Path) -> None:
    series = exported(checkout, toy.series(tmp_path / "patches"), tmp_path / "out")
    for name in ("one", "two"):
        apply_to_checkout(checkout, "main", name, series, toy.COMMIT, tmp_path / name)
    assert git(checkout, "rev-parse", "one") == git(checkout, "rev-parse", "two")


def test_a_series_that_does_not_fit_leaves_no_work_tree_and_no_branch(checkout: Path, tmp_path: Path) -> None:
    series = exported(checkout, toy.series(tmp_path / "patches"), tmp_path / "out")
    (checkout / "toy" / "mod.py").write_text("other = 1\n")
    git(checkout, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "--all", "--message", "drift")
    with pytest.raises(SeriesError, match=r"git am .*Remedy"):
        apply_to_checkout(checkout, "main", "samebits", series, toy.COMMIT, tmp_path / "worktree")
    assert git(checkout, "branch", "--format=%(refname:short)").split() == ["main"]
    assert not (tmp_path / "worktree").exists()


def test_an_empty_series_exports_nothing(checkout: Path, tmp_path: Path) -> None:
    assert exported(checkout, tmp_path / "patches", tmp_path / "out") == []
