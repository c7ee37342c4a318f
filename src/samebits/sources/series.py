"""A patch series as git commits: exported as a `git am` series for a base, and put onto a new branch of a checkout.

The export needs no checkout: the touched files as the base has them are context enough for `git am`. One commit a patch
folder; author and date come from the pins, so that the same patches give the same bytes on every machine.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from samebits.errors import SamebitsError
from samebits.sources.patching import Patch, Read
from samebits.sources.pins import Commit


class SeriesError(SamebitsError):
    """git refused. The message names the command, what git said and the remedy."""


def export(read: Read, steps: Sequence[tuple[Patch, dict[str, bytes]]], commit: Commit, out: Path) -> list[Path]:
    """Write the steps of `plan_series` as NNNN-subject.patch files into `out`, replacing what was there.

    Raises SeriesError.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="samebits-series-") as scratch:
        repository = Path(scratch)
        git(repository, commit, "init", "--quiet", "--initial-branch=series")
        touched = {path: read(path) for _, changed in steps for path in changed}
        _commit(repository, commit, "base", {path: data for path, data in touched.items() if data is not None})
        for patch, changed in steps:
            if changed:
                _commit(repository, commit, patch.message, changed)
        root = git(repository, commit, "rev-list", "--max-parents=0", "HEAD").strip()
        options = ["--quiet", "--zero-commit", "--no-signature", "--full-index", f"--output-directory={out.absolute()}"]
        git(repository, commit, "format-patch", *options, f"{root}..HEAD")
    return sorted(out.glob("*.patch"))


def apply_to_checkout(
    checkout: Path, base: str, branch: str, series: Sequence[Path], commit: Commit, tree: Path
) -> None:
    """Add a work tree `tree` of `checkout` at commit `base` on the new branch `branch`, with the series as commits.

    The checkout's own work tree and branches stay as they are. Raises SeriesError, and then has removed `tree` again.
    """
    git(checkout, commit, "worktree", "add", "--quiet", "-b", branch, str(tree.absolute()), base)
    try:
        if series:
            am = ("am", "--quiet", "--committer-date-is-author-date", "--keep-cr", "--keep-non-patch")
            git(tree, commit, *am, *(str(path.absolute()) for path in series))
    except SeriesError:
        git(checkout, commit, "worktree", "remove", "--force", str(tree.absolute()))
        git(checkout, commit, "branch", "-D", branch)
        raise


def _commit(repository: Path, commit: Commit, message: str, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_bytes(data)
    git(repository, commit, "add", "--all", "--force")
    git(repository, commit, "commit", "--quiet", "--allow-empty", "--no-verify", "--message", message)


def git(folder: Path, commit: Commit, *arguments: str) -> str:
    """Run git in `folder` as the pinned author, without the user's configuration. Raises SeriesError."""
    who = {
        f"GIT_{role}_{key}": value
        for role in ("AUTHOR", "COMMITTER")
        for key, value in (("NAME", commit.author), ("EMAIL", commit.email), ("DATE", commit.date))
    }
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    alone = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "GIT_TERMINAL_PROMPT": "0", "TZ": "UTC"}
    command = ["git", "-C", str(folder), "-c", "core.autocrlf=false", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**kept, **who, **alone}, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-1000:]
        raise SeriesError(
            f"git {arguments[0]} in {folder} failed: {said}. Remedy: mend what git names and run it again."
        )
    return done.stdout
