"""Verifies an image against its manifest: everything that can be derived again is, and the first difference is named.

From outside in: the OCI documents, each layer's bytes and paths, what the image's own files say it was made of, the
evidence, and the commit if a repository is at hand.
"""

import hashlib
import io
import posixpath
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from samebits.evidence import strictjson
from samebits.image import delivery
from samebits.image.compose import HOME, INVENTORY, git, read_listing
from samebits.image.delivery import IMAGE, LISTINGS, MANIFEST, SBOM
from samebits.image.layers import what_is
from samebits.image.plan import Image, ImageError, check, load_debs, load_image, load_wheels
from samebits.sources.fetch import file_sha256
from samebits.sources.pins import Pins, load_pins

REMEDY = "Remedy: take the layout from its origin again, or build it again from the commit."


def verify(layout: Path, repository: Path | None = None) -> dict[str, Any]:
    """The manifest of the layout, if it says what the layout holds. Raises ImageError with the first difference.

    repository: a checkout that has the image's commit and the evidence that the manifest names.
    """
    document = IMAGE.read(layout / MANIFEST)
    _documents(layout, document)
    names = [layer["name"] for layer in document["image"]["layers"]]
    for layer in document["image"]["layers"]:
        _layer(layout, layer)
    with tempfile.TemporaryDirectory(prefix="samebits-verify-") as scratch:
        root = _unpack(layout, document["image"]["layers"][-1], Path(scratch))
        _made_of(layout, document, root, names)
        if repository is not None:
            _repository(document, root, repository)
    return document


def record(layout: Path, repository: Path) -> Path:
    """Verify the layout, and put its manifest where deliveries are committed: manifests/delivery/DIGEST.json.

    `newest` beside it names it from then on. Raises ImageError: for an image that lacks something, of a commit that is
    not in the history of the checkout, or that is not what its manifest says.
    """
    document = IMAGE.read(layout / MANIFEST)
    if document["lacking"]:
        raise ImageError(
            f"{layout}: it is no delivery: {document['lacking']}. Remedy: record an image that lacks nothing."
        )
    commit = document["source"]["git_commit"]
    if commit not in git(repository, "rev-list", "HEAD").split():
        raise ImageError(
            f"{layout}: its commit {commit} is not in the history here. Remedy: build it of a commit that is."
        )
    verify(layout, repository)
    digest = document["image"]["digest"].removeprefix("sha256:")
    path = repository / "manifests" / "delivery" / f"{digest}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    IMAGE.write(path, document)
    (path.parent / "newest").write_text(f"{digest}\n")
    return path


def compare(what: str, expected: object, found: object) -> None:
    """Raise ImageError with the innermost place in which two values differ."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted(expected.keys() | found.keys()):
            compare(f"{what}: {key}", expected.get(key, "nothing"), found.get(key, "nothing"))
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for number, pair in enumerate(zip(expected, found, strict=True)):
            compare(f"{what}: {number}", *pair)
    elif expected != found:
        raise ImageError(f"{what}: expected {str(expected)[:200]}, found {str(found)[:200]}. {REMEDY}")


def _documents(layout: Path, document: dict[str, Any]) -> None:
    image = document["image"]
    index = _json(layout / "index.json", "index.json")
    compare("index.json", {"schemaVersion": 2, "manifests": 1}, {**index, "manifests": len(index.get("manifests", []))})
    compare("index.json: digest", image["digest"], index["manifests"][0]["digest"])
    manifest = strictjson.loads(_blob(layout, image["digest"], "the OCI manifest"))
    compare("the OCI manifest: config", image["config"], manifest["config"]["digest"])
    config = strictjson.loads(_blob(layout, image["config"], "the config"))
    for key, here, there in (
        (
            "layers",
            [[x["digest"], x["size"]] for x in image["layers"]],
            [[x["digest"], x["size"]] for x in manifest["layers"]],
        ),
        ("diff_ids", [layer["diff_id"] for layer in image["layers"]], config["rootfs"]["diff_ids"]),
        ("revision", document["source"]["git_commit"], config["config"]["Labels"]["org.opencontainers.image.revision"]),
    ):
        compare(f"the OCI manifest and config: {key}", here, there)
    compare(SBOM, document["sbom"], file_sha256(layout / SBOM) if (layout / SBOM).is_file() else "nothing")


def _json(path: Path, name: str) -> dict[str, Any]:
    try:
        return dict(strictjson.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise ImageError(f"{name}: {error}. {REMEDY}") from None


def _blob(layout: Path, digest: str, what: str) -> bytes:
    path = layout / "blobs" / digest.replace(":", "/")
    data = path.read_bytes() if path.is_file() else b""
    compare(what, digest, f"sha256:{hashlib.sha256(data).hexdigest()}" if data else "nothing")
    return data


def _layer(layout: Path, layer: dict[str, Any]) -> None:
    """Compare a layer's listing, entries, tar and blob with the manifest; the first path that differs is named."""
    import zstandard

    what, listing = f"layer {layer['name']}", layout / LISTINGS / f"{layer['name']}.txt"
    compare(f"{what}: its listing", layer["listing"], file_sha256(listing) if listing.is_file() else "nothing")
    listed, found, last = read_listing(listing), {}, "its first entry"
    inner = hashlib.sha256()
    try:
        for path, entry in entries(layout, layer, inner):
            last, found[path] = path, entry
            compare(f"{what}: {path}", listed.get(path, "nothing"), entry)
    except (OSError, tarfile.TarError, zstandard.ZstdError) as error:
        raise ImageError(f"{what}: after {last}: the blob cannot be read: {error}. {REMEDY}") from None
    compare(what, listed, found)
    compare(f"{what}: its tar", layer["diff_id"], f"sha256:{inner.hexdigest()}")
    compare(f"{what}: its blob", layer["digest"], f"sha256:{file_sha256(_path(layout, layer))}")


def _path(layout: Path, layer: dict[str, Any]) -> Path:
    return layout / "blobs" / str(layer["digest"]).replace(":", "/")


class _Hashing(io.RawIOBase):
    """A stream that hashes what is read from it."""

    def __init__(self, stream: Any, sha256: Any) -> None:
        self._stream, self._sha256 = stream, sha256

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._sha256.update(data)
        return bytes(data)


def entries(layout: Path, layer: dict[str, Any], sha256: Any) -> Iterator[tuple[str, str]]:
    """path and what it is, as listings say it, of each entry of a layer's blob; hashes the whole tar."""
    for info, data in _read(layout, layer, sha256):
        yield info.name, what_is(info, data)


def _read(layout: Path, layer: dict[str, Any], sha256: Any) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    import zstandard

    with _path(layout, layer).open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as plain:
        stream = _Hashing(plain, sha256)
        with tarfile.open(fileobj=cast(BinaryIO, stream), mode="r|") as tar:
            for info in tar:
                content = tar.extractfile(info) if info.isreg() else None
                yield info, content.read() if content else b""
        while stream.read(1 << 20):
            pass


def _unpack(layout: Path, layer: dict[str, Any], folder: Path) -> Path:
    """The files of the repository that lie in the last layer."""
    for info, data in _read(layout, layer, hashlib.sha256()):
        if info.isreg() and info.name.startswith(f"{HOME}/") and ".." not in info.name.split("/"):
            path = folder / posixpath.relpath(info.name, HOME)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return folder


def _made_of(layout: Path, document: dict[str, Any], root: Path, names: list[str]) -> None:
    """Derive again, from the files in the image, what the manifest says that it was made of."""
    profile, image, pins = document["profile"], load_image(root), load_pins(root / "manifests" / "upstreams.toml")
    inventory, layers = strictjson.loads((root / "inventory.json").read_bytes()), document["image"]["layers"]
    listings = {name: read_listing(layout / LISTINGS / f"{name}.txt") for name in names}
    for name, said in _parts(root, profile, image).items():
        compare(f"layer {name}: made of", said, next((x["parts"] for x in layers if x["name"] == name), {}))
    patched = delivery.patched_parts(layers)
    compare("layer patched: made of", inventory["wheels"], patched)
    _debian(layout, layers[0], root)
    for name, digest in inventory["records"].items():
        compare(f"layer patched: {name}", digest, listings["patched"].get(name, "nothing").split()[0])
    _patched(listings["patched"], document, pins, image)
    derived = delivery.derive(root, pins, image, profile)
    compare("manifest", derived, {key: document[key] for key in derived})
    compare("inventory: git_commit", document["source"]["git_commit"], inventory["git_commit"])
    below = {layer["name"]: layer["diff_id"].removeprefix("sha256:") for layer in layers[:-1]}
    compare("inventory: layers", below, inventory["layers"])
    bill = hashlib.sha256(delivery.sbom(root, image, profile, patched)).hexdigest()
    compare(f"{SBOM}, made again", bill, document["sbom"])


def _parts(root: Path, profile: str, image: Image) -> dict[str, dict[str, str]]:
    """The files that the locks name for each layer."""
    wheels = load_wheels(root, profile)
    check(root, profile, image, wheels)
    parts: dict[str, dict[str, str]] = {"base": {deb.file: deb.sha256 for deb in load_debs(root)}}
    for wheel in wheels:
        parts.setdefault(image.layer_of(wheel.name), {})[wheel.file] = wheel.sha256
    return parts


def _debian(layout: Path, layer: dict[str, Any], root: Path) -> None:
    """Compare the packages that are installed in the base with the lock."""
    status = next((d for i, d in _read(layout, layer, hashlib.sha256()) if i.name == "var/lib/dpkg/status"), b"")
    found = {}
    for stanza in status.decode().strip().split("\n\n"):
        said = dict(line.split(": ", 1) for line in stanza.splitlines() if ": " in line and not line.startswith(" "))
        found[said.get("Package", "?")] = f"{said.get('Version')} {said.get('Architecture')} {said.get('Status')}"
    locked = {deb.name: f"{deb.version} {deb.architecture} install ok installed" for deb in load_debs(root)}
    compare("layer base: installed", locked, found)


def _patched(listing: dict[str, str], document: dict[str, Any], pins: Pins, image: Image) -> None:
    """Compare every file that a series touches with what lies in the layer."""
    for key, said in document["upstreams"].items():
        for path, digest in said["files"].items():
            if path.startswith(tuple(f"{name}/" for name in pins.upstreams[key].packages)):
                found = listing.get(f"{image.site}/{path}", "nothing").split()[0]
                compare(f"layer patched: {image.site}/{path}", digest, found)


def _repository(document: dict[str, Any], root: Path, repository: Path) -> None:
    """Compare the image's own files with the commit, and the manifest's evidence with what is committed."""
    commit = document["source"]["git_commit"]
    kept = {line.split("\t")[1]: line.split()[2] for line in git(repository, "ls-tree", "-r", commit).splitlines()}
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        name = path.relative_to(root).as_posix()
        if name != posixpath.basename(INVENTORY):
            data = path.read_bytes()
            blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
            compare(f"commit {commit[:12]}: {name}", kept.get(name, "nothing"), blob)
    rows = delivery.evidence(
        repository, document["image"]["digest"], delivery.patched_parts(document["image"]["layers"])
    )
    here = {row["path"]: row for row in rows}
    for row in document["evidence"]:
        compare(f"evidence {row['path']}", row, here.get(row["path"], "nothing"))
