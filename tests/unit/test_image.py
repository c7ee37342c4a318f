"""Images: the same bytes anywhere, made of what is locked and committed alone, whole or not there at all."""

import hashlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import toy_image
import zstandard
from toy_image import Toy

from samebits.evidence import provenance
from samebits.image import compose, extension, locking
from samebits.image.layers import Layer, Writer, make
from samebits.image.plan import Image, ImageError, Wheel, check, load_image, load_wheels
from samebits.image.verify import verify
from samebits.sources.pins import PROFILES, ROOT, Artefact


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    monkeypatch.setattr(compose, "base_layer", toy_image.base_layer)
    return toy_image.make(tmp_path)


def tar_of(layout: Path, layer: int) -> dict[str, tarfile.TarInfo]:
    manifest = json.loads((layout / "image.json").read_text())
    blob = layout / "blobs" / manifest["image"]["layers"][layer]["digest"].replace(":", "/")
    data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(blob.read_bytes())).read()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {info.name: info for info in tar}


def unpack(layout: Path, layer: int, folder: Path) -> None:
    """Unpack a layer, as a runtime would."""
    digest = json.loads((layout / "image.json").read_text())["image"]["layers"][layer]["digest"]
    data = (layout / "blobs" / digest.replace(":", "/")).read_bytes()
    with tarfile.open(fileobj=io.BytesIO(zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read())) as tar:
        tar.extractall(folder, filter="data")


def test_the_digest_is_the_same_in_another_folder_with_another_umask_and_file_times(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = toy.compose()
    other = tmp_path / "deeper" / "clone"
    toy_image.git(tmp_path, "clone", "--quiet", str(toy.root), str(other))
    for path in other.rglob("*"):
        os.utime(path, (0, 0), follow_symlinks=False)
    for kept in (toy.cache / "image").iterdir():
        kept.unlink()
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    monkeypatch.setenv("LC_ALL", "tr_TR.UTF-8")
    before = os.umask(0o077)
    try:
        second = compose.compose(other, "cpu", tmp_path / "elsewhere", toy.cache, lambda _: None)
    finally:
        os.umask(before)
    assert first == second
    assert (toy.out / "image.json").read_bytes() == (tmp_path / "elsewhere" / "image.json").read_bytes()


def test_a_layer_has_one_time_no_names_and_two_permissions(toy: Toy) -> None:
    toy.compose()
    epoch = load_image(toy.root).epoch
    for number in range(5):
        for info in tar_of(toy.out, number).values():
            assert (info.mtime, info.uid, info.gid, info.uname, info.gname) == (epoch, 0, 0, "", ""), info.name
            assert info.mode == (0o755 if info.isdir() or "/bin/" in info.name else info.mode) and info.mode in (
                0o644,
                0o755,
            )


def test_wheels_are_installed_with_their_commands_and_a_record(toy: Toy) -> None:
    toy.compose()
    names = tar_of(toy.out, 1)
    site = load_image(toy.root).site
    assert {f"{site}/torch.py", f"{site}/torch-1.0.dist-info/RECORD", "usr/local/bin/torch-run"} <= set(names)
    assert not any("__pycache__" in name for name in names)


def test_samebits_lies_above_with_an_inventory_of_what_is_below(toy: Toy) -> None:
    toy.compose()
    names = tar_of(toy.out, 4)
    assert {
        "opt/samebits/inventory.json",
        "opt/samebits/LICENSE",
        "opt/samebits/NOTICE",
        "usr/local/bin/samebits",
    } <= set(names)
    assert "opt/samebits/manifests/evidence/cpu/receipt.json" not in names, "new evidence gives no new image"


def test_what_did_not_change_is_not_made_again(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.compose()
    (toy.root / "patches" / "toy" / "0002-add-files" / "files" / "toy" / "new.py").write_text("y = 2\n")
    with pytest.raises(ImageError, match=r"not clean: patches/toy/0002-add-files/files/toy/new\.py"):
        toy.compose()
    # Another hash in the record: as `samebits patch check --record` would write it.
    record = toy.root / "manifests" / "patched" / "toy-1.0.json"
    said = json.loads(record.read_text())
    said["files"]["toy/new.py"]["after"] = "7a8afc9d9b6b4b9bfb0d2dd1e6a8f5b5d6a7f2fd5c7ff4b1fa8d6bcf0ec0a1c5"
    record.write_text(json.dumps(said))
    toy.commit()
    made: list[str] = []
    compose.compose(toy.root, "cpu", toy.out, toy.cache, made.append)
    assert [line for line in made if "unchanged" not in line and "samebits" not in line] == [
        line for line in made if line.startswith("layer patched")
    ]
    assert sum("unchanged" in line for line in made) == 3
    with pytest.raises(ImageError, match=r"layer patched: .*toy/new.py: expected 7a8a"):
        verify(toy.out)


def test_a_dirty_tree_is_refused(toy: Toy) -> None:
    (toy.root / "stray.txt").write_text("")
    with pytest.raises(ImageError, match=r"not clean: stray\.txt"):
        toy.compose()
    assert not toy.out.exists()


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("helper 1.0", "helper 1.1", r"cpu\.lock: helper 1\.1: manifests/locks/cpu\.txt has 1\.0"),
        ("helper 1.0", "stranger 1.0", r"cpu\.lock: stranger 1\.0: manifests/locks/cpu\.txt has no such package"),
        ("torch 1.0 ", "torch 1.0 0", r"cpu\.lock: 'torch 1\.0 0.*' is no locked file"),
        ("helper 1.0", "torch 1.0", r"cpu\.lock: torch is locked twice"),
    ],
)
def test_a_lock_line_that_manifests_locks_does_not_allow_is_refused(toy: Toy, old: str, new: str, error: str) -> None:
    lock = toy.root / "image" / "cpu.lock"
    text = lock.read_text()
    assert old in text
    lock.write_text(text.replace(old, new, 1))
    toy.commit()
    with pytest.raises(ImageError, match=error):
        toy.compose()
    assert not toy.out.exists()


def test_a_lost_lock_line_is_named(toy: Toy) -> None:
    lock = toy.root / "image" / "cpu.lock"
    lock.write_text("".join(line for line in lock.read_text().splitlines(True) if not line.startswith("helper")))
    toy.commit()
    with pytest.raises(ImageError, match=r"helper of manifests/locks/cpu\.txt is missing"):
        toy.compose()


def test_a_package_that_the_mirror_no_longer_serves_is_named_with_the_remedy(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An apt stands in that serves a newer version: what a mirror does after a point release."""
    for kept in toy.cache.glob("*/libtoy_*.deb"):
        kept.unlink()
    served = "Package: libtoy\\nVersion: 1:2.0-2\\nArchitecture: amd64\\nSHA256: 0\\n"
    show = f"#!/bin/sh\n[ $1 != show ] || printf '{served}'\n"
    folder = toy.root.parent / "bin"
    folder.mkdir()
    for name in ("apt-get", "apt-cache"):
        (folder / name).write_text(show)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("DEBIAN_MIRROR", "file:/nowhere")
    with pytest.raises(ImageError, match=r"libtoy 1:2\.0-1: .* no longer serves it .*2\.0-2.* `samebits image lock`"):
        toy.compose()


def test_another_folder_is_not_overwritten(toy: Toy) -> None:
    toy.out.mkdir()
    (toy.out / "mine.txt").write_text("mine")
    with pytest.raises(ImageError, match="is no image"):
        toy.compose()
    assert (toy.out / "mine.txt").read_text() == "mine"


def test_two_layers_that_bring_one_file_are_refused(toy: Toy) -> None:
    intruder = toy_image.wheel(toy.cache, "intruder", "torch")
    for path, line in (
        ("image/cpu.lock", f"{intruder.name} {intruder.version} {intruder.sha256} {intruder.file}\n"),
        ("manifests/locks/cpu.txt", f"intruder==1.0 \\\n    --hash=sha256:{intruder.sha256}\n"),
    ):
        (toy.root / path).write_text((toy.root / path).read_text() + line)
    toy.commit()
    with pytest.raises(ImageError, match=r"torch\.py is in layer torch and in layer dependencies"):
        toy.compose()


def test_a_layer_that_no_build_took_for_a_month_is_forgotten(toy: Toy) -> None:
    toy.compose()
    kept = sorted((toy.cache / "image").glob("*.json"))
    os.utime(kept[0], (0, 0))
    compose.forget_unused(toy.cache)
    gone = {path.name.partition(".")[0] for path in kept} - {
        path.name.partition(".")[0] for path in (toy.cache / "image").iterdir()
    }
    assert gone == {kept[0].stem}, "its blob and listing too"


PODMAN = """\
#!/bin/sh
echo "$@" >>"$PODMAN_LOG"
[ "$1" != images ] || [ ! -f "$PODMAN_LOG.pulled" ] || cat "$PODMAN_LOG.pulled"
[ "$1" != pull ] || echo "$PODMAN_HAS 0123abcd" >"$PODMAN_LOG.pulled"
"""


def test_a_command_in_an_image_knows_its_digest(toy: Toy, tmp_path: Path) -> None:
    """scripts/in_image.sh with a podman that writes down what it is asked."""
    digest = toy.compose()
    (tmp_path / "podman").write_text(PODMAN)
    (tmp_path / "podman").chmod(0o755)
    log, script = tmp_path / "log", ROOT / "scripts" / "in_image.sh"
    environment = {**os.environ, "PODMAN": str(tmp_path / "podman"), "PODMAN_LOG": str(log), "PODMAN_HAS": digest}

    def run(image: str) -> subprocess.CompletedProcess[str]:
        command = [str(script), image, str(tmp_path / "here"), "samebits", "--help"]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    assert run(str(toy.out)).returncode == 0
    asked = log.read_text().splitlines()
    assert f"pull --quiet oci:{toy.out}" in asked
    assert f"--env SAMEBITS_IMAGE={digest} " in asked[-1] and asked[-1].endswith("0123abcd samebits --help")
    assert "--network none" in asked[-1]
    named = run(f"registry.example.org/samebits@{digest}")
    assert named.returncode == 0, "podman has it by now"
    for wrong in ("registry.example.org/samebits:latest", str(tmp_path)):
        done = run(wrong)
        assert done.returncode == 1 and "error: in_image: " in done.stderr, "a tag is no digest, a folder no image"


def test_one_path_twice_in_a_layer_is_refused_unless_it_is_the_same(tmp_path: Path) -> None:
    def write(writer: Writer) -> dict[str, str]:
        writer.file("a/b", b"1")
        writer.file("a/b", b"1")
        writer.file("a/b", b"2")
        return {}

    with pytest.raises(ImageError, match="layer x: a/b comes twice"):
        make(Layer("x", "0", write), 0, tmp_path / "blob", tmp_path / "listing")


def test_a_stray_file_of_a_wheel_is_left_out_and_not_recorded(toy: Toy) -> None:
    """Two wheels may bring one that nobody imports, such as what they were built by."""
    intruder = toy_image.wheel(toy.cache, "intruder", "torch")
    for path, line in (
        ("image/cpu.lock", f"{intruder.name} {intruder.version} {intruder.sha256} {intruder.file}\n"),
        ("manifests/locks/cpu.txt", f"intruder==1.0 \\\n    --hash=sha256:{intruder.sha256}\n"),
    ):
        (toy.root / path).write_text((toy.root / path).read_text() + line)
    described = toy.root / "image" / "image.toml"
    described.write_text(re.sub(r"(?m)^stray = .*$", 'stray = ["torch.py"]', described.read_text()))
    toy.commit()
    toy.compose()
    site = load_image(toy.root).site
    assert f"{site}/torch.py" not in tar_of(toy.out, 1) and f"{site}/torch.py" not in tar_of(toy.out, 2)
    unpack(toy.out, 2, toy.root.parent / "unpacked")
    record = (toy.root.parent / "unpacked" / site / "intruder-1.0.dist-info" / "RECORD").read_text()
    assert "intruder-run" in record and "torch.py" not in record


def test_a_compiled_extension_lies_beside_the_patched_wheels_and_in_the_manifest(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, pin = b"as if compiled", toy_image.archive(toy.cache)
    digest = hashlib.sha256(library).hexdigest()
    blobs: list[Path] = []

    def compile_extension(image: Image, artefact: Artefact, headers: list[Wheel], blob: Path, cache: Path) -> bytes:
        blobs.append(blob)
        return library

    monkeypatch.setattr(extension, "compile_extension", compile_extension)
    with (toy.root / "manifests" / "upstreams.toml").open("a") as file:
        file.write(f'[[upstream.toy.artefact]]\nname = "{pin.name}"\nversion = "1.0"\nfile = "{pin.file}"\n')
        file.write(f'sha256 = "{pin.sha256}"\nprofiles = []\nmetadata = {{ "Requires-Dist: onnx" = "" }}\n')
    described = toy.root / "image" / "image.toml"
    text, said = described.read_text(), load_image(toy.root).extension
    for old, new in ((said.upstream, "toy"), (said.artefact, pin.file), (said.name, "toy/lib/toy_torch")):
        text = text.replace(f'= "{old}"', f'= "{new}"')
    text = re.sub('(?m)^sha256 = ".*"$', f'sha256 = "{digest}"', text)
    described.write_text(re.sub(r"(?ms)^wheels = \[.*?\]", 'wheels = ["torch"]', text))
    toy.commit()
    toy.compose()
    name = "toy/lib/toy_torch.cpython-313-x86_64-linux-gnu.so"
    assert f"{load_image(toy.root).site}/{name}" in tar_of(toy.out, 3)
    document = verify(toy.out, toy.root)
    assert document["toolchain"] | {name: digest, pin.file: pin.sha256} == document["toolchain"]
    assert "toy_torch-1.0+samebits.3-cp313-cp313-linux_x86_64.whl" in document["image"]["layers"][3]["parts"]
    assert toy.compose() == document["image"]["digest"]
    assert [blob.is_file() for blob in blobs] == [True], "compiled once, when the base was there"


def test_the_number_of_threads_is_not_in_a_layers_bytes() -> None:
    """What `layers.make` relies on of the compressor: it compresses in its multi-threaded mode always."""
    data = random.Random(0).randbytes(3 << 20) * 4
    made = {zstandard.ZstdCompressor(level=3, threads=n, write_content_size=False).compress(data) for n in (1, 2, 4)}
    assert len(made) == 1


def test_a_run_in_an_image_says_which_and_refuses_one_that_was_changed(toy: Toy, tmp_path: Path) -> None:
    """The image's inventory stands for the repository and the wheels; the digest comes from whoever starts the run."""
    digest = toy.compose()
    root = tmp_path / "unpacked"
    for number in (3, 4):
        unpack(toy.out, number, root)
    home = root / "opt" / "samebits"
    said = provenance.image_inventory(home / "inventory.json", root)
    assert said["git_commit"] == toy_image.git(toy.root, "rev-parse", "HEAD").strip()
    assert list(said["wheels"]) == ["toy-1.0+cpu.samebits.3-py3-none-any.whl"]
    assert digest.removeprefix("sha256:") not in json.dumps(said), "no image holds its own digest"
    (record,) = said["records"]
    (root / record).write_text("altered")
    with pytest.raises(provenance.ProvenanceError, match=r"toy-1\.0.*RECORD is not what the image was built with"):
        provenance.image_inventory(home / "inventory.json", root)


def test_the_identity_of_a_run_in_an_image(tmp_path: Path) -> None:
    inventory = {"git_commit": "1" * 40, "wheels": {"toy-1.0-py3-none-any.whl": "2" * 64}, "records": {}}
    (tmp_path / "inventory.json").write_text(json.dumps(inventory))
    (tmp_path / "cpu.txt").write_text("")
    model = {"name": "toy", "seed": 0, "tokenizer_sha256": "3" * 64, "layers": 1, "hidden": 128}
    identity = provenance.collect(
        root=tmp_path,
        lock=tmp_path / "cpu.txt",
        requirements=tmp_path / "no such file",
        arm=0,
        runner="v1",
        config_sha256="4" * 64,
        model=model,
        command=["samebits"],
        environment={"SAMEBITS_IMAGE": f"sha256:{'5' * 64}"},
    )
    assert identity["image"]["digest"] == f"sha256:{'5' * 64}"
    assert (identity["git_commit"], identity["git_dirty"]) == ("1" * 40, False)
    assert identity["wheels"] == inventory["wheels"]


KILLED = """
import os, signal, sys
from pathlib import Path
import toy_image
from samebits.image import compose, delivery, debian  # what is imported later is no event of a build
import cyclonedx.output.json, installer, zstandard
compose.base_layer = toy_image.base_layer
root, out, cache, last = sys.argv[1:]
seen = 0

def count(event, arguments):
    global seen
    if event.partition(".")[0] in ("open", "os", "shutil", "subprocess", "tempfile", "fcntl"):
        seen += 1
        if seen == int(last):
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
compose.compose(Path(root), "cpu", Path(out), Path(cache), lambda _: None)
print(seen)
"""


def test_killed_at_ten_moments_it_leaves_no_half_image_and_the_next_run_gives_the_same(
    toy: Toy, tmp_path: Path
) -> None:
    """Each time without cached layers; a moment is one of the build's acts on files and processes, drawn from all."""
    whole = toy.compose()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "unit"), str(ROOT / "src")])}

    def build(last: int) -> subprocess.CompletedProcess[str]:
        for kept in (toy.cache / "image").iterdir():
            if kept.is_file():
                kept.unlink()
        command = [sys.executable, "-c", KILLED, str(toy.root), str(tmp_path / "killed"), str(toy.cache), str(last)]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    acts, rng = int(build(0).stdout), random.Random(7)
    assert acts > 200
    for tenth in range(10):
        # The last ones only remove what was there before; how many acts there are differs by a few.
        done = build(int(acts * 0.95 * (tenth + rng.random()) / 10) + 1)
        assert done.returncode == -signal.SIGKILL
        if (tmp_path / "killed").exists():
            assert verify(tmp_path / "killed")["image"]["digest"] == whole
    assert compose.compose(toy.root, "cpu", tmp_path / "killed", toy.cache, lambda _: None) == whole
    assert verify(tmp_path / "killed")["image"]["digest"] == whole
    left = [path.name for folder in (tmp_path, toy.cache, toy.cache / "image") for path in folder.glob(".*")]
    assert left == []


@pytest.mark.parametrize("profile", PROFILES)
def test_the_committed_locks_hold_what_manifests_locks_has(profile: str) -> None:
    image = load_image(ROOT)
    wheels = load_wheels(ROOT, profile)
    check(ROOT, profile, image, wheels)
    assert {wheel.name for wheel in wheels if wheel.file.endswith(".gz")} <= set(locking.SOURCE_ONLY)
    assert "://" not in "".join(path.read_text() for path in (ROOT / "image").iterdir())
