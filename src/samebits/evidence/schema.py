"""The JSON schemas of evidence, one file a document and version (`schemas/`, Draft 2020-12).

`problems` lists what a document lacks. Readers call it before they look at a single field, so that no other
code has to ask whether a field is there or what type it has.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

from jsonschema import Draft202012Validator, validators
from referencing import Registry, Resource

from . import strictjson


def problems(document: Any, name: str) -> list[str]:
    """What keeps `document` from being a `name` ("execution-1", "capsule-step-1", …, "receipt-1"); empty if nothing."""
    found = sorted(_validator(name).iter_errors(document), key=lambda e: (list(map(str, e.absolute_path)), e.message))
    return [f"{'/'.join(map(str, e.absolute_path)) or 'document'}: {e.message[:200]}" for e in found]


@functools.cache
def _validator(name: str) -> Any:
    # JSON schema lets 1.0 pass for an integer; counts are integers here.
    strict = Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
    )
    cls = validators.extend(Draft202012Validator, type_checker=strict)
    registry = _registry()
    return cls(registry.contents(f"samebits:{name}"), registry=registry)


@functools.cache
def _registry() -> Any:
    folder = resources.files(__package__) / "schemas"
    documents = [strictjson.loads(f.read_bytes()) for f in folder.iterdir() if f.name.endswith(".json")]
    for document in documents:
        Draft202012Validator.check_schema(document)
    return Registry().with_resources((d["$id"], Resource.from_contents(d)) for d in documents)
