"""The CPU image, built twice: elsewhere, under another host name, zone, locale, umask and number of threads.

The two builds run at once, each in a process of its own; they share what was fetched and nothing that was made.
"""

import dataclasses
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toy_image

from samebits.image import compose
from samebits.image.debian import base_layer
from samebits.image.delivery import IMAGE
from samebits.image.extension import compile_extension
from samebits.image.plan import load_debs, load_image, load_wheels
from samebits.image.store import fetch_all
from samebits.sources.fetch import cache_folder, fetch
from samebits.sources.pins import ROOT, load_pins
from samebits.sources.wheels import artefacts_of

BUILD = """
import sys, time
from pathlib import Path
from samebits.image.compose import compose
root, out, cache = map(Path, sys.argv[1:])
began = time.monotonic()
digest = compose(root, "cpu", out, cache)
print(f"built in {time.monotonic() - began:.0f} s")
print(digest)
"""


def clone(folder: Path) -> Path:
    """The commit at hand, whatever the work tree holds beside it."""
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(folder)], check=True)
    return folder


def fetched(cache: Path) -> Path:
    """A new cache that has what was fetched, and no layer, library or compiler."""
    image, pins = load_image(ROOT), load_pins()
    fetch_all(image, [*load_debs(ROOT), *load_wheels(ROOT, "cpu")], cache_folder())
    for _, artefact in artefacts_of(pins, "cpu", image.python_version):
        fetch(artefact)
    cache.mkdir()
    for kept in cache_folder().iterdir():
        if len(kept.name) == 64:
            (cache / kept.name).symlink_to(kept)
    return cache


def test_two_builds_give_the_same_digest(tmp_path: Path) -> None:
    one, two = clone(tmp_path / "one"), clone(tmp_path / "deeper" / "two")
    for path in two.rglob("*"):
        os.utime(path, (1, 1), follow_symlinks=False)
    cache, build = fetched(tmp_path / "cache"), [sys.executable, "-c", BUILD]
    commands = [[*build, str(one), str(tmp_path / "first"), str(cache_folder())]]
    commands.append(["unshare", "--uts", "sh", "-c", 'hostname elsewhere && umask 077 && exec "$@"', "sh"])
    commands[1] += [*build, str(two), str(tmp_path / "second"), str(cache)]
    other = {
        "TZ": "Pacific/Chatham",
        "LC_ALL": "tr_TR.UTF-8",
        "LANG": "C",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "7",
    }
    running = [
        subprocess.Popen(command, env={**os.environ, **changed}, stdout=subprocess.PIPE, text=True)
        for command, changed in zip(commands, ({}, other), strict=True)
    ]
    said = [process.communicate()[0] for process in running]
    print(*said, sep="\n")
    assert [process.returncode for process in running] == [0, 0]
    first, second = (text.splitlines()[-1] for text in said)
    assert first == second

    manifests = [(tmp_path / name / "image.json").read_bytes() for name in ("first", "second")]
    assert manifests[0] == manifests[1], "the manifests are the same too"
    unpacked = sum(layer["unpacked"] for layer in IMAGE.read(tmp_path / "first" / "image.json")["image"]["layers"])
    assert unpacked <= 10e9

    began = time.monotonic()
    assert compose.compose(one, "cpu", tmp_path / "first", cache_folder()) == first
    print(f"nothing changed: {time.monotonic() - began:.1f} s")


def test_an_extension_is_compiled_in_the_base_and_nothing_of_the_machine_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small one; Transformer Engine's is compiled by the same function when the delivery is built."""
    cache, image = cache_folder(), load_image(ROOT)
    base = base_layer(image, load_debs(ROOT), cache)
    compose.obtain(base, image.epoch, cache, print)
    toy = dataclasses.replace(image.extension, include=("/usr/include/python3.13",), needs=("libtoy.so.1",))
    described = dataclasses.replace(image, extension=toy)

    def compiled(folder: Path) -> bytes:
        pin = toy_image.archive(folder)
        return compile_extension(described, pin, [], compose.blob_path(cache, base.key), folder)

    first = compiled(tmp_path / "one")
    monkeypatch.setenv("CPATH", "/nowhere")
    monkeypatch.setenv("LANG", "tr_TR.UTF-8")
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert compiled(tmp_path / "deeper" / "two") == first
    assert b"source/csrc/a.cpp" in first and b"libtoy.so.1" in first and b"PyInit_toy_torch" in first
    assert str(tmp_path).encode() not in first


@pytest.mark.evidence
def test_transformer_engines_extension_is_the_recorded_one_when_it_is_compiled_again(tmp_path: Path) -> None:
    cache, image, pins = cache_folder(), load_image(ROOT), load_pins()
    base = base_layer(image, load_debs(ROOT), cache)
    compose.obtain(base, image.epoch, cache, print)
    wheels = [wheel for wheel in load_wheels(ROOT, "gpu") if wheel.name in image.extension.wheels]
    fetch_all(image, wheels, cache)
    for wheel in wheels:
        (tmp_path / wheel.sha256).symlink_to(cache / wheel.sha256)
    pin = pins.by_file[image.extension.artefact]
    data = compile_extension(image, pin, wheels, compose.blob_path(cache, base.key), tmp_path)
    assert hashlib.sha256(data).hexdigest() == image.extension.sha256
