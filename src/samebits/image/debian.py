"""The base layer: Debian, installed by mmdebstrap from the locked .debs alone, without a network.

The .debs lie in a folder that is a repository of its own; apt has nothing else to choose from. What the machine around
leaves in such a tree (names, addresses, logs, lists) is emptied or dropped.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from samebits.image.layers import Layer, Writer, key_of, write_tar
from samebits.image.plan import Deb, Image, ImageError
from samebits.image.store import fetch_all, verified

# Of the machine, or of the making: the runtime gives an image its own.
EMPTIED = ("etc/hostname", "etc/resolv.conf", "etc/apt/sources.list", "etc/machine-id")
DROPPED = r"dev/.|var/log/.|var/cache/(apt|ldconfig)/.|var/lib/apt/lists/.|etc/dpkg/dpkg.cfg.d/99mmdebstrap|.*-old$"


def base_layer(image: Image, debs: Sequence[Deb], cache: Path) -> Layer:
    """The layer `base`."""

    def write(writer: Writer) -> dict[str, str]:
        fetch_all(image, debs, cache)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".base-") as scratch:
            folder = Path(scratch)
            folder.chmod(0o755)
            _repository(debs, folder / "debs", cache)
            _bootstrap(image, debs, folder / "debs", folder / "base.tar")
            write_tar(writer, folder / "base.tar", EMPTIED, DROPPED)
        return {deb.file: deb.sha256 for deb in debs}

    return Layer("base", key_of("base", image.epoch, image.suite, EMPTIED, DROPPED, tuple(debs)), write)


def _repository(debs: Sequence[Deb], folder: Path, cache: Path) -> None:
    """A folder that apt takes for a repository of these packages."""
    folder.mkdir()
    stanzas = []
    for deb in debs:
        path = verified(cache, deb)
        shutil.copyfile(path, folder / deb.file)
        control = _run(["dpkg-deb", "--field", str(path)]).rstrip("\n")
        stanzas.append(f"{control}\nFilename: ./{deb.file}\nSize: {path.stat().st_size}\nSHA256: {deb.sha256}\n")
    (folder / "Packages").write_text("\n".join(stanzas))
    for path in folder.iterdir():
        path.chmod(0o644)


def _bootstrap(image: Image, debs: Sequence[Deb], repository: Path, tar: Path) -> None:
    command = ["mmdebstrap", "--quiet", "--variant=apt", "--format=tar", "--architectures=amd64"]
    command += [f"--include={','.join(deb.name for deb in debs)}", "--dpkgopt=force-unsafe-io"]
    command += [image.suite, str(tar), f"deb [trusted=yes] copy:{repository} ./"]
    # Nothing of this machine's environment: its umask is dealt with below, its locale and time zone are these.
    environment = {"SOURCE_DATE_EPOCH": str(image.epoch), "LC_ALL": "C.UTF-8", "TZ": "UTC", "HOME": "/nonexistent"}
    environment |= {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "TMPDIR": os.environ.get("TMPDIR", "/tmp")}
    _run(command, environment)


def _run(command: list[str], environment: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, umask=0o022, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise ImageError(
            f"{command[0]} is not installed. Remedy: `apt-get install mmdebstrap` (Debian, Ubuntu)."
        ) from None
    if done.returncode:
        said = "\n".join(line for line in done.stderr.splitlines() if line[:2] in ("E:", "W:"))[-1500:]
        raise ImageError(f"{command[0]} failed: {said or done.stderr[-800:]}\nRemedy: mend what it names.")
    return done.stdout
