"""Receipts: a verdict, the claim it is about, and the counts behind it, in one JSON file.

A receipt carries a checksum over itself, so that an edited number is noticed; whether the numbers support the
verdict is the judge's question, not asked here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samebits.errors import SamebitsError

from .document import Kind


class ReceiptError(SamebitsError):
    """A receipt that cannot be believed: the file, what is wrong with it, what to do."""


_KIND = Kind("receipt-1", ReceiptError, "judge the run")
SCHEMA = _KIND.name


def build(**fields: Any) -> dict[str, Any]:
    """A receipt of these fields (see schemas/receipt-1.json) with its schema name and checksum."""
    return _KIND.build(**fields)


def validate(receipt: Any, place: str = "receipt") -> None:
    """ReceiptError unless `receipt` follows its schema and its checksum is its own."""
    _KIND.validate(receipt, place)


def write(path: Path, receipt: dict[str, Any]) -> None:
    """Validate, then replace `path` in one step."""
    _KIND.write(path, receipt)


def read(path: Path) -> dict[str, Any]:
    """The receipt at `path`, validated; ReceiptError otherwise."""
    return _KIND.read(path)
