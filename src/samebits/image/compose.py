"""Composes an image: layers made or taken from the cache, an OCI layout written beside and moved into place at once.

The digest depends on the commit, the locks, the pins and the patches, and on nothing of the machine. A layout folder
has the OCI files, `listings/` (a line a path of each layer), `sbom.json` and, last, `image.json`, its manifest.
"""

import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from samebits.image import delivery
from samebits.image.debian import base_layer
from samebits.image.extension import build_extension, extension_key
from samebits.image.layers import MEDIA_TYPE, Layer, Made, Writer, key_of, make, write_wheel
from samebits.image.plan import Image, ImageError, Wheel, check, load_debs, load_image, load_wheels
from samebits.image.store import fetch_all, verified
from samebits.sources.fetch import file_sha256
from samebits.sources.pins import Pins, load_pins
from samebits.sources.records import series_sha256
from samebits.sources.wheels import artefacts_of, build_profile

HOME = "opt/samebits"
INVENTORY = f"{HOME}/inventory.json"
WHEEL_MAKERS = ("native", "nvrtc", "patching", "patchset", "wheels")  # of sources: what decides a patched wheel's bytes
UNUSED_S = 30 * 24 * 3600.0  # a cached layer that no build took for so long goes
Say = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """The clean commit that an image is made from: the repository, its commit, pins and description."""

    root: Path
    commit: str
    pins: Pins
    image: Image

    @property
    def patches(self) -> Path:
        return self.root / "patches"


def clean_source(root: Path) -> Source:
    """The repository at `root`. Raises ImageError if anything in it is not committed."""
    changed = git(root, "status", "--porcelain", "--untracked-files=all").splitlines()
    if changed:
        raise ImageError(
            f"the repository is not clean: {changed[0][3:]}{' and others' if changed[1:] else ''}. "
            "Remedy: commit it, or remove it; an image is made of a commit."
        )
    commit = git(root, "rev-parse", "--verify", "HEAD").strip()
    return Source(root, commit, load_pins(root / "manifests" / "upstreams.toml"), load_image(root))


def git(root: Path, *arguments: str) -> str:
    """Standard output of git in the repository. Raises ImageError."""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise ImageError(f"git {arguments[0]} in {root}: {done.stderr.strip()[-500:]}. Remedy: build from a checkout.")
    return done.stdout


def compose(root: Path, profile: str, out: Path, cache: Path, say: Say = print) -> str:
    """Compose the image of a profile into the folder `out` and return its digest, "sha256:…".

    root: a clean checkout. out: new, or a layout of an earlier build. cache: of files and layers.
    Raises ImageError, and what the sources raise; `out` is then as it was.
    """
    source = clean_source(root)
    wheels = load_wheels(root, profile)
    check(root, profile, source.image, wheels)
    refuse_other(out)
    with locked(cache):
        made = first_layers(source, profile, wheels, cache, say)
        made.append(obtain(last_layer(source, profile, made, cache), source.image.epoch, cache, say))
        refuse_overlaps(made, cache)
        digest = write_layout(source, profile, made, out, cache)
        forget_unused(cache)
    return digest


def first_layers(source: Source, profile: str, wheels: Sequence[Wheel], cache: Path, say: Say) -> list[Made]:
    """The layers below our own files, from slow to fast change."""
    image = source.image
    named = [(name, [w for w in wheels if image.layer_of(w.name) == name]) for name in ("torch", "dependencies")]
    base = base_layer(image, load_debs(source.root), cache)
    with ThreadPoolExecutor(2) as pool:  # inflating, hashing and compressing leave the interpreter's lock alone
        compiler = pool.submit(obtain, base, image.epoch, cache, say)

        def base_blob() -> Path:
            compiler.result()
            return blob_path(cache, base.key)

        others = [wheel_layer(name, image, some, cache) for name, some in named]
        others.append(patched_layer(source, profile, wheels, base.key, base_blob, cache))
        made = list(pool.map(lambda layer: obtain(layer, image.epoch, cache, say), others))
        return [compiler.result(), *made]


def wheel_layer(name: str, image: Image, wheels: Sequence[Wheel], cache: Path) -> Layer:
    """A layer of locked wheels."""

    def write(writer: Writer) -> dict[str, str]:
        fetch_all(image, wheels, cache)
        for wheel in wheels:
            path = verified(cache, wheel)
            if path.suffix == ".whl":
                write_wheel(writer, path, image.site, image.stray)
            else:
                with tempfile.TemporaryDirectory(prefix="samebits-wheel-") as scratch:
                    write_wheel(writer, _built(path, image, Path(scratch)), image.site, image.stray)
        return {wheel.file: wheel.sha256 for wheel in wheels}

    archives = any(not wheel.file.endswith(".whl") for wheel in wheels)
    maker = importlib.metadata.version("setuptools") if archives else ""
    if archives and maker != next((w.version for w in wheels if w.name == "setuptools"), maker):
        raise ImageError(f"setuptools {maker} is installed here, another version is locked. Remedy: run `make env`.")
    return Layer(name, key_of("wheels", image.epoch, image.site, image.stray, maker, tuple(wheels)), write)


def _built(archive: Path, image: Image, folder: Path) -> Path:
    """The wheel of a source archive that holds Python alone, made by the locked setuptools."""
    command = [sys.executable, "-m", "pip", "--no-input", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--wheel-dir", str(folder), str(archive)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(image.epoch), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, umask=0o022)
    made = sorted(folder.glob("*-none-any.whl"))
    if done.returncode or len(made) != 1:
        raise ImageError(f"{archive.name}: no wheel for any platform came of it: {done.stderr[-800:]}")
    return made[0]


def patched_layer(
    source: Source, profile: str, wheels: Sequence[Wheel], base: str, base_blob: Callable[[], Path], cache: Path
) -> Layer:
    """The layer of the patched upstream wheels, which are built when the layer is, and of the extension beside them.

    base, base_blob: the key of the base layer, and what gives its blob: the extension's compiler.
    """
    image, pins = source.image, source.pins
    pinned = artefacts_of(pins, profile, image.python_version)
    is_extended = image.extension.upstream in {upstream.key for upstream, _ in pinned}
    tools = [Path(__file__).parents[1] / "sources" / f"{name}.py" for name in WHEEL_MAKERS]
    key = key_of(
        "patched",
        image.epoch,
        image.site,
        [(upstream.key, upstream.series, artefact) for upstream, artefact in pinned],
        [series_sha256(source.patches, upstream.key) for upstream, _ in pinned],
        [hashlib.sha256(path.read_bytes()).hexdigest() for path in (*tools, source.root / "manifests" / "native.toml")],
        extension_key(image, pins, wheels, base) if is_extended else "",
    )

    def write(writer: Writer) -> dict[str, str]:
        with tempfile.TemporaryDirectory(dir=cache, prefix=".wheels-") as scratch:
            folder, parts = Path(scratch), {}
            for built in build_profile(pins, profile, image.python_version, source.patches, folder, cache):
                write_wheel(writer, built.path, image.site)
                parts[built.path.name] = built.sha256
            if is_extended:
                built = build_extension(image, pins, wheels, base, base_blob, folder, cache)
                write_wheel(writer, built.path, image.site)
                parts[built.path.name] = built.sha256
        return parts

    return Layer("patched", key, write)


def last_layer(source: Source, profile: str, below: Sequence[Made], cache: Path) -> Layer:
    """samebits itself, as committed, and the inventory of what lies below: what a run in it says of itself."""
    image = source.image
    patched = below[-1]
    records = {
        path: what.split()[0]
        for path, what in read_listing(listing_path(cache, patched.key)).items()
        if path.endswith(".dist-info/RECORD")
    }
    lock = source.root / "manifests" / "locks" / f"{profile}.txt"
    inventory = {
        "schema": "samebits.inventory/1",
        "profile": profile,
        "git_commit": source.commit,
        "lock": {"name": lock.name, "sha256": file_sha256(lock)},
        "wheels": patched.parts,
        "records": records,
        "layers": {made.name: made.diff_id for made in below},
    }
    text = (json.dumps(inventory, indent=1, sort_keys=True) + "\n").encode()

    def write(writer: Writer) -> dict[str, str]:
        archive = ["git", "-C", str(source.root), "archive", "--format=tar", source.commit, "--", *image.files]
        with tempfile.TemporaryFile() as file:
            if subprocess.run(archive, stdout=file).returncode:
                raise ImageError("image.toml: files: git archive has not all of them. Remedy: correct `files`.")
            file.seek(0)
            with tarfile.open(fileobj=file) as tar:
                for info in tar:
                    stream = tar.extractfile(info) if info.isreg() else None
                    if stream:
                        writer.file(f"{HOME}/{info.name}", stream.read(), bool(info.mode & 0o100))
        writer.file(INVENTORY, text)
        writer.file(f"{image.site}/samebits.pth", f"/{HOME}/src\n".encode())
        script = "#!/usr/bin/python3\nfrom samebits.cli import app\n\napp()\n"
        writer.file("usr/local/bin/samebits", script.encode(), True)
        return {"inventory.json": hashlib.sha256(text).hexdigest()}

    return Layer("samebits", key_of("samebits", image.epoch, image.site, image.files, text), write)


@contextmanager
def locked(cache: Path) -> Iterator[None]:
    """One build at a time in a cache, which is swept of what a killed one left."""
    (cache / "image").mkdir(parents=True, exist_ok=True)
    with (cache / "image" / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for left in (
            *cache.glob(".fetch-*"),
            *cache.glob(".base-*"),
            *cache.glob(".wheels-*"),
            *cache.glob(".extension-*"),
            *(cache / "image").glob(".*"),
        ):
            shutil.rmtree(left)
        yield


def blob_path(cache: Path, key: str) -> Path:
    return cache / "image" / f"{key}.tar.zst"


def listing_path(cache: Path, key: str) -> Path:
    return cache / "image" / f"{key}.txt"


def obtain(layer: Layer, epoch: int, cache: Path, say: Say) -> Made:
    """The layer from the cache, verified, or made. Raises ImageError for a cached one that was altered."""
    note, blob, listing = (
        cache / "image" / f"{layer.key}.json",
        blob_path(cache, layer.key),
        listing_path(cache, layer.key),
    )
    if note.is_file():
        made = Made(**json.loads(note.read_text()))
        for path, digest in ((blob, made.digest), (listing, made.listing)):
            found = file_sha256(path) if path.is_file() else "nothing"
            if found != digest:
                raise ImageError(
                    f"layer {layer.name}: the cached {path.name} has the sha256 {found}, noted is {digest}. "
                    f"Remedy: find out what altered it, then remove {note}; the layer is made anew."
                )
        os.utime(note)
        say(f"layer {layer.name}: unchanged")
        return made
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=note.parent, prefix=".layer-") as scratch:
        made = make(layer, epoch, Path(scratch) / "blob", Path(scratch) / "listing")
        for name, path in (("blob", blob), ("listing", listing)):
            (Path(scratch) / name).chmod(0o444)
            os.replace(Path(scratch) / name, path)
        (Path(scratch) / "note").write_text(json.dumps(asdict(made), indent=1))
        os.replace(Path(scratch) / "note", note)
    seconds = time.monotonic() - began
    say(f"layer {layer.name}: {made.size / 1e6:.0f} MB of {made.unpacked / 1e6:.0f} MB, {seconds:.0f} s")
    return made


def forget_unused(cache: Path) -> None:
    """Remove cached layers that no build took for a month."""
    for note in (cache / "image").glob("*.json"):
        if time.time() - note.stat().st_mtime > UNUSED_S:
            note.unlink()
            blob_path(cache, note.stem).unlink(missing_ok=True)
            listing_path(cache, note.stem).unlink(missing_ok=True)


def read_listing(path: Path) -> dict[str, str]:
    """path -> what a layer has there, a file's sha256, "folder", "->TARGET" or "=TARGET", and its permissions."""
    found = {}
    for line in path.read_text().splitlines():
        what, mode, name = line.split(" ", 2)
        found[name] = f"{what} {mode}"
    return found


def refuse_overlaps(made: Sequence[Made], cache: Path) -> None:
    """Refuse a file that two layers bring: the upper one would hide the lower. Raises ImageError."""
    seen: dict[str, str] = {}
    for layer in made:
        for path, what in read_listing(listing_path(cache, layer.key)).items():
            if not what.startswith("folder") and seen.setdefault(path, layer.name) != layer.name:
                raise ImageError(
                    f"{path} is in layer {seen[path]} and in layer {layer.name}. Remedy: leave one of the two out."
                )


def refuse_other(out: Path) -> None:
    """Refuse an output that is neither new nor a layout. Raises ImageError."""
    if out.exists() and not (out / "oci-layout").is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise ImageError(f"{out} is there, and is no image. Remedy: choose another folder.")


def write_layout(source: Source, profile: str, made: Sequence[Made], out: Path, cache: Path) -> str:
    """Write the OCI layout of these layers, and move it to `out` in one step. Returns the digest."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in out.parent.glob(f".{out.name}.partial-*"):
        shutil.rmtree(left)
    partial = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.partial-"))
    partial.chmod(0o755)
    blobs = partial / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    (partial / "listings").mkdir()
    for layer in made:
        _link(blob_path(cache, layer.key), blobs / layer.digest)
        shutil.copyfile(listing_path(cache, layer.key), partial / "listings" / f"{layer.name}.txt")
    config = _put(blobs, _config(source, profile, made))
    descriptors = [{"mediaType": MEDIA_TYPE, "digest": f"sha256:{m.digest}", "size": m.size} for m in made]
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", **config},
        "layers": descriptors,
    }
    descriptor = {"mediaType": manifest["mediaType"], **_put(blobs, manifest)}
    (partial / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    (partial / "index.json").write_bytes(_json({"schemaVersion": 2, "manifests": [descriptor]}))
    delivery.describe(source.root, source.pins, source.image, profile, source.commit, made, partial)
    _swap(partial, out)
    return str(descriptor["digest"])


def _config(source: Source, profile: str, made: Sequence[Made]) -> dict[str, Any]:
    image, created = source.image, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(source.image.epoch))
    labels = {
        "org.opencontainers.image.revision": source.commit,
        "org.opencontainers.image.title": f"samebits-{profile}",
    }
    return {
        "created": created,
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": list(image.environment), "Cmd": list(image.command), "Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.diff_id}" for layer in made]},
        "history": [{"created": created, "created_by": f"samebits build image: {layer.name}"} for layer in made],
    }


def _json(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _put(blobs: Path, document: Any) -> dict[str, Any]:
    """Write a document as a blob; its digest and size."""
    data = _json(document)
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"digest": f"sha256:{digest}", "size": len(data)}


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


def _swap(new: Path, out: Path) -> None:
    """Put `new` where `out` is. Between the two renames there is no `out`, and never half of one."""
    old = new.with_name(f"{new.name}-old")
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)
