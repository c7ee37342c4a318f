"""Capsules: what a run recorded, as folders that are whole or refused.

A capsule holds tensors.safetensors, capsule.json and SHA256SUMS, which lists the other two. It is written under
a hidden name and renamed when it is complete; reading verifies every byte before it believes one.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from samebits.errors import SamebitsError

from . import schema, strictjson

SCHEMA = "samebits.capsule/1"
TENSORS, META, SUMS = "tensors.safetensors", "capsule.json", "SHA256SUMS"

# Name of a dtype -> (its code in a safetensors header, the numpy dtype that holds its bits). numpy has no bfloat16:
# its bits travel as uint16.
DTYPES: dict[str, tuple[str, str]] = {
    "bool": ("BOOL", "|u1"),
    "int64": ("I64", "<i8"),
    "float64": ("F64", "<f8"),
    "float32": ("F32", "<f4"),
    "float16": ("F16", "<f2"),
    "bfloat16": ("BF16", "<u2"),
}
LOGPROB = ("float64", "float32", "float16", "bfloat16")

# Kind -> tensor -> (dtypes allowed, axes). An axis has one length in the whole capsule, and it is not zero.
# n sequences, P longest prompt, T longest response; Q probes, L longest probe.
LAYOUT: dict[str, dict[str, tuple[tuple[str, ...], str]]] = {
    "step": {
        "prompts": (("int64",), "nP"),
        "prompt_length": (("int64",), "n"),
        "responses": (("int64",), "nT"),
        "valid": (("bool",), "nT"),
        "rollout": (LOGPROB, "nT"),
        "recompute": (LOGPROB, "nT"),
        "actor": (LOGPROB, "nT"),
        "advantages": (("float32",), "nT"),
        "reward": (("float32",), "n"),
        "group": (("int64",), "n"),
        "seed": (("int64",), "n"),
        "order": (("int64",), "n"),
    },
    "sync": {
        "probe_tokens": (("int64",), "QL"),
        "probe_length": (("int64",), "Q"),
        "probe_prompt_length": (("int64",), "Q"),
        "probe_log_probs": (("float32",), "QL"),
    },
}
LAYOUT["fresh"] = LAYOUT["sync"]


class CapsuleError(SamebitsError):
    """A capsule that cannot be believed, or cannot be written: folder, file, what is wrong, what to do."""

    def __init__(self, folder: Path, file: str, what: str, remedy: str = "record the run again") -> None:
        super().__init__(f"{folder}: {file}: {what}; {remedy}")
        self.folder, self.file, self.what, self.remedy = folder, file, what, remedy


@dataclass(frozen=True)
class Tensor:
    """A tensor that is read piece by piece: a capsule of any size needs the memory of one piece.

    dtype: a key of DTYPES. `flat(start, stop)` returns those elements of the flattened tensor (bool as bool,
    bfloat16 as uint16 bits); `read()` returns all of it in its shape.
    """

    dtype: str
    shape: tuple[int, ...]
    flat: Callable[[int, int], NDArray[Any]]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def read(self) -> NDArray[Any]:
        return self.flat(0, self.size).reshape(self.shape)

    @classmethod
    def of(cls, array: NDArray[Any], dtype: str | None = None) -> Tensor:
        """A tensor in memory. Pass uint16 bits with dtype="bfloat16"; any other dtype is the array's own."""
        name = dtype or array.dtype.name
        stored = "uint16" if name == "bfloat16" else name
        if name not in DTYPES or array.dtype.name != stored:
            raise ValueError(f"a tensor cannot hold {array.dtype.name} as {name}; use one of {', '.join(DTYPES)}")
        flattened = np.ascontiguousarray(array).reshape(-1)
        return cls(name, array.shape, lambda start, stop: flattened[start:stop])


@dataclass(frozen=True)
class Capsule:
    """A verified capsule. `meta` is capsule.json; `sums` is SHA256SUMS by file; `sha256` that of SHA256SUMS itself."""

    folder: Path
    kind: str
    meta: dict[str, Any]
    tensors: dict[str, Tensor]
    sums: dict[str, str]
    sha256: str


def write_capsule(folder: Path, meta: Mapping[str, Any], tensors: Mapping[str, Tensor | NDArray[Any]]) -> None:
    """Write a capsule that `read_capsule` accepts. CapsuleError if `folder` exists, or if meta or tensors break the
    schema or the layout of their kind; nothing is left behind then."""
    kept = {name: t if isinstance(t, Tensor) else Tensor.of(t) for name, t in tensors.items()}
    _check_meta(folder, dict(meta))
    _check_layout(folder, meta["kind"], kept)
    if folder.exists():
        raise CapsuleError(folder, "", "exists already", "choose an empty folder: a capsule is never overwritten")
    temporary = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"
    temporary.mkdir(parents=True)
    try:
        arrays = {name: np.ascontiguousarray(t.read()) for name, t in kept.items()}
        specs = {
            name: TensorSpec(dtype=kept[name].dtype, shape=a.shape, data_ptr=a.ctypes.data, data_len=a.nbytes)
            for name, a in arrays.items()
        }
        serialize_file(specs, temporary / TENSORS)
        (temporary / META).write_bytes(strictjson.dumps(dict(meta)))
        sums = {name: _sha256(temporary / name) for name in (META, TENSORS)}
        (temporary / SUMS).write_bytes(_render(sums))
        for path in (*temporary.iterdir(), temporary):
            _flush(path)
        temporary.rename(folder)
    except (OSError, SafetensorError) as error:
        raise CapsuleError(folder, "", f"cannot be written: {error}", "free space or choose another folder") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_capsule(folder: Path) -> Capsule:
    """Verify `folder` byte by byte and open it. CapsuleError for anything but a whole, untouched capsule."""
    try:
        sums, digest = _verify(folder)
        meta = _check_meta(folder, strictjson.loads((folder / META).read_bytes()))
        tensors = _open_tensors(folder)
    except ValueError as error:
        raise CapsuleError(folder, META, f"not JSON: {error}") from error
    except OSError as error:  # a reason may be published: the file's name, not its path
        raise CapsuleError(folder, Path(error.filename or "").name, f"cannot be read: {error.strerror}") from error
    _check_layout(folder, meta["kind"], tensors)
    return Capsule(folder, meta["kind"], meta, tensors, sums, digest)


def _verify(folder: Path) -> tuple[dict[str, str], str]:
    if not folder.is_dir():
        raise CapsuleError(folder, "", "no such folder")
    if not (folder / SUMS).is_file():
        raise CapsuleError(folder, SUMS, "missing: the capsule was never completed")
    recorded = (folder / SUMS).read_bytes()
    lines = re.findall(rb"^([0-9a-f]{64})  ([A-Za-z0-9._-]+)\n", recorded, re.MULTILINE)
    sums = {name.decode(): value.decode() for value, name in lines}
    if _render(sums) != recorded:
        raise CapsuleError(folder, SUMS, "truncated or edited: not one sorted sha256sum line a file")
    for name in (META, TENSORS):
        if name not in sums:
            raise CapsuleError(folder, name, f"not listed in {SUMS}")
    present = {entry.name for entry in folder.iterdir()} - {SUMS}
    for name in sorted(present ^ set(sums)):
        raise CapsuleError(folder, name, "missing" if name in sums else f"not listed in {SUMS}")
    for name, expected in sums.items():
        path = folder / name
        if path.is_symlink() or not path.is_file() or path.stat().st_size == 0:
            raise CapsuleError(folder, name, "empty, or not a regular file")
        if _sha256(path) != expected:
            raise CapsuleError(folder, name, "truncated or edited: its sha256 is not the recorded one")
    return sums, hashlib.sha256(recorded).hexdigest()


def _check_meta(folder: Path, meta: Any) -> dict[str, Any]:
    kind = meta.get("kind") if isinstance(meta, dict) else None
    if kind not in ("step", "sync", "fresh"):
        raise CapsuleError(folder, META, f"kind is {kind!r:.40}, not step, sync or fresh")
    found = schema.problems(meta, f"capsule-{kind}-1")
    if found:
        raise CapsuleError(folder, META, f"breaks the schema of a {kind} capsule: {'; '.join(found[:3])}")
    return meta


def _check_layout(folder: Path, kind: str, tensors: Mapping[str, Tensor]) -> None:
    axes: dict[str, int] = {}
    for name in sorted(LAYOUT[kind].keys() | tensors.keys()):
        if name not in tensors:
            raise CapsuleError(folder, TENSORS, f"tensor {name} is missing")
        if name not in LAYOUT[kind]:
            raise CapsuleError(folder, TENSORS, f"tensor {name} does not belong into a {kind} capsule")
        allowed, letters = LAYOUT[kind][name]
        tensor = tensors[name]
        if tensor.dtype not in allowed:
            raise CapsuleError(folder, TENSORS, f"tensor {name} is {tensor.dtype}, not {' or '.join(allowed)}")
        fits = len(tensor.shape) == len(letters) and all(
            axes.setdefault(letter, length) == length for letter, length in zip(letters, tensor.shape, strict=True)
        )
        if not fits:
            known = ", ".join(f"{letter}={length}" for letter, length in axes.items())
            raise CapsuleError(
                folder, TENSORS, f"tensor {name} has shape {list(tensor.shape)}, not [{','.join(letters)}] ({known})"
            )
    if 0 in axes.values():
        raise CapsuleError(folder, TENSORS, "empty: a tensor has an axis of length zero")


def _open_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / TENSORS
    try:
        with safe_open(path, framework="np"):  # the library checks the header: sizes, offsets, no gap, no overlap
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = strictjson.loads(file.read(length))
    except (SafetensorError, ValueError) as error:
        raise CapsuleError(folder, TENSORS, f"not a safetensors file: {error}") from error
    header.pop("__metadata__", None)
    names = {code: name for name, (code, _) in DTYPES.items()}
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in names:
            raise CapsuleError(folder, TENSORS, f"tensor {name} is {entry['dtype']}, not {' or '.join(names)}")
        dtype = names[entry["dtype"]]
        flat = _reader(folder, name, dtype, 8 + length + entry["data_offsets"][0])
        tensors[name] = Tensor(dtype, tuple(entry["shape"]), flat)
    return tensors


def _reader(folder: Path, name: str, dtype: str, offset: int) -> Callable[[int, int], NDArray[Any]]:
    stored = np.dtype(DTYPES[dtype][1])

    def flat(start: int, stop: int) -> NDArray[Any]:
        with (folder / TENSORS).open("rb", buffering=0) as file:
            file.seek(offset + start * stored.itemsize)
            array = np.fromfile(file, stored, stop - start)
        if array.size != stop - start:
            raise CapsuleError(folder, TENSORS, f"tensor {name} ends before its last element")
        if dtype == "bool":
            if array.size and array.max() > 1:
                raise CapsuleError(folder, TENSORS, f"tensor {name} holds a byte that is neither true nor false")
            return array.view(np.bool_)
        return array

    return flat


def _render(sums: Mapping[str, str]) -> bytes:
    return "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)).encode()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
