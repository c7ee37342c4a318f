"""The manifest of an image, `image.json` beside its layout: what it is made of, and what is bound to its digest.

`derive` makes every part of it that a repository decides; a build derives from the checkout, `verify` again from the
files that lie in the image. A manifest whose `lacking` is empty is a delivery's, and is committed as
manifests/delivery/DIGEST.json.
"""

import subprocess
import tomllib
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from samebits.evidence import strictjson
from samebits.evidence.document import Kind
from samebits.image.layers import Made
from samebits.image.plan import Image, ImageError, load_debs, load_wheels
from samebits.sources.fetch import file_sha256
from samebits.sources.native import load_native
from samebits.sources.pins import Pins, Upstream
from samebits.sources.records import patch_hashes, record_path
from samebits.sources.wheels import artefacts_of

MANIFEST, SIGNATURE, SBOM, LISTINGS = "image.json", "image.json.sig", "sbom.json", "listings"
NAMESPACE = "samebits"  # of signatures
IMAGE = Kind("image-1", ImageError, "build the image")


def describe(
    root: Path, pins: Pins, image: Image, profile: str, commit: str, made: Sequence[Made], layout: Path
) -> None:
    """Write the SBOM and, last, the manifest of the layout. root: the clean checkout that it was made from."""
    index = strictjson.loads((layout / "index.json").read_bytes())
    digest = index["manifests"][0]["digest"]
    manifest = strictjson.loads(_blob(layout, digest).read_bytes())
    layers = [
        {
            "name": layer.name,
            "digest": f"sha256:{layer.digest}",
            "diff_id": f"sha256:{layer.diff_id}",
            "size": layer.size,
            "unpacked": layer.unpacked,
            "listing": layer.listing,
            "parts": dict(sorted(layer.parts.items())),
        }
        for layer in made
    ]
    (layout / SBOM).write_bytes(sbom(root, image, profile, patched_parts(layers)))
    document = IMAGE.build(
        profile=profile,
        image={"digest": digest, "config": manifest["config"]["digest"], "layers": layers},
        source={"git_commit": commit, "clean": True, "command": f"samebits build image --profile {profile}"},
        sbom=file_sha256(layout / SBOM),
        evidence=evidence(root, digest, patched_parts(layers)),
        confirmations=confirmations(root),
        **derive(root, pins, image, profile),
    )
    IMAGE.write(layout / MANIFEST, document)


def derive(root: Path, pins: Pins, image: Image, profile: str) -> dict[str, Any]:
    """What the files below `root` decide of a manifest: lacking, upstreams, locks, toolchain."""
    shipped: dict[str, Upstream] = {u.key: u for u, _ in artefacts_of(pins, profile, image.python_version)}
    locks = [f"image/{name}.lock" for name in ("debian", profile)] + [
        f"manifests/locks/{profile}.txt",
        "image/image.toml",
    ]
    compiler, libraries = load_native(root / "manifests" / "native.toml")
    locals_ = {(u.key, a.local) for u, a in artefacts_of(pins, profile, image.python_version)}
    extension = image.extension if image.extension.upstream in shipped else None
    return {
        "lacking": image.lacking[profile],
        "upstreams": {
            key: _upstream(root, pins, image, profile, upstream) for key, upstream in sorted(shipped.items())
        },
        "locks": {name: file_sha256(root / name) for name in sorted(locks)},
        "toolchain": {name: pins.by_file[name].sha256 for name in (compiler.artefact, compiler.cuda_artefact)}
        | {library.file: library.sha256 for library in libraries if (library.upstream, library.local) in locals_}
        | ({extension.artefact: pins.by_file[extension.artefact].sha256} if extension else {})
        | ({extension.file(image.python): extension.sha256} if extension else {}),
    }


def _upstream(root: Path, pins: Pins, image: Image, profile: str, upstream: Upstream) -> dict[str, Any]:
    base = next(base for base in upstream.base if base.ships)
    recorded = strictjson.loads(record_path(root / "manifests" / "patched", upstream, base).read_bytes())
    return {
        "repository": upstream.repository,
        "branch": upstream.branch,
        "commit": upstream.commit,
        "bases": [base.name for base in upstream.base],
        "releases": {a.file: a.sha256 for u, a in artefacts_of(pins, profile, image.python_version) if u is upstream},
        "patches": patch_hashes(root / "patches", upstream.key),
        "files": {path: said["after"] for path, said in recorded["files"].items()},
    }


def patched_parts(layers: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The patched wheels in the manifest's layers: file name -> sha256."""
    return next((layer["parts"] for layer in layers if layer["name"] == "patched"), {})


def evidence(root: Path, digest: str, wheels: dict[str, str]) -> list[dict[str, Any]]:
    """Each committed document of evidence: whether it was measured in the image of this digest, and what it shares."""
    rows = []
    for path in sorted((root / "manifests" / "evidence").rglob("*.json")):
        document = strictjson.loads(path.read_bytes())
        if "checksum" in document:
            ran = list(_executions(document))
            used = {name: sha for one in ran for name, sha in one["wheels"].items()} | dict(_trees(document))
            rows.append(
                {
                    "path": path.relative_to(root).as_posix(),
                    "sha256": file_sha256(path),
                    "schema": document["schema"],
                    "inside": bool(ran) and all(one.get("image", {}).get("digest") == digest for one in ran),
                    "wheels": {name: sha for name, sha in sorted(used.items()) if wheels.get(name) == sha},
                }
            )
    return rows


def _trees(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The patched wheels that a measurement's arms were unpacked from: file name and sha256."""
    for arm in document.get("arms", {}).values():
        if isinstance(arm, dict) and "sha256" in (tree := arm.get("tree", {})):
            yield tree["wheel"], tree["sha256"]


def _executions(value: Any) -> Iterator[dict[str, Any]]:
    """The execution identities in a document."""
    if isinstance(value, dict):
        if isinstance(value.get("wheels"), dict):
            yield value
        for inner in value.values():
            yield from _executions(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _executions(inner)


def confirmations(root: Path) -> dict[str, Any]:
    """manifests/confirmations.toml: who confirmed C1 and C9; None where nobody has."""
    said = tomllib.loads((root / "manifests" / "confirmations.toml").read_text("utf-8"))
    if unknown := sorted(set(said) - {"C1", "C9"}):
        raise ImageError(f"confirmations.toml: {unknown[0]} is no point that waits for a person. Remedy: C1 or C9.")
    return {name: said.get(name) for name in ("C1", "C9")}


def sbom(root: Path, image: Image, profile: str, wheels: dict[str, str]) -> bytes:
    """The software bill of materials as CycloneDX JSON: every .deb, release file and patched wheel by its hash."""
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL

    rows: list[tuple[str, str | None, str, str, str]]
    rows = [("deb", "debian", d.name, d.version, d.sha256) for d in load_debs(root)]
    rows += [("pypi", None, w.name, w.version, w.sha256) for w in load_wheels(root, profile)]
    rows += [("pypi", None, *_name(file), digest) for file, digest in wheels.items()]
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_OID, repr(sorted(map(str, rows)))))
    bom.metadata.timestamp = datetime.fromtimestamp(image.epoch, UTC)
    for kind, namespace, name, version, digest in rows:
        bom.components.add(
            Component(
                name=name,
                version=version,
                type=ComponentType.LIBRARY,
                bom_ref=f"{kind}:{name}",
                purl=PackageURL(kind, namespace, name, version),
                hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
            )
        )
    return (JsonV1Dot6(bom).output_as_string(indent=1) + "\n").encode()


def _name(wheel: str) -> tuple[str, str]:
    name, version = wheel.split("-")[:2]
    return name.replace("_", "-"), version


def _blob(layout: Path, digest: str) -> Path:
    return layout / "blobs" / digest.replace(":", "/")


def sign(layout: Path, key: Path) -> Path:
    """Sign the manifest by OpenSSH with a private key (or the public one of an agent's). Raises ImageError."""
    signature = layout / SIGNATURE
    signature.unlink(missing_ok=True)
    _ssh(
        ["-Y", "sign", "-q", "-n", NAMESPACE, "-f", str(key), str(layout / MANIFEST)],
        "name a key that ssh-keygen reads",
    )
    return signature


def check_signature(layout: Path, signers: Path) -> str:
    """The principal of `signers` (OpenSSH's allowed_signers) who signed the manifest. Raises ImageError: nobody did."""
    manifest, signature = layout / MANIFEST, layout / SIGNATURE
    for path, remedy in (
        (signature, "let a person sign it: samebits deliver sign"),
        (signers, "name a file of signers"),
    ):
        if not path.is_file():
            raise ImageError(f"signature: {path} is not there. Remedy: {remedy}.")
    wrong = "the manifest or its signature was altered, or another key signed: take the layout from its origin again"
    found = _ssh(["-Y", "find-principals", "-s", str(signature), "-f", str(signers)], wrong).splitlines()
    with manifest.open("rb") as data:
        options = ["-f", str(signers), "-I", found[0], "-n", NAMESPACE, "-s", str(signature)]
        _ssh(["-Y", "verify", *options], wrong, data)
    return found[0]


def _ssh(arguments: list[str], remedy: str, data: Any = subprocess.DEVNULL) -> str:
    try:
        done = subprocess.run(["ssh-keygen", *arguments], capture_output=True, text=True, stdin=data)
    except FileNotFoundError:
        raise ImageError("signature: ssh-keygen is not installed. Remedy: apt-get install openssh-client.") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["ssh-keygen refused"]
        raise ImageError(f"signature: {said[-1]}. Remedy: {remedy}.")
    return done.stdout
