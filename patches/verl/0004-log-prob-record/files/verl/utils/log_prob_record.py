"""Capsules of a training run: folders of tensors with a JSON sidecar and a checksum of every file.

A step capsule holds what rollout, recomputation and update said about the same tokens; a sync capsule holds what
the trainer sent and what the engine has. The reader is another program: nothing here judges.
"""

import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from safetensors.torch import save_file

SCHEMA = "samebits.capsule/1"


def sha256_of(path: pathlib.Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    """Dtype, shape and SHA-256 of a tensor's bytes in row-major order."""
    host = tensor.detach().to("cpu").contiguous()
    # reshape before view: a zero-dimensional tensor cannot change its item size.
    digest = hashlib.sha256(host.reshape(-1).view(torch.uint8).numpy()).hexdigest()
    return {"dtype": str(host.dtype).removeprefix("torch."), "shape": list(host.shape), "sha256": digest}


def described(weights: Iterable[tuple[str, torch.Tensor]], into: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Passes a stream of named tensors on and leaves a description of each in ``into``."""
    for name, tensor in weights:
        into[name] = describe(tensor)
        yield name, tensor


def write_capsule(folder: pathlib.Path, sidecar: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes ``tensors.safetensors``, ``capsule.json`` and, last, ``SHA256SUMS``; the folder appears whole or not at all.

    Raises:
        FileExistsError: the folder exists. A run writes each capsule once; use a fresh output folder.
    """
    if folder.exists():
        raise FileExistsError(f"capsule {folder} exists already: choose an output folder of its own for each run")
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, draft / "tensors.safetensors")
    (draft / "capsule.json").write_text(json.dumps({"schema": SCHEMA, **sidecar}, indent=1, sort_keys=True) + "\n")
    names = sorted(file.name for file in draft.iterdir())
    (draft / "SHA256SUMS").write_text("".join(f"{sha256_of(draft / name)}  {name}\n" for name in names))
    draft.rename(folder)


def contract_name() -> str | None:
    """The numerical contract of the batch-invariant operators that this process has loaded; None if it has none.

    A trainer and a rollout whose names differ compute by different rules, whatever their bits happen to be.
    """
    operators = torch.ops.batch_invariant
    return str(operators.contract()) if hasattr(operators, "contract") else None


def differing_bits(valid: torch.Tensor, rollout: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where two paths' logprobs (rows, tokens) of the same valid tokens have other bits, as (count, 2) of row and column.

    Bits and never values: the ratio of two logprobs that differ in the last place is 1 in fp32.

    Raises:
        ValueError: dtypes that differ, no valid token, or one whose logprob is no number: that is no comparison.
    """
    if rollout.dtype != other.dtype:
        raise ValueError(f"one path says {rollout.dtype} and the other {other.dtype}; their bits cannot be compared")
    if not valid.any():
        raise ValueError("no token is valid; nothing was compared")
    for name, values in (("rollout", rollout), ("other path", other)):
        wrong = (valid & ~values.isfinite()).nonzero()
        if len(wrong):
            row, column = wrong[0].tolist()
            raise ValueError(f"the {name} says {float(values[row, column])} for sample {row}, token {column}")
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[rollout.element_size()]
    return (valid & (rollout.view(bits) != other.view(bits))).nonzero()


def right_padded(rows: Iterable[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Stacks vectors of different lengths into (rows, longest), zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence([row.to(dtype) for row in rows], batch_first=True)


def sampling_seed(base: int, step: int, index: int, session: int) -> int:
    """A seed in [0, 2**63) for one request: the same for the same request of a run, different for any two requests."""
    digest = hashlib.sha256(f"{base}/{step}/{index}/{session}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
