"""JSON as evidence needs it: one way to read a document, one way to write it.

Reading refuses what Python's reader lets through and what two readers may see differently: NaN and
infinities, a key given twice, integers beyond 64 bits, lone surrogates. It raises ValueError and nothing else.
"""

from __future__ import annotations

import json
import math
from typing import Any


def loads(data: bytes) -> Any:
    """Parse UTF-8 JSON `data` strictly; ValueError says what is wrong with it."""
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse,
            parse_float=_finite,
            parse_int=_int64,
        )
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # a lone surrogate fails here, not at the next writer
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def dumps(value: Any) -> bytes:
    """The document as UTF-8, indented, keys in the given order, one newline at the end; ValueError on NaN."""
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"


def canonical(value: Any) -> bytes:
    """The bytes that stand for `value` in a checksum: sorted keys, no white space."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond float64")
    return value


def _int64(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= int(text) < 2**63:
        raise ValueError(f"an integer of {len(text)} characters is beyond 64 bits")
    return int(text)
