"""Fetching: through pip, by hash, cached by content; nothing but the pinned bytes ever comes out."""

from pathlib import Path

import pytest
import toy

from samebits.sources.fetch import FetchError, fetch, file_sha256
from samebits.sources.pins import Artefact


@pytest.fixture
def pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Artefact:
    """Toy's pin, on an index that is a folder: what pip itself reads from its environment."""
    path, pin = toy.release(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    return pin


def no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))


def test_a_file_is_fetched_once(pin: Artefact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch(pin, tmp_path / "cache")
    assert path == tmp_path / "cache" / pin.sha256 / pin.file
    assert file_sha256(path) == pin.sha256
    assert [p.name for p in path.parent.iterdir()] == [pin.file], "no partial files stay"
    no_index(monkeypatch, tmp_path)
    assert fetch(pin, tmp_path / "cache") == path


@pytest.mark.parametrize("damage", ["truncated", "altered"])
def test_a_damaged_cached_file_is_fetched_again(pin: Artefact, tmp_path: Path, damage: str) -> None:
    path = fetch(pin, tmp_path / "cache")
    data = path.read_bytes()
    path.write_bytes(data[:-100] if damage == "truncated" else data[:-1] + bytes([data[-1] ^ 1]))
    assert file_sha256(fetch(pin, tmp_path / "cache")) == pin.sha256


def test_a_damaged_cached_file_is_never_returned(
    pin: Artefact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(pin, tmp_path / "cache").write_bytes(b"altered")
    no_index(monkeypatch, tmp_path)
    with pytest.raises(FetchError, match=r"toy-cpu==1\.0.*pip download failed"):
        fetch(pin, tmp_path / "cache")


def test_a_file_of_another_hash_is_refused(pin: Artefact, tmp_path: Path) -> None:
    other = Artefact(pin.name, pin.version, pin.file, "0" * 64, pin.profiles)
    with pytest.raises(FetchError, match="Remedy"):
        fetch(other, tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]


def test_the_hash_is_verified_whatever_the_client_did(
    pin: Artefact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(artefact: Artefact, folder: Path) -> None:
        (folder / artefact.file).write_bytes(b"something else")

    monkeypatch.setattr("samebits.sources.fetch.download", careless)
    with pytest.raises(FetchError, match=f"pinned is {pin.sha256}"):
        fetch(pin, tmp_path / "cache")


def test_a_file_of_another_name_is_refused(pin: Artefact, tmp_path: Path) -> None:
    other = Artefact(pin.name, pin.version, "toy_cpu-1.0-py2.py3-none-any.whl", pin.sha256, pin.profiles)
    with pytest.raises(FetchError, match=r"toy_cpu-1\.0-py3-none-any\.whl"):
        fetch(other, tmp_path / "cache")


def test_the_environment_names_the_cache(pin: Artefact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEBITS_CACHE", str(tmp_path / "elsewhere"))
    assert fetch(pin) == tmp_path / "elsewhere" / pin.sha256 / pin.file
