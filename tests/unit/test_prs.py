"""The pull requests, against local repositories that stand for the upstreams and for a person's forks."""

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import toy
from toy_image import git

from samebits.sources import prs, records
from samebits.sources.patchset import PatchError
from samebits.sources.pins import Base, Pins, Upstream
from samebits.sources.prs import PullRequestError

KEYS = ("one", "two", "three")


@dataclass
class World:
    """Three upstreams with their forks, pins, patches and records; `out` is where the pull requests are made."""

    folder: Path
    pins: Pins

    @property
    def out(self) -> Path:
        return self.folder / "prs"

    @property
    def sources(self) -> dict[str, str]:
        return {key: str(self.folder / "upstreams" / f"{key}.git") for key in KEYS}

    @property
    def forks(self) -> str:
        return str(self.folder / "forks")

    def prepare(self) -> list[prs.Request]:
        patches, recorded = self.folder / "patches", self.folder / "patched"
        return prs.prepare(self.pins, patches, recorded, self.out, self.sources, ["a measurement"])

    def commit_upstream(self, key: str, file: str, text: str) -> str:
        work = self.folder / "work" / key
        (work / file).parent.mkdir(parents=True, exist_ok=True)
        (work / file).write_text(text)
        git(work, "add", "--all")
        git(work, "commit", "--quiet", "--message", f"{file} changes")
        git(work, "push", "--quiet", self.sources[key], "HEAD:main")
        return git(work, "rev-parse", "HEAD").strip()

    def fork_heads(self) -> dict[str, str]:
        return {
            key: git(self.folder / "forks" / f"{key}.git", "for-each-ref", "--format=%(refname) %(objectname)")
            for key in KEYS
        }


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path, Pins(toy.COMMIT, {}, ()))
    toy.series(tmp_path / "patches")
    (tmp_path / "patches" / "toy").rename(tmp_path / "patches" / "one")
    for key in KEYS:
        if key != "one":
            shutil.copytree(tmp_path / "patches" / "one", tmp_path / "patches" / key)
        for name in ("upstreams", "forks"):
            git(tmp_path, "init", "--quiet", "--bare", "--initial-branch=main", str(tmp_path / name / f"{key}.git"))
        git(tmp_path, "init", "--quiet", "--initial-branch=main", str(tmp_path / "work" / key))
        made.commit_upstream(key, "toy/mod.py", toy.FILES["toy/mod.py"])
        head = made.commit_upstream(key, "toy/run.sh", "#!/bin/sh\n")
        base = Base("main", commit=head)
        upstream = Upstream(
            key,
            f"https://github.com/org/{key}",
            branch="main",
            commit=head,
            title=f"Title of {key}",
            series=1,
            base=(base,),
        )
        made.pins.upstreams[key] = upstream
        changes = records.prove(
            records.read_commit(tmp_path / "work" / key, head), upstream, base, tmp_path / "patches"
        )
        records.write(tmp_path / "patched", upstream, base, tmp_path / "patches", changes)
    return made


def test_each_branch_is_the_targets_head_and_the_series(world: World) -> None:
    for made in world.prepare():
        assert made.target == made.upstream.commit and not made.drift
        log = git(made.repository, "log", "--format=%s|%an|%P", f"{made.target}..{made.branch}").splitlines()
        assert [line.split("|")[:2] for line in log] == [
            ["Add files", "samebits authors"],
            ["[Toy] Answer two", "samebits authors"],
        ]
        assert log[-1].endswith(made.target)
        assert git(made.repository, "show", f"{made.branch}:toy/new.py") == "y = 1\n"
        bodies = git(made.repository, "log", "--format=%b", f"{made.target}..{made.branch}")
        assert bodies.count("Signed-off-by: samebits authors <samebits@localhost>") == 2


def test_what_goes_with_it_stands_beside(world: World) -> None:
    for made in world.prepare():
        assert sorted(path.name for path in (made.folder / "series").iterdir()) == [
            "0001-Toy-Answer-two.patch",
            "0002-Add-files.patch",
        ]
        text = (made.folder / "TEXT.md").read_text()
        assert "One was too few." in text and "`os.sep`" in text and "a measurement" in text
        assert (made.folder / "TITLE").read_text() == f"Title of {made.upstream.key}\n"
        clone = world.folder / "clone" / made.upstream.key
        git(world.folder, "clone", "--quiet", world.sources[made.upstream.key], str(clone))
        git(clone, "am", "--quiet", *map(str, sorted((made.folder / "series").iterdir())))
        git(clone, "fetch", "--quiet", str(made.folder / "series.bundle"), made.branch)
        assert git(clone, "diff", "HEAD", "FETCH_HEAD") == "", "the files and the bundle give the same tree"


def test_a_messages_paragraphs_flow_and_its_lists_stay(world: World) -> None:
    message = "Subject\n\nOne\nparagraph.\n\nWhat:\n- one\n  more\n- two\n"
    (world.folder / "patches" / "one" / "0001-answer-two" / "MESSAGE.md").write_text(message)
    upstream = world.pins.upstreams["one"]
    work, base = world.folder / "work" / "one", upstream.base[0]
    changes = records.prove(records.read_commit(work, base.commit), upstream, base, world.folder / "patches")
    records.write(world.folder / "patched", upstream, base, world.folder / "patches", changes)
    assert "\nOne paragraph.\n\nWhat:\n- one\n  more\n- two\n" in (world.prepare()[0].folder / "TEXT.md").read_text()


def test_without_options_nothing_else_changes_and_twice_is_the_same(world: World) -> None:
    before = world.fork_heads()
    first = [made.head for made in world.prepare()]
    assert [made.head for made in world.prepare()] == first
    assert world.fork_heads() == before
    assert {path.name for path in world.out.iterdir()} == set(KEYS)


def test_pushing_twice_updates_the_same_branches(world: World) -> None:
    prepared = world.prepare()
    said = prs.push(prepared, world.forks, world.pins.commit)
    assert [line.split(": ")[1].split()[1] for line in said] == ["pushed"] * 3
    assert all("unchanged" in line for line in prs.push(world.prepare(), world.forks, world.pins.commit))
    for made in prepared:
        assert f"refs/heads/samebits/{made.upstream.key} {made.head}" in world.fork_heads()[made.upstream.key]
    world.commit_upstream("two", "other.py", "x = 1\n")
    said = prs.push(world.prepare(), world.forks, world.pins.commit)
    assert ["pushed" in line for line in said] == [False, True, False], "the target moved: the branch follows"


def test_an_edit_that_no_longer_lands_is_named_and_nothing_is_pushed(world: World) -> None:
    world.commit_upstream("three", "toy/mod.py", "def other():\n    pass\n")
    with pytest.raises(PatchError, match=r"three main: .*toy/mod.py: size: there is no 'size'"):
        world.prepare()
    assert "samebits" not in "".join(world.fork_heads().values())


def test_a_target_whose_file_is_not_as_recorded_is_made_but_not_pushed(world: World) -> None:
    world.commit_upstream("two", "toy/mod.py", toy.FILES["toy/mod.py"] + "\n\ndef more():\n    pass\n")
    prepared = world.prepare()
    assert [made.drift for made in prepared] == ["", "toy/mod.py", ""]
    with pytest.raises(PullRequestError, match=r"two: toy/mod\.py on main is not as recorded; nothing was pushed"):
        prs.push(prepared, world.forks, world.pins.commit)
    assert "samebits" not in "".join(world.fork_heads().values())


def test_a_target_that_moves_meanwhile_is_refused(world: World) -> None:
    prepared = world.prepare()
    world.commit_upstream("three", "other.py", "x = 1\n")
    with pytest.raises(PullRequestError, match=r"three: main moved from .* meanwhile; nothing was pushed"):
        prs.push(prepared, world.forks, world.pins.commit)
    assert "samebits" not in "".join(world.fork_heads().values())


@pytest.mark.parametrize("amend", [False, True])
def test_commits_of_others_on_the_branch_are_kept(world: World, amend: bool) -> None:
    prs.push(world.prepare(), world.forks, world.pins.commit)
    clone, fork = world.folder / "theirs", world.folder / "forks" / "three.git"
    git(world.folder, "clone", "--quiet", "--branch=samebits/three", str(fork), str(clone))
    (clone / "theirs.py").write_text("x = 1\n")
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", *(["--amend", "--no-edit"] if amend else ["--message", "theirs"]))
    git(clone, "push", "--quiet", "--force", "origin", "samebits/three")
    world.commit_upstream("one", "other.py", "x = 1\n")
    before = world.fork_heads()
    with pytest.raises(PullRequestError, match=r"three: .* a commit of others .*toys.* nothing was pushed"):
        prs.push(world.prepare(), world.forks, world.pins.commit)
    assert world.fork_heads() == before, "one, which could be pushed, was not either"


def test_a_push_between_the_check_and_ours_is_not_overwritten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease: the branch is no longer what was looked at."""
    prs.push(world.prepare(), world.forks, world.pins.commit)
    world.commit_upstream("one", "other.py", "x = 1\n")
    prepared, seen = world.prepare(), prs._lease
    foreign = git(world.folder / "work" / "one", "rev-parse", "HEAD").strip()

    def lease(made: prs.Request, *arguments: object) -> str:
        said = seen(made, *arguments)  # type: ignore[arg-type]
        if made.upstream.key == "one":
            git(
                world.folder / "work" / "one",
                "push",
                "--quiet",
                "--force",
                f"{world.forks}/one.git",
                "HEAD:samebits/one",
            )
        return said

    monkeypatch.setattr(prs, "_lease", lease)
    with pytest.raises(PullRequestError, match=r"(?s)one: git push: .*stale info"):
        prs.push(prepared, world.forks, world.pins.commit)
    assert foreign in world.fork_heads()["one"]


def test_a_remote_without_credentials_is_an_error_and_no_question(world: World) -> None:
    with pytest.raises(PullRequestError, match=r"(?s)one: git ls-remote: .*Remedy: give git credentials"):
        prs.push(world.prepare(), str(world.folder / "nowhere"), world.pins.commit)


def test_the_upstream_itself_is_never_pushed_to(world: World) -> None:
    with pytest.raises(PullRequestError, match=r"one: .* is the upstream itself"):
        prs.push(world.prepare(), "https://github.com/org", world.pins.commit)


def test_a_target_that_cannot_be_had_is_named(world: World) -> None:
    shutil.rmtree(world.sources["two"])
    with pytest.raises(PullRequestError, match=r"two: git fetch: "):
        world.prepare()


def test_a_branch_that_is_not_the_series_is_caught(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit maker that adds a file of its own."""
    honest = prs._commits

    def dishonest(repository: Path, commit: object, target: str, steps: list[tuple[object, dict[str, bytes]]]) -> str:
        more = [(patch, {**changed, "stray.py": b"x = 1\n"}) for patch, changed in steps]
        return honest(repository, commit, target, more)  # type: ignore[arg-type]

    monkeypatch.setattr(prs, "_commits", dishonest)
    with pytest.raises(PullRequestError, match=r"one: the branch's diff is not the series: stray\.py"):
        world.prepare()


GH = """\
#!/bin/sh
echo "$@" >>"$GH_LOG"
case "$1 $2" in
    "auth status") exit "${GH_AUTH:-0}";;
    "pr list") [ ! -f "$GH_LOG.open" ] || cat "$GH_LOG.open";;
    "pr create") echo https://github.com/org/one/pull/1 | tee "$GH_LOG.open";;
esac
"""


@pytest.fixture
def gh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for GitHub's gh: writes down what it is asked, and remembers one open pull request."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gh").write_text(GH)
    (tmp_path / "bin" / "gh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("GH_LOG", str(tmp_path / "gh.log"))
    return tmp_path / "gh.log"


def test_drafts_are_opened_once_and_then_given_their_new_text(world: World, gh: Path) -> None:
    prepared = world.prepare()[:1]
    prs.create(prepared, "git@github.com:me")
    asked = gh.read_text().splitlines()
    assert asked[0].startswith("pr list --repo org/one --head samebits/one --state open")
    assert asked[1].startswith(
        "pr create --draft --repo org/one --base main --head me:samebits/one --title Title of one"
    )
    said = prs.create(prepared, "git@github.com:me")
    assert gh.read_text().splitlines()[3].startswith("pr edit https://github.com/org/one/pull/1 --title")
    assert said == ["one: https://github.com/org/one/pull/1: new text"]


def test_a_gh_that_is_not_logged_in_is_refused_before_anything(gh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prs.check_gh()
    monkeypatch.setenv("GH_AUTH", "1")
    with pytest.raises(PullRequestError, match=r"gh is not logged in; nothing was pushed"):
        prs.check_gh()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PullRequestError, match=r"gh is not installed"):
        prs.check_gh()


def test_an_edit_of_another_base_is_in_no_text(world: World) -> None:
    made = replace(world.prepare()[0])
    from samebits.sources.patchset import load_series

    patches = load_series(world.folder / "patches", "one")
    edit = replace(patches[0].edits[0], bases=("0.1",))
    text = prs.text(made, [replace(patches[0], edits=(edit,))], Base("main"), [])
    assert "Changed files: none." in text and "os.sep" not in text
