"""A JSON document of evidence that carries a checksum over itself, so that an edited number is noticed.

`Kind` is one such document: its schema, and the words of its errors.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.errors import SamebitsError

from . import schema, strictjson


@dataclass(frozen=True)
class Kind:
    """schema: its name and version ("receipt-1"). error: what is raised, with `remedy` at the end of the message."""

    schema: str
    error: type[SamebitsError]
    remedy: str

    @property
    def name(self) -> str:
        """What the document says of itself: "samebits.receipt/1"."""
        return "samebits." + "/".join(self.schema.rsplit("-", 1))

    def build(self, **fields: Any) -> dict[str, Any]:
        """A document of these fields with its schema's name and its checksum."""
        document = {"schema": self.name, **fields}
        document["checksum"] = _checksum(document)
        self.validate(document, self.schema.rsplit("-", 1)[0])
        return document

    def validate(self, document: Any, place: str) -> None:
        """The kind's error unless `document` follows its schema and its checksum is its own."""
        found = schema.problems(document, self.schema)
        if found:
            raise self.error(f"{place}: breaks {self.name}: {'; '.join(found[:3])}; {self.remedy} again")
        if document["checksum"] != _checksum(document):
            raise self.error(f"{place}: edited: its checksum is not its own; {self.remedy} again")

    def write(self, path: Path, document: dict[str, Any]) -> None:
        """Validate, then replace `path` in one step."""
        self.validate(document, str(path))
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            temporary.write_bytes(strictjson.dumps(document))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def read(self, path: Path) -> dict[str, Any]:
        """The document at `path`, validated; the kind's error otherwise."""
        try:
            document = strictjson.loads(path.read_bytes())
        except OSError as error:
            raise self.error(f"{path}: cannot be read: {error.strerror}; {self.remedy} first") from error
        except ValueError as error:
            raise self.error(f"{path}: not JSON: {error}; {self.remedy} again") from error
        self.validate(document, str(path))
        return dict(document)


def _checksum(document: dict[str, Any]) -> str:
    body = {key: value for key, value in document.items() if key != "checksum"}
    return hashlib.sha256(strictjson.canonical(body)).hexdigest()
