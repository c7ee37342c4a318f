"""The pull requests: for each upstream a branch on its target's head, made by the patch engine, and what goes with it.

Everything lies below one folder, one folder an upstream: `repository` (bare, with the branch), `series/` (git am
files), `series.bundle`, `TITLE` and `TEXT.md`. Nothing leaves the machine but by `push` and `create`, which begin only
when every upstream has passed its checks.
"""

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samebits.errors import SamebitsError
from samebits.sources import records
from samebits.sources.patching import plan_series
from samebits.sources.patchset import NAMES, NOT_CODE, Patch
from samebits.sources.pins import Base, Commit, Pins, Upstream
from samebits.sources.records import file_changes, read_commit
from samebits.sources.series import SeriesError, git

ZERO = "0" * 40
TARGET = "refs/samebits/target"


class PullRequestError(SamebitsError):
    """A pull request that cannot be made, pushed or opened. The message names upstream, cause and remedy."""


@dataclass(frozen=True)
class Request:
    """A prepared pull request: its folder, the target's head that it starts from, its own head, and the drift.

    drift: a touched file that the target has unlike manifests/patched records it; "" if there is none.
    """

    upstream: Upstream
    folder: Path
    source: str
    target: str
    head: str
    drift: str

    @property
    def repository(self) -> Path:
        return self.folder / "repository"

    @property
    def branch(self) -> str:
        return branch(self.upstream.key)


def branch(upstream: str) -> str:
    """The branch of an upstream's pull request."""
    return f"samebits/{upstream.lower()}"


def prepare(
    pins: Pins, patches: Path, recorded: Path, folder: Path, sources: Mapping[str, str], evidence: Sequence[str]
) -> list[Request]:
    """Make the pull request of every upstream that has a target branch, below `folder`.

    recorded: manifests/patched. sources: upstream -> repository to fetch from instead of its own. evidence: lines for
    the texts. Raises PullRequestError, PatchError (an edit that no longer lands), SeriesError.
    """
    made = []
    for upstream in pins.patched():
        if upstream.branch:
            source = sources.get(upstream.key, upstream.repository)
            made.append(_prepare(pins.commit, upstream, patches, recorded, folder / upstream.key, source, evidence))
    return made


def _prepare(
    commit: Commit,
    upstream: Upstream,
    patches: Path,
    recorded: Path,
    folder: Path,
    source: str,
    evidence: Sequence[str],
) -> Request:
    repository = folder / "repository"
    repository.mkdir(parents=True, exist_ok=True)
    git(repository, commit, "init", "--quiet", "--bare", "--initial-branch=main")
    empty = Request(upstream, folder, source, ZERO, ZERO, "")
    _remote(empty, "fetch", "--quiet", "--no-tags", source, f"+refs/heads/{upstream.branch}:{TARGET}")
    target = git(repository, commit, "rev-parse", TARGET).strip()
    read = read_commit(repository, target)
    base = upstream.base[-1]  # the one that stands for the branch
    steps = plan_series(read, upstream.key, base.name, patches)
    head = _commits(repository, commit, target, steps)
    git(repository, commit, "update-ref", f"refs/heads/{branch(upstream.key)}", head)
    _check(repository, commit, upstream, target, head, steps)
    changes = file_changes(read, steps)
    known = {change.path: change for change in records.load(recorded, upstream, base, patches)}
    # A base that is a release lacks what its wheel lacks.
    drift = next((c.path for c in changes if c.path in known and known[c.path] != c), "")
    if base.commit:
        drift = drift or next((c.path for c in changes if c.path not in known), "")
    made = Request(upstream, folder, source, target, head, drift)
    _write(made, commit, [patch for patch, changed in steps if changed], base, evidence)
    return made


def _commits(repository: Path, commit: Commit, target: str, steps: Sequence[tuple[Patch, dict[str, bytes]]]) -> str:
    """Commit each step on top of `target`, signed off, in no work tree. Returns the last commit."""
    head, index = target, repository / "samebits-index"
    trailer = f"Signed-off-by: {commit.author} <{commit.email}>"
    try:
        _feed(repository, ["read-tree", target], b"", index)
        for patch, changed in steps:
            if not changed:
                continue
            lines = []
            for path, data in sorted(changed.items()):
                was = git(repository, commit, "ls-tree", head, "--", path).split()
                blob = _feed(repository, ["hash-object", "-w", "--stdin"], data, index).decode().strip()
                lines.append(f"{was[0] if was else '100644'} {blob}\t{path}\n")
            _feed(repository, ["update-index", "--add", "--index-info"], "".join(lines).encode(), index)
            tree = _feed(repository, ["write-tree"], b"", index).decode().strip()
            message = f"{patch.message.strip()}\n\n{trailer}\n"
            head = git(repository, commit, "commit-tree", tree, "-p", head, "-m", message).strip()
    finally:
        index.unlink(missing_ok=True)
    return head


def _feed(repository: Path, arguments: list[str], data: bytes, index: Path) -> bytes:
    """git with standard input and an index of its own."""
    environment = {**os.environ, "GIT_INDEX_FILE": str(index), "GIT_CONFIG_GLOBAL": os.devnull}
    command = ["git", "-C", str(repository), "-c", "core.autocrlf=false", *arguments]
    done = subprocess.run(command, input=data, capture_output=True, env=environment)
    if done.returncode:
        raise SeriesError(f"git {arguments[0]} in {repository} failed: {done.stderr.decode(errors='replace')[-500:]}.")
    return done.stdout


def _check(
    repository: Path,
    commit: Commit,
    upstream: Upstream,
    target: str,
    head: str,
    steps: Sequence[tuple[Patch, dict[str, bytes]]],
) -> None:
    """Prove that the branch is the target's head and the series, nothing more. Raises PullRequestError."""
    wanted = {path: data for _, changed in steps for path, data in changed.items()}
    found = {}
    for line in git(repository, commit, "diff-tree", "-r", "--no-renames", "--full-index", target, head).splitlines():
        said, path = line.split("\t")
        found[path] = said.split()[3]
    for path in sorted(wanted.keys() | found.keys()):
        data = wanted.get(path)
        blob = None if data is None else hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
        if found.get(path) != blob:
            raise PullRequestError(f"{upstream.key}: the branch's diff is not the series: {path}. Remedy: report it.")
    count = int(git(repository, commit, "rev-list", "--count", f"{target}..{head}"))
    if count != sum(bool(changed) for _, changed in steps):
        raise PullRequestError(f"{upstream.key}: the branch has {count} commits beside its target. Remedy: report it.")


def _write(made: Request, commit: Commit, patches: Sequence[Patch], base: Base, evidence: Sequence[str]) -> None:
    series = made.folder / "series"
    shutil.rmtree(series, ignore_errors=True)
    options = ["--quiet", "--zero-commit", "--no-signature", "--full-index", f"--output-directory={series.absolute()}"]
    git(made.repository, commit, "format-patch", *options, f"{made.target}..{made.head}")
    bundle = made.folder / "series.bundle"
    git(made.repository, commit, "bundle", "create", "--quiet", str(bundle.absolute()), f"{made.target}..{made.branch}")
    (made.folder / "TITLE").write_text(made.upstream.title + "\n")
    (made.folder / "TEXT.md").write_text(text(made, patches, base, evidence))


def text(made: Request, patches: Sequence[Patch], base: Base, evidence: Sequence[str]) -> str:
    """The text of a pull request: each commit's motivation, what is guarded by which switch, tests and evidence."""
    lines = [f"{len(patches)} commits on `{made.upstream.branch}` at {made.target[:12]}, each of its own use:", ""]
    for patch in patches:
        subject, _, body = patch.message.strip().partition("\n")
        edits = [edit for edit in patch.edits if not edit.bases or base.name in edit.bases]
        guards = sorted({edit.guard for edit in edits if edit.guard not in ("", NAMES, NOT_CODE)})
        tests = sorted({edit.test for edit in edits if edit.test})
        lines += [f"### {subject}", "", _flowing(body), ""] if body.strip() else [f"### {subject}", ""]
        lines.append(f"New files: {', '.join(f'`{name}`' for name in sorted(patch.files)) or 'none'}.")
        changed = sorted({edit.where.file for edit in edits})
        lines.append(f"Changed files: {', '.join(f'`{name}`' for name in changed) or 'none'}.")
        lines.append(f"Runs only where: {'; '.join(f'`{guard}`' for guard in guards) or 'it is asked for by name'}.")
        if tests:
            lines.append(f"The default behaviour, unchanged or mended: {', '.join(f'`{test}`' for test in tests)}.")
        lines.append("")
    lines += ["### Evidence", "", *(f"- {line}" for line in evidence), ""]
    return "\n".join(lines)


def _flowing(body: str) -> str:
    """A commit message's body for a page that keeps line breaks: paragraphs on one line, lists as they are."""
    paragraphs = re.split(r"\n\s*\n", body.strip())
    return "\n\n".join(p if re.search(r"(?m)^\s*[-*] ", p) else " ".join(p.split()) for p in paragraphs)


def push(requests: Sequence[Request], remote: str, commit: Commit) -> list[str]:
    """Push each branch to REMOTE/NAME with lease; returns a line each. Checks of all come before the first push.

    Raises PullRequestError: a file that is not as recorded on the target, a target that has moved since, commits of
    others on the branch, a remote that cannot be reached or written.
    """
    leases = []
    for made in requests:
        key = made.upstream.key
        if made.drift:
            raise PullRequestError(
                f"{key}: {made.drift} on {made.upstream.branch} is not as recorded; nothing was pushed. Remedy: "
                "`samebits patch check --record --checkout PATH` with the head pinned, look at what changed, commit."
            )
        now = _remote_head(made, made.source, made.upstream.branch)
        if now != made.target:
            raise PullRequestError(
                f"{key}: {made.upstream.branch} moved from {made.target[:12]} to {now[:12]} meanwhile; nothing was "
                "pushed. Remedy: run it again."
            )
        leases.append(_lease(made, commit, _address(remote, made.upstream)))
    said: list[str] = []
    for made, lease in zip(requests, leases, strict=True):
        where = _address(remote, made.upstream)
        if lease != made.head:
            options = ("--quiet", f"--force-with-lease=refs/heads/{made.branch}:{lease if lease != ZERO else ''}")
            _remote(made, "push", *options, where, f"{made.head}:refs/heads/{made.branch}")
        said.append(
            f"{made.upstream.key}: {made.branch} {'unchanged' if lease == made.head else 'pushed'}: {made.head}"
        )
    return said


def _address(remote: str, upstream: Upstream) -> str:
    return f"{remote.rstrip('/')}/{upstream.repository.rpartition('/')[2]}"


def _lease(made: Request, commit: Commit, where: str) -> str:
    """What the branch is at the remote: ZERO if it is not there. Raises PullRequestError if others committed to it.

    Whoever commits on top, or rewrites what lies below, is the committer of the branch's head.
    """
    if where.removesuffix(".git").rstrip("/") == made.upstream.repository:
        raise PullRequestError(f"{made.upstream.key}: {where} is the upstream itself. Remedy: push to a fork of yours.")
    there = _remote_head(made, where, made.branch)
    if there not in (ZERO, made.head):
        _remote(made, "fetch", "--quiet", "--no-tags", where, there)
        said = git(made.repository, commit, "log", "-1", "--format=%an <%ae>%x09%cn <%ce>", there).strip()
        if said.split("\t") != [f"{commit.author} <{commit.email}>"] * 2:
            raise PullRequestError(
                f"{made.upstream.key}: {made.branch} at {where} ends in {there[:12]}, a commit of others "
                f"({said.replace(chr(9), ', ')}); nothing was pushed. Remedy: take it over, or move it elsewhere."
            )
    return there


def _remote_head(made: Request, where: str, name: str) -> str:
    said = _remote(made, "ls-remote", where, f"refs/heads/{name}").split()
    return said[0] if said else ZERO


def _remote(made: Request, *arguments: str) -> str:
    """git with a remote and the user's own configuration, which has the credentials; it never asks for a password."""
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_SSH_COMMAND": "ssh -o BatchMode=yes"}
    command = ["git", "-C", str(made.repository), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise PullRequestError(
            f"{made.upstream.key}: git {arguments[0]}: {done.stderr.strip()[-500:]}. Remedy: give git credentials that "
            "may read and write there (an ssh key in an agent, or a credential helper), or mend what it names."
        )
    return done.stdout


def create(requests: Sequence[Request], remote: str) -> list[str]:
    """Open a draft for each pushed branch with GitHub's `gh`, or give an open one its new text; returns a line each.

    Raises PullRequestError: no gh, or none that is logged in.
    """
    owner = re.split("[/:]", remote.rstrip("/"))[-1]
    said = []
    for made in requests:
        repository = made.upstream.repository.removeprefix("https://github.com/")
        texts = ["--title", (made.folder / "TITLE").read_text().strip(), "--body-file", str(made.folder / "TEXT.md")]
        listed = ["--repo", repository, "--head", made.branch, "--state", "open", "--json", "url", "--jq", ".[0].url"]
        if url := _gh(made, "list", *listed).strip():
            _gh(made, "edit", url, *texts)
            said.append(f"{made.upstream.key}: {url}: new text")
        else:
            to = ["--repo", repository, "--base", made.upstream.branch, "--head", f"{owner}:{made.branch}"]
            said.append(f"{made.upstream.key}: {_gh(made, 'create', '--draft', *to, *texts).strip()}")
    return said


def check_gh() -> None:
    """Raise PullRequestError unless there is a `gh` that is logged in: asked before anything is pushed."""
    try:
        done = subprocess.run(["gh", "auth", "status"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise PullRequestError("gh is not installed; nothing was pushed. Remedy: install GitHub's gh.") from None
    if done.returncode:
        raise PullRequestError("gh is not logged in; nothing was pushed. Remedy: gh auth login.")


def _gh(made: Request, *arguments: str) -> str:
    done = subprocess.run(["gh", "pr", *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise PullRequestError(
            f"{made.upstream.key}: gh pr {arguments[0]}: {done.stderr.strip()[-500:]}. Remedy: mend it."
        )
    return done.stdout
