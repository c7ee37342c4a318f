"""The CPU image, built twice: elsewhere, under another host name, zone, locale, umask and number of threads."""

import os
import subprocess
import sys
import time
from pathlib import Path

from samebits.image import compose
from samebits.image.delivery import IMAGE
from samebits.sources.fetch import cache_folder
from samebits.sources.pins import ROOT

AGAIN = """
import os, sys
from pathlib import Path
from samebits.image.compose import compose
root, out, cache = map(Path, sys.argv[1:])
print(compose(root, "cpu", out, cache))
"""


def clone(folder: Path) -> Path:
    """The commit at hand, whatever the work tree holds beside it."""
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(folder)], check=True)
    return folder


def test_two_builds_give_the_same_digest(tmp_path: Path) -> None:
    began = time.monotonic()
    first = compose.compose(clone(tmp_path / "one"), "cpu", tmp_path / "first", cache_folder())
    print(f"first build: {time.monotonic() - began:.0f} s")

    other, cache = clone(tmp_path / "deeper" / "two"), tmp_path / "cache"
    for path in other.rglob("*"):
        os.utime(path, (1, 1), follow_symlinks=False)
    cache.mkdir()
    for kept in cache_folder().iterdir():  # what was fetched, and no layer
        if len(kept.name) == 64:
            (cache / kept.name).symlink_to(kept)
    began = time.monotonic()
    command = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere && umask 077 && exec "$@"', "sh"]
    command += [sys.executable, "-c", AGAIN, str(other), str(tmp_path / "second"), str(cache)]
    environment = {**os.environ, "TZ": "Pacific/Chatham", "LC_ALL": "tr_TR.UTF-8", "LANG": "C", "OMP_NUM_THREADS": "1"}
    environment["PYTHONHASHSEED"] = "7"
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    print(f"second build: {time.monotonic() - began:.0f} s")
    assert done.stdout.splitlines()[-1] == first

    one, two = ((tmp_path / name / "image.json").read_bytes() for name in ("first", "second"))
    assert one == two, "the manifests are the same too"
    unpacked = sum(layer["unpacked"] for layer in IMAGE.read(tmp_path / "first" / "image.json")["image"]["layers"])
    assert unpacked <= 10e9

    began = time.monotonic()
    assert compose.compose(tmp_path / "one", "cpu", tmp_path / "first", cache_folder()) == first
    print(f"nothing changed: {time.monotonic() - began:.1f} s")
