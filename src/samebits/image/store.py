"""Fetches locked files into the content-addressed cache, many at once, by apt and pip; an old lock builds from it.

A file lies under its own sha256. One that was altered there is refused by name, never used and never replaced silently:
what changed it may have changed more.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from samebits.image.locking import apt, pip_tags, requirement
from samebits.image.plan import AGAIN, Deb, Image, ImageError, Wheel
from samebits.sources.fetch import file_sha256

Locked = Deb | Wheel


def place(cache: Path, item: Locked) -> Path:
    """Where the cache keeps a locked file."""
    return cache / item.sha256 / item.file


def verified(cache: Path, item: Locked) -> Path:
    """The cached file, hashed again. Raises ImageError if it is not what the lock says."""
    path = place(cache, item)
    digest = file_sha256(path)
    if digest != item.sha256:
        raise ImageError(
            f"{item.file}: the cached file's sha256 is {digest}, locked is {item.sha256}. "
            f"Remedy: find out what altered it, then remove {path}; it is fetched anew."
        )
    return path


def fetch_all(image: Image, items: Iterable[Locked], cache: Path) -> None:
    """Fetch what the cache has not. Raises ImageError, and then the cache holds what was had before."""
    missing = [item for item in items if not place(cache, item).is_file()]
    debs = [item for item in missing if isinstance(item, Deb)]
    wheels = [item for item in missing if isinstance(item, Wheel)]
    if not missing:
        return
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as scratch:
        folder = Path(scratch)
        if debs:
            _fetch_debs(image, debs, folder)
        for built in ([w for w in wheels if w.file.endswith(".whl")], [w for w in wheels if w.file.endswith(".gz")]):
            if built:
                _fetch_wheels(image, built, folder)
        for item in missing:
            _keep(item, folder / item.file, cache)


def _fetch_debs(image: Image, debs: Sequence[Deb], folder: Path) -> None:
    with apt(image) as run:
        shown = run.show(*(deb.name for deb in debs))
        for deb in debs:
            served = shown.get(deb.name)
            if served is None or served[1] != deb.version:
                there = f"it serves {served[1]}" if served else "it has no such package"
                raise ImageError(
                    f"{deb.name} {deb.version}: the Debian mirror no longer serves it ({there}). Remedy: `{AGAIN}`, "
                    "and commit the new image/debian.lock."
                )
        run("download", "-qq", *(f"{deb.name}={deb.version}" for deb in debs), folder=folder)


def _fetch_wheels(image: Image, wheels: Sequence[Wheel], folder: Path) -> None:
    asked = folder / "asked.txt"
    asked.write_text("".join(requirement(w.name, w.version, [w.sha256]) for w in wheels))
    command = [sys.executable, "-m", "pip", "--no-input", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--dest", str(folder), "--requirement", str(asked)]
    is_archive = not wheels[0].file.endswith(".whl")
    command += ["--no-binary", ":all:", "--no-build-isolation"] if is_archive else pip_tags(image)
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("WARNING"))[-1500:]
        raise ImageError(
            f"pip download failed:\n{said}\nRemedy: see that pip reaches its index; for a file that is no longer there "
            f"lock anew: `make lock`, `{AGAIN}`."
        )


def _keep(item: Locked, path: Path, cache: Path) -> None:
    if not path.is_file():
        raise ImageError(f"{item.file}: it did not come under this name. Remedy: `{AGAIN}`.")
    digest = file_sha256(path)
    if digest != item.sha256:
        raise ImageError(
            f"{item.file}: what is served has the sha256 {digest}, locked is {item.sha256}. "
            "Remedy: do not use it; find out why another file is served."
        )
    target = place(cache, item)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(path, target)
