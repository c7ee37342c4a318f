"""Fetches a pinned release file through pip, by name, version and sha256, into a content-addressed cache.

A cached file is hashed again at every use: one that was cut short or altered is dropped and fetched anew.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from samebits.errors import SamebitsError
from samebits.sources.pins import ROOT, Artefact


class FetchError(SamebitsError):
    """A release file cannot be had, or is not the pinned one. The message names file, cause and remedy."""


def cache_folder() -> Path:
    """SAMEBITS_CACHE, else build/cache/sources in the repository."""
    return Path(os.environ.get("SAMEBITS_CACHE") or ROOT / "build" / "cache" / "sources").absolute()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(artefact: Artefact, cache: Path | None = None) -> Path:
    """The path of the verified file, fetched if the cache has no sound copy. Raises FetchError."""
    folder = (cache or cache_folder()) / artefact.sha256
    path = folder / artefact.file
    if path.is_file():
        if file_sha256(path) == artefact.sha256:
            return path
        path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as scratch:
        download(artefact, Path(scratch))
        got = Path(scratch) / artefact.file
        if not got.is_file():
            names = ", ".join(sorted(p.name for p in Path(scratch).iterdir() if p.name != "request.txt")) or "nothing"
            raise FetchError(f"{artefact.file}: the package index gave {names}. Remedy: correct `file` in the pins.")
        digest = file_sha256(got)
        if digest != artefact.sha256:
            raise FetchError(
                f"{artefact.file}: its sha256 is {digest}, pinned is {artefact.sha256}. "
                "Remedy: do not use this file; find out why the package index serves another one."
            )
        os.replace(got, path)
    return path


def download(artefact: Artefact, folder: Path) -> None:
    """Let pip put the file into `folder`; pip itself refuses one of another hash. Raises FetchError."""
    request = folder / "request.txt"
    request.write_text(f"{artefact.name}=={artefact.version} --hash=sha256:{artefact.sha256}\n")
    command = [sys.executable, "-m", "pip", "--no-input", "download"]
    command += ["--quiet", "--no-deps", "--require-hashes", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--dest", str(folder), "--requirement", str(request), *_target(artefact)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("WARNING"))[-2000:]
        raise FetchError(
            f"{artefact.name}=={artefact.version} ({artefact.file}): pip download failed:\n{said}\n"
            "Remedy: see that pip reaches its package index here; if the hash differs, do not use the file."
        )


def _target(artefact: Artefact) -> list[str]:
    """Options that let pip choose the pinned file on any machine, whatever its Python and platform."""
    from packaging.utils import parse_wheel_filename

    if not artefact.file.endswith(".whl"):  # pip runs its setup to read its metadata, with what is installed here
        return ["--no-binary", ":all:", "--no-build-isolation"]
    tags = sorted(parse_wheel_filename(artefact.file)[3], key=str)
    options = ["--only-binary", ":all:", "--implementation", "cp"]
    python = next((tag.interpreter[2:] for tag in tags if tag.abi == tag.interpreter), "312")
    options += ["--python-version", f"{python[0]}.{python[1:]}"]
    for platform in dict.fromkeys(tag.platform for tag in tags if tag.platform != "any"):
        options += ["--platform", platform]
    return options
