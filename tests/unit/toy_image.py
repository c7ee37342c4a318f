"""A small repository that an image can be made of without a network: a toy base, two toy wheels, the toy upstream.

`Toy.compose` is the real one but for its base layer, which holds what Debian's would be asked for and takes a .deb from
the cache as the real one does.
"""

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import runs
import toy

from samebits.evidence import receipt
from samebits.image import compose
from samebits.image.layers import Layer, Writer, key_of
from samebits.image.plan import Deb, Image, Wheel
from samebits.image.store import fetch_all, place, verified
from samebits.judge import judge_run
from samebits.sources import records
from samebits.sources.fetch import file_sha256
from samebits.sources.pins import ROOT, Artefact, load_pins

UPSTREAMS = """\
[commit]
author = "toys"
email = "toys@localhost"
date = "2026-01-01T00:00:00+0000"

[upstream.toy]
path = "toy"
repository = "https://github.com/toys/toy"
branch = "main"
commit = "1111111111111111111111111111111111111111"
packages = ["toy"]
series = 3

[[upstream.toy.base]]
name = "1.0"
ships = true

[[upstream.toy.artefact]]
name = "toy-cpu"
version = "1.0"
base = "1.0"
file = "{file}"
sha256 = "{sha256}"
profiles = ["cpu"]
distribution = "toy"
local = "cpu"

[upstream.toy.artefact.metadata]
"Requires-Dist: torch==2.0+cpu" = "Requires-Dist: torch==2.0"
"Requires-Dist: setuptools==1" = ""

[upstream.compiler]
repository = ""

[[upstream.compiler.artefact]]
name = "compiler"
version = "1"
file = "compiler-1-py3-none-any.whl"
sha256 = "{zeros}"
profiles = []
"""
NATIVE = """\
library = []

[compiler]
artefact = "compiler-1-py3-none-any.whl"
cuda_artefact = "compiler-1-py3-none-any.whl"
target = "x86_64"
flags = []
cuda_flags = []
"""
DEB = b"a Debian package"
EXTENSION = """\
#include <Python.h>
#include <stdexcept>

int one();
static PyObject* value(PyObject*, PyObject*) {
    try {
        throw std::runtime_error(__FILE__);
    } catch (const std::exception& error) {
        return Py_BuildValue("is", one(), error.what());
    }
}
static PyMethodDef methods[] = {{"value", value, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "toy_torch", nullptr, 0, methods};
PyMODINIT_FUNC PyInit_toy_torch() { return PyModule_Create(&module); }
"""
MORE = "int one() { return 1; }\n"


@dataclass(frozen=True)
class Toy:
    """A committed repository `root`, a filled cache, and where the image goes."""

    root: Path
    cache: Path
    out: Path

    def compose(self) -> str:
        return compose.compose(self.root, "cpu", self.out, self.cache, lambda _: None)

    def commit(self) -> None:
        git(self.root, "add", "--all", "--force")
        git(self.root, "commit", "--quiet", "--message", "a commit")


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=toys", "-c", "user.email=toys@localhost", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True, text=True)
    return done.stdout


def base_layer(image: Image, debs: Sequence[Deb], cache: Path) -> Layer:
    """Stands for `debian.base_layer`: what dpkg would say of the locked packages, and the bytes of their files."""

    def write(writer: Writer) -> dict[str, str]:
        fetch_all(image, debs, cache)
        status = ""
        for deb in debs:
            writer.file(f"usr/lib/{deb.name}", verified(cache, deb).read_bytes())
            status += f"Package: {deb.name}\nStatus: install ok installed\n"
            status += f"Architecture: {deb.architecture}\nVersion: {deb.version}\n\n"
        writer.file("var/lib/dpkg/status", status.encode())
        return {deb.file: deb.sha256 for deb in debs}

    return Layer("base", key_of("base", image.epoch, tuple(debs)), write)


def keep(cache: Path, item: Deb | Wheel, data: bytes) -> None:
    path = place(cache, item)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def wheel(cache: Path, name: str, module: str) -> Wheel:
    """A wheel of one module with a command, in the cache."""
    path = cache / "made.whl"
    info = f"{name}-1.0.dist-info"
    files = {
        f"{module}.py": "def main():\n    pass\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: toy\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name}-run = {module}:main\n",
    }
    record = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(file), text)
    data = path.read_bytes()
    path.unlink()
    made = Wheel(name, "1.0", hashlib.sha256(data).hexdigest(), f"{name}-1.0-py3-none-any.whl")
    keep(cache, made, data)
    return made


def archive(cache: Path) -> Artefact:
    """The sources of an extension in the cache, and their pin."""
    info = "Metadata-Version: 2.4\nName: toy_torch\nVersion: 1.0\nRequires-Dist: torch\nRequires-Dist: onnx\n"
    files = {"PKG-INFO": info, "LICENSE": "a licence\n", "csrc/a.cpp": EXTENSION, "csrc/more/b.cpp": MORE}
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"toy_torch-1.0/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    name, digest = "toy_torch-1.0.tar.gz", hashlib.sha256(data.getvalue()).hexdigest()
    (cache / digest).mkdir(parents=True)
    (cache / digest / name).write_bytes(data.getvalue())
    return Artefact("toy-torch", "1.0", name, digest, (), metadata={"Requires-Dist: onnx": ""})


def make(folder: Path) -> Toy:
    """The repository, committed, and its cache."""
    root, cache = folder / "repository", folder / "cache"
    for name in ("image", "manifests/locks", "manifests/evidence/cpu", "patches", "scripts", "src/samebits"):
        (root / name).mkdir(parents=True)
    cache.mkdir()
    deb = Deb("libtoy", "1:2.0-1", "amd64", hashlib.sha256(DEB).hexdigest())
    keep(cache, deb, DEB)
    wheels = [wheel(cache, "torch", "torch"), wheel(cache, "helper", "helper")]
    shutil.copy(ROOT / "image" / "image.toml", root / "image")
    (root / "image" / "debian.lock").write_text(f"{deb.name} {deb.version} {deb.architecture} {deb.sha256}\n")
    lines = [f"{w.name} {w.version} {w.sha256} {w.file}\n" for w in wheels]
    (root / "image" / "cpu.lock").write_text("".join(sorted(lines)))
    locked = [f"{w.name}=={w.version} \\\n    --hash=sha256:{w.sha256}\n" for w in wheels]
    (root / "manifests" / "locks" / "cpu.txt").write_text("".join(sorted(locked)))
    source, pin = toy.release(folder / "released")
    (cache / pin.sha256).mkdir()
    source.rename(cache / pin.sha256 / pin.file)
    upstreams = UPSTREAMS.format(file=pin.file, sha256=pin.sha256, zeros="0" * 64)
    (root / "manifests" / "upstreams.toml").write_text(upstreams)
    (root / "manifests" / "native.toml").write_text(NATIVE)
    (root / "manifests" / "confirmations.toml").write_text("")
    (root / "manifests" / "evidence" / "bounds.json").write_text("{}")
    toy.series(root / "patches")
    upstream = load_pins(root / "manifests" / "upstreams.toml").upstreams["toy"]
    with zipfile.ZipFile(cache / pin.sha256 / pin.file) as archive:
        names = set(archive.namelist())
        read = lambda path: archive.read(path) if path in names else None  # noqa: E731
        changes = records.prove(read, upstream, upstream.base[0], root / "patches")
    records.write(root / "manifests" / "patched", upstream, upstream.base[0], root / "patches", changes)
    run = runs.make_run(folder / "run", 1)
    receipt.write(root / "manifests" / "evidence" / "cpu" / "receipt.json", judge_run(run, "zero", runs.BOUNDS))
    for name in ("LICENSE", "NOTICE", "README.md", "pyproject.toml", "scripts/launch_recipe.sh"):
        (root / name).write_text(f"{name}\n")
    (root / "src" / "samebits" / "cli.py").write_text("def app():\n    pass\n")
    git(root, "init", "--quiet")
    made = Toy(root, cache, folder / "out")
    made.commit()
    return made


def digest_of(path: Path) -> str:
    return file_sha256(path)


def manifest(layout: Path) -> dict[str, object]:
    return dict(json.loads((layout / "image.json").read_text()))
