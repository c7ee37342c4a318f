"""Receipts: a verdict, the claim it is about, and the counts behind it, in one JSON file.

There are two kinds: of a run, and of the invariance matrix of an engine. A receipt carries a checksum over itself, so
that an edited number is noticed; whether the numbers support the verdict is the judge's question, not asked here.
"""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import Any

from samebits.errors import SamebitsError

from . import schema, strictjson

SCHEMA = "samebits.receipt/1"
INVARIANCE = "samebits.invariance/1"
_FILES = {SCHEMA: "receipt-1", INVARIANCE: "invariance-1"}


class ReceiptError(SamebitsError):
    """A receipt that cannot be believed: the file, what is wrong with it, what to do."""


def build(kind: str = SCHEMA, /, **fields: Any) -> dict[str, Any]:
    """A receipt of these fields (see the schema of its kind) with its schema name and checksum."""
    receipt = {"schema": kind, **fields}
    receipt["checksum"] = _checksum(receipt)
    validate(receipt, kind=kind)
    return receipt


def validate(receipt: Any, place: str = "receipt", kind: str = SCHEMA) -> None:
    """ReceiptError unless `receipt` follows the schema of its kind and its checksum is its own."""
    found = schema.problems(receipt, _FILES[kind])
    if found:
        raise ReceiptError(f"{place}: breaks {kind}: {'; '.join(found[:3])}; judge the run again")
    if receipt["checksum"] != _checksum(receipt):
        raise ReceiptError(f"{place}: edited: its checksum is not its own; judge the run again")


def write(path: Path, receipt: dict[str, Any]) -> None:
    """Validate, then replace `path` in one step."""
    validate(receipt, str(path), _kind(receipt))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(strictjson.dumps(receipt))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path) -> dict[str, Any]:
    """The receipt at `path`, of either kind, validated; ReceiptError otherwise."""
    try:
        receipt = strictjson.loads(path.read_bytes())
    except OSError as error:
        raise ReceiptError(f"{path}: cannot be read: {error.strerror}; judge the run first") from error
    except ValueError as error:
        raise ReceiptError(f"{path}: not JSON: {error}; judge the run again") from error
    validate(receipt, str(path), _kind(receipt))
    return dict(receipt)


def _kind(receipt: Any) -> str:
    """The kind that a document says it is of; a run's if it says none that is known."""
    said = receipt.get("schema") if isinstance(receipt, dict) else None
    return said if said in _FILES else SCHEMA


def _checksum(receipt: dict[str, Any]) -> str:
    body = {key: value for key, value in receipt.items() if key != "checksum"}
    return hashlib.sha256(strictjson.canonical(body)).hexdigest()
