"""What an image is said to be: described, signed, verified; tampering is refused by name, beside a control."""

import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import toy_image
import zstandard
from toy_image import Toy
from typer.testing import CliRunner

from samebits import cli
from samebits.errors import SamebitsError
from samebits.image import compose, delivery, rendering
from samebits.image.delivery import IMAGE
from samebits.image.verify import entries, record, verify
from samebits.report import block
from samebits.sources.pins import ROOT


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A composed and signed image; tests take copies of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "base_layer", toy_image.base_layer)
        toy = toy_image.make(tmp_path_factory.mktemp("toy"))
        toy.compose()
    key = toy.root.parent / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    public = key.with_suffix(".pub").read_text().split()
    (toy.root.parent / "signers").write_text(f"reviewer@example.org {public[0]} {public[1]}\n")
    delivery.sign(toy.out, key)
    return toy


@pytest.fixture
def toy(composed: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    """A copy of the composed image, its repository and its cache, for a test to damage."""
    monkeypatch.setattr(compose, "base_layer", toy_image.base_layer)
    for name in ("repository", "cache", "out", "signers", "key"):
        source = composed.root.parent / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, symlinks=True)
        else:
            shutil.copy2(source, tmp_path / name)
    return Toy(tmp_path / "repository", tmp_path / "cache", tmp_path / "out")


def check(toy: Toy) -> dict[str, Any]:
    """What a person runs: the signature, the image, the checkout, and a build in which nothing changed."""
    delivery.check_signature(toy.out, toy.root.parent / "signers")
    document = verify(toy.out, toy.root)
    assert toy.compose() == document["image"]["digest"]
    return document


def blob(toy: Toy, digest: str) -> Path:
    path = toy.out / "blobs" / digest.replace(":", "/")
    path.chmod(0o644)
    return path


def layers(toy: Toy) -> list[dict[str, Any]]:
    return list(json.loads((toy.out / "image.json").read_text())["image"]["layers"])


def sign_again(toy: Toy) -> None:
    """As one who has the key, or before it was signed."""
    delivery.sign(toy.out, toy.root.parent / "key")


def rewrite(toy: Toy, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest, give it its checksum, and sign it."""
    document = json.loads((toy.out / "image.json").read_text())
    del document["schema"], document["checksum"]
    change(document)
    IMAGE.write(toy.out / "image.json", IMAGE.build(**document))
    sign_again(toy)


def repack(toy: Toy, number: int, change: Callable[[str, bytes], bytes]) -> None:
    """Exchange contents in a layer, and carry the new hashes through every document: a whole, consistent forgery."""
    old = layers(toy)[number]
    data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(blob(toy, old["digest"]).read_bytes())).read()
    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data)) as source, tarfile.open(fileobj=out, mode="w") as target:
        for info in source:
            content = source.extractfile(info)
            new = change(info.name, content.read() if content else b"")
            info.size = len(new)
            target.addfile(info, io.BytesIO(new))
    packed = zstandard.ZstdCompressor().compress(out.getvalue())
    fresh: dict[str, Any] = {
        "digest": put(toy, packed),
        "size": len(packed),
        "diff_id": f"sha256:{hashlib.sha256(out.getvalue()).hexdigest()}",
    }
    index = json.loads((toy.out / "index.json").read_text())
    manifest = json.loads(blob(toy, index["manifests"][0]["digest"]).read_text())
    config = json.loads(blob(toy, manifest["config"]["digest"]).read_text())
    config["rootfs"]["diff_ids"][number] = fresh["diff_id"]
    manifest["layers"][number].update(digest=fresh["digest"], size=fresh["size"])
    manifest["config"]["digest"] = put(toy, json.dumps(config).encode())
    index["manifests"][0]["digest"] = put(toy, json.dumps(manifest).encode())
    (toy.out / "index.json").write_text(json.dumps(index))

    def follow(document: dict[str, Any]) -> None:
        document["image"]["digest"] = index["manifests"][0]["digest"]
        document["image"]["config"] = manifest["config"]["digest"]
        document["image"]["layers"][number].update(fresh)

    rewrite(toy, follow)


def relist(toy: Toy, number: int) -> None:
    """Make a layer's listing anew from its blob, as a forger would."""
    layer = layers(toy)[number]
    listing = toy.out / "listings" / f"{layer['name']}.txt"
    listing.chmod(0o644)
    lines = [f"{what} {path}\n" for path, what in sorted(entries(toy.out, layer, hashlib.sha256()))]
    listing.write_text("".join(lines))
    digest = hashlib.sha256(listing.read_bytes()).hexdigest()
    rewrite(toy, lambda document: document["image"]["layers"][number].update(listing=digest))


def put(toy: Toy, data: bytes) -> str:
    digest = hashlib.sha256(data).hexdigest()
    (toy.out / "blobs" / "sha256" / digest).write_bytes(data)
    return f"sha256:{digest}"


def test_the_control_passes(toy: Toy) -> None:
    document = check(toy)
    assert document["lacking"], "a CPU image is no delivery"
    assert document["confirmations"] == {"C1": None, "C9": None}
    (row,) = document["evidence"]
    assert row["path"] == "manifests/evidence/cpu/receipt.json" and not row["inside"]


def layer_byte(toy: Toy) -> None:
    path = blob(toy, layers(toy)[1]["digest"])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def layer_cut_short(toy: Toy) -> None:
    path = blob(toy, layers(toy)[1]["digest"])
    path.write_bytes(path.read_bytes()[:-20])


def layer_lost(toy: Toy) -> None:
    blob(toy, layers(toy)[2]["digest"]).unlink()


def installed_file(toy: Toy) -> None:
    repack(toy, 1, lambda name, data: data + b"# altered\n" if name.endswith("/torch.py") else data)


def patched_file(toy: Toy) -> None:
    """With its listing too: only what the patches are recorded to give tells it."""
    repack(toy, 3, lambda name, data: b"y = 3\n" if name.endswith("/toy/new.py") else data)
    relist(toy, 3)


def config(toy: Toy) -> None:
    path = blob(toy, json.loads((toy.out / "image.json").read_text())["image"]["config"])
    path.write_bytes(path.read_bytes().replace(b"LANG=C.UTF-8", b"LANG=C.UTF-9"))


def index(toy: Toy) -> None:
    path = toy.out / "index.json"
    digest = json.loads(path.read_text())["manifests"][0]["digest"]
    path.write_text(path.read_text().replace(digest, f"sha256:{'1' * 64}"))


def listing(toy: Toy) -> None:
    path = toy.out / "listings" / "torch.txt"
    path.chmod(0o644)
    path.write_text(path.read_text().replace(" 644 ", " 755 ", 1))


def manifest_field(toy: Toy) -> None:
    path = toy.out / "image.json"
    path.write_text(path.read_text().replace('"branch": "main"', '"branch": "mine"'))
    sign_again(toy)


def manifest_field_with_its_checksum(toy: Toy) -> None:
    rewrite(toy, lambda document: document["upstreams"]["toy"].update(branch="mine"))


def claimed_delivery(toy: Toy) -> None:
    rewrite(toy, lambda document: document.update(lacking=""))


def commit(toy: Toy) -> None:
    rewrite(toy, lambda document: document["source"].update(git_commit="2" * 40))


def sbom(toy: Toy) -> None:
    path = toy.out / "sbom.json"
    path.write_text(path.read_text().replace('"version": "1.0"', '"version": "1.1"', 1))


def sbom_with_its_hash(toy: Toy) -> None:
    sbom(toy)
    digest = hashlib.sha256((toy.out / "sbom.json").read_bytes()).hexdigest()
    rewrite(toy, lambda document: document.update(sbom=digest))


def receipt(toy: Toy) -> None:
    path = toy.root / "manifests" / "evidence" / "cpu" / "receipt.json"
    path.write_text(path.read_text().replace('"mismatched": 0', '"mismatched": 1', 1))


def claimed_inside(toy: Toy) -> None:
    rewrite(toy, lambda document: document["evidence"][0].update(inside=True))


def signature_lost(toy: Toy) -> None:
    (toy.out / "image.json.sig").unlink()


def signature_of_another(toy: Toy) -> None:
    key = toy.root.parent / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    delivery.sign(toy.out, key)


def signed_then_changed(toy: Toy) -> None:
    path = toy.out / "image.json"
    path.write_bytes(path.read_bytes() + b" ")


def cached_wheel(toy: Toy) -> None:
    alter_cached(toy, "torch-1.0-*.whl")


def cached_deb(toy: Toy) -> None:
    alter_cached(toy, "libtoy_*.deb")


def cached_release(toy: Toy) -> None:
    """It is fetched anew, and here that fails: the altered one is not used."""
    alter_cached(toy, "toy_cpu-1.0-*.whl")


def alter_cached(toy: Toy, pattern: str) -> None:
    (path,) = toy.cache.glob(f"*/{pattern}")
    path.write_bytes(path.read_bytes() + b" ")
    for made in (toy.cache / "image").iterdir():
        made.unlink()


def cached_layer(toy: Toy) -> None:
    path = max((toy.cache / "image").glob("*.tar.zst"))
    path.chmod(0o644)
    path.write_bytes(path.read_bytes() + b" ")


def lock_line(toy: Toy) -> None:
    path = toy.root / "image" / "cpu.lock"
    path.write_text(path.read_text().replace("helper 1.0 ", "helper 1.1 "))
    toy.commit()


def patch_file(toy: Toy) -> None:
    """Committed, so that the tree is clean: the image is no longer that commit's."""
    path = toy.root / "patches" / "toy" / "0002-add-files" / "files" / "toy" / "new.py"
    path.write_text("y = 4\n")


def dirty_tree(toy: Toy) -> None:
    (toy.root / "README.md").write_text("changed")


def swapped_base(toy: Toy) -> None:
    """Another version of a Debian package, in a forgery that is consistent but for the lock that lies in the image."""
    repack(toy, 0, lambda name, data: data.replace(b"1:2.0-1", b"1:1.9-1"))
    relist(toy, 0)


@pytest.mark.parametrize(
    ("tamper", "culprit"),
    [
        (layer_byte, "layer torch: "),
        (layer_cut_short, "layer torch: "),
        (layer_lost, "layer dependencies: .*No such file"),
        (
            installed_file,
            "layer torch: usr/local/lib/python3.13/dist-packages/torch.py: expected [0-9a-f]{64} 644, found",
        ),
        (patched_file, "layer patched: usr/local/lib/python3.13/dist-packages/toy/new.py: expected"),
        (config, "the config: expected sha256:.*found sha256:"),
        (index, "index.json: digest: expected sha256:.*found sha256:1111"),
        (listing, "layer torch: its listing"),
        (manifest_field, "image.json: edited"),
        (manifest_field_with_its_checksum, "manifest: upstreams: toy: branch: expected main, found mine"),
        (claimed_delivery, "manifest: lacking: expected it holds one person's build .*, found "),
        (commit, "revision: expected 2222"),
        (sbom, "sbom.json: expected"),
        (sbom_with_its_hash, "sbom.json, made again: expected"),
        (receipt, "evidence manifests/evidence/cpu/receipt.json: sha256"),
        (claimed_inside, "evidence manifests/evidence/cpu/receipt.json: inside: expected True, found False"),
        (signature_lost, "signature: .*image.json.sig is not there"),
        (signature_of_another, "signature: "),
        (signed_then_changed, "signature: "),
        (cached_wheel, "torch-1.0-py3-none-any.whl: the cached file's sha256 is"),
        (cached_deb, "libtoy_1%3a2.0-1_amd64.deb: the cached file's sha256 is"),
        (cached_release, "toy_cpu-1.0-py3-none-any.whl"),
        (cached_layer, "layer [a-z]+: the cached [0-9a-f]+.tar.zst has the sha256"),
        (lock_line, r"image/cpu.lock: helper 1.1: manifests/locks/cpu.txt has 1.0"),
        (patch_file, "not clean: patches/toy/0002-add-files/files/toy/new.py"),
        (dirty_tree, "not clean: README.md"),
        (swapped_base, "layer base: installed: libtoy: expected 1:2.0-1 amd64 .*, found 1:1.9-1 "),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_tampering_is_refused_with_the_culprit(
    toy: Toy, tamper: Callable[[Toy], None], culprit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    tamper(toy)
    with pytest.raises(SamebitsError, match=culprit):
        check(toy)


def test_an_image_of_another_commit_is_refused(toy: Toy) -> None:
    """The patch is changed and committed, and the image rebuilt; the old manifest beside the new layers is refused."""
    old = (toy.out / "image.json").read_bytes()
    (toy.root / "README.md").write_text("another commit\n")
    toy.commit()
    toy.compose()
    (toy.out / "image.json").write_bytes(old)
    with pytest.raises(SamebitsError, match=r"index\.json: digest"):
        verify(toy.out, toy.root)


def test_evidence_that_was_measured_in_the_image_is_told_from_what_shares_its_wheels(toy: Toy) -> None:
    document = json.loads((toy.out / "image.json").read_text())
    digest, wheels = document["image"]["digest"], delivery.patched_parts(document["image"]["layers"])
    path = toy.root / "manifests" / "evidence" / "cpu" / "receipt.json"
    said = json.loads(path.read_text())
    said["execution"]["wheels"] = wheels
    path.write_text(json.dumps(said))
    assert [(row["inside"], row["wheels"]) for row in delivery.evidence(toy.root, digest, wheels)] == [(False, wheels)]
    said["execution"]["image"] = {"digest": digest, "inventory": "0" * 64}
    path.write_text(json.dumps(said))
    assert [row["inside"] for row in delivery.evidence(toy.root, digest, wheels)] == [True]
    name, sha256 = next(iter(wheels.items()))
    arms = {"ours": {"tree": {"wheel": name, "sha256": sha256}}, "theirs": {"tree": {"wheel": "release"}}}
    path.write_text(json.dumps({"schema": "samebits.engines/1", "arms": arms, "checksum": "0" * 64}))
    shared = [(row["inside"], row["wheels"]) for row in delivery.evidence(toy.root, digest, wheels)]
    assert shared == [(False, {name: sha256})], "arms of measurements name a wheel each"


def test_a_person_confirms_in_a_file_and_only_the_two_points(toy: Toy) -> None:
    file = toy.root / "manifests" / "confirmations.toml"
    file.write_text('[C1]\nby = "A Person"\ndate = "2026-01-02"\nwhat = "the baseline"\n')
    assert delivery.confirmations(toy.root)["C1"]["by"] == "A Person"
    file.write_text("[C2]\n")
    with pytest.raises(SamebitsError, match="C2 is no point that waits"):
        delivery.confirmations(toy.root)


def test_delivery_md_says_what_the_newest_manifest_says() -> None:
    assert block("delivery", rendering.render(ROOT)) in (ROOT / "DELIVERY.md").read_text()


def test_what_is_delivered_is_named_by_its_digest_and_lacks_nothing() -> None:
    """A manifest stays: it is of its own commit, whatever was committed since."""
    delivered = {path.stem: IMAGE.read(path) for path in (ROOT / "manifests" / "delivery").glob("*.json")}
    for digest, document in delivered.items():
        assert document["image"]["digest"] == f"sha256:{digest}"
        assert (document["profile"], document["lacking"]) == ("gpu", "")
        assert sum(layer["unpacked"] for layer in document["image"]["layers"]) <= 10e9
    newest = rendering.newest(ROOT)
    assert (newest["image"]["digest"].removeprefix("sha256:") in delivered) if newest else not delivered


def test_a_delivery_is_recorded_when_it_was_verified_and_its_commit_is_in_the_history(toy: Toy) -> None:
    with pytest.raises(SamebitsError, match="no delivery: it holds one person's build"):
        record(toy.out, toy.root)
    described = toy.root / "image" / "image.toml"
    described.write_text(re.sub('(?m)^cpu = "it holds.*"$', 'cpu = ""', described.read_text()))
    toy.commit()
    digest = toy.compose()
    (toy.root / "README.md").write_text("a later commit\n")
    toy.commit()
    path = record(toy.out, toy.root)
    assert path.name == f"{digest.removeprefix('sha256:')}.json"
    assert rendering.newest(toy.root) == IMAGE.read(toy.out / "image.json")
    said = rendering.render(toy.root)
    assert digest in said and f"of commit `{toy_image.git(toy.root, 'rev-parse', 'HEAD~1').strip()}`" in said
    toy.commit()
    toy_image.git(toy.root, "checkout", "--quiet", "HEAD~3")
    with pytest.raises(SamebitsError, match="is not in the history here"):
        record(toy.out, toy.root)
    toy_image.git(toy.root, "checkout", "--quiet", "-")
    layer_cut_short(toy)
    with pytest.raises(SamebitsError, match="layer torch: "):
        record(toy.out, toy.root)


def test_a_summary_says_digest_layers_and_what_is_lacking(composed: Toy) -> None:
    said = rendering.summary(json.loads((composed.out / "image.json").read_text()))
    assert "no delivery: it holds one person's build" in said and "C9: not confirmed" in said
    assert said.count("\nlayer ") == 5


def test_the_commands_say_it_and_ask_for_a_signature(composed: Toy) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli.app, ["deliver", *arguments])
        return done.exit_code, done.output

    layout, signers = str(composed.out), str(composed.root.parent / "signers")
    assert "C1: not confirmed" in run("show", layout)[1]
    assert run("verify", layout)[0] == 2, "neither a signature nor its waiver"
    code, said = run("verify", layout, "--signers", signers, "--checkout", str(composed.root))
    assert code == 0 and "as its manifest says; signed by reviewer@example.org" in said
    assert run("verify", layout, "--unsigned")[0] == 0
    code, said = run("verify", layout, "--signers", str(composed.root / "LICENSE"))
    assert code == 1 and "error: signature: " in said, "a file of no signers"
