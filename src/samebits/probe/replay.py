"""Runs a kept operator again: `python -m samebits.probe.replay FOLDER...`, each a folder of `samebits check localise`.

Prints one JSON line a folder: the operator, how many elements of its outputs differ from the recorded ones now, and how
many there are. The rows that nothing wrote when it was recorded may differ; a contract's operator leaves none.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
from typing import Any

import torch
from safetensors.torch import load_file

from samebits.recipe import arms

from .trace import _flat, _written


def replay(folder: pathlib.Path) -> dict[str, Any]:
    """Run the operator of one folder on its recorded inputs. ValueError if a file is not the recorded one."""
    for line in (folder / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            raise ValueError(f"{folder / name}: edited: its sha256 is not the recorded one")
    kept = json.loads((folder / "replay.json").read_text())
    tensors = load_file(folder / "tensors.safetensors")

    def value(one: dict[str, Any]) -> Any:
        ((kind, content),) = one.items()
        if kind == "tensor":
            return tensors[content]
        if kind == "map":
            return {key: value(item) for key, item in content.items()}
        if kind == "list":
            return [value(item) for item in content]
        if kind in ("dtype", "device"):
            return getattr(torch, content) if kind == "dtype" else torch.device(content)
        return content

    if kept["operator"].startswith("batch_invariant."):
        arms.contract(1)  # loads the library of operators
    namespace, name, overload = kept["operator"].split(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    args, kwargs = value(kept["args"]), value(kept["kwargs"])
    results = list(_flat(operator(*args, **kwargs)))
    if operator._schema.is_mutable:
        results += list(_flat(_written(operator, args, kwargs)))
    recorded = [tensors[f"output-{i}"] for i in range(kept["outputs"])]
    differ = elements = 0
    for one in recorded:
        same = next(r for r in results if r.shape == one.shape and r.dtype == one.dtype)
        results = [r for r in results if r is not same]
        width = one.element_size()
        a, b = (t.contiguous().view(torch.uint8).reshape(-1, width) for t in (one, same))
        differ += int((a != b).any(-1).sum())
        elements += one.numel()
    return {"folder": folder.name, "operator": kept["operator"], "differ": differ, "elements": elements}


def main() -> None:
    """``python -m samebits.probe.replay FOLDER...``"""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folders", type=pathlib.Path, nargs="+")
    import vllm._custom_ops  # noqa: F401

    for folder in parser.parse_args().folders:
        print(json.dumps(replay(folder)), flush=True)


if __name__ == "__main__":
    main()
