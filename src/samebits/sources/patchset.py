"""A patch series as it stands in patches/<upstream>: folders of MESSAGE.md, edits.toml and files/, read and validated.

What can be said of an edit without the upstream's source is said here; the rest is for the engine (`patching`).
"""

import ast
import re
import textwrap
import tomllib
import warnings
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from samebits.errors import SamebitsError

Scope = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

IN_SYMBOL = ("body-start", "body-end", "before", "after")
AT_STATEMENT = ("before-statement", "after-statement")
IN_MODULE = ("imports-end", "module-end")
AT_LINE = ("before-line", "after-line")
NAMES = "names"
NOT_CODE = "none: not code"
BOTH: dict[str, type] = {"file": str, "symbol": str, "op": str, "text": str, "bases": list}
KEYS = {
    "insert": BOTH | {"where": str, "match": str, "guard": str},
    "replace": BOTH | {"sha256": list, "part": str, "reason": str, "test": str},
}
LITERAL = ast.Constant | ast.Tuple | ast.List | ast.Set | ast.Dict | ast.UnaryOp | ast.unaryop | ast.expr_context


class Kind(StrEnum):
    """Every reason for which a patch is refused, each with its usual remedy."""

    BAD_PATCH = "correct the patch folder"
    INSERT_WITHOUT_GUARD = "guard it by the condition under which the text may run"
    REPLACE_WITHOUT_REASON = "say why, and name a test (file::function) of the default arm, unchanged or mended"
    TEXT_DOES_NOT_PARSE = "correct the edit's text"
    FILE_MISSING = "find its new place, or limit `bases`"
    FILE_IN_THE_WAY = "rename ours, or edit theirs"
    FILE_HASH_UNLIKE = "look at what changed, then `samebits patch check --record`"
    ALREADY_APPLIED = "start from the pristine source"
    SYMBOL_MISSING = "find its new name in this version, or limit `bases`"
    SYMBOL_AMBIGUOUS = "anchor on an enclosing symbol"
    STATEMENT_MISSING = "adapt match, or limit `bases`"
    STATEMENT_AMBIGUOUS = "narrow the symbol or the match to one statement with lines of its own"
    STATEMENT_HASH_UNLIKE = "see what changed (`samebits patch hashes`), adapt the text and record the new sha256"
    EDITS_OVERLAP = "join the two edits"


@dataclass(frozen=True)
class Where:
    """The place an error speaks of: upstream and version, patch folder and edit, file and symbol."""

    upstream: str
    base: str = ""
    patch: str = ""
    edit: int = 0
    file: str = ""
    symbol: str = ""

    def __str__(self) -> str:
        patch = f"patches/{self.upstream}/{self.patch}" if self.patch else f"patches/{self.upstream}"
        number = f", edit {self.edit}" if self.edit else ""
        parts = [f"{self.upstream} {self.base}".strip(), f"{patch}{number}", self.file, self.symbol]
        return ": ".join(part for part in parts if part)


class PatchError(SamebitsError):
    """A patch cannot be put where it belongs. The message has the place, what is wrong, and what to do about it."""

    def __init__(self, kind: Kind, where: Where, what: str, remedy: str = "") -> None:
        super().__init__(f"{where}: {what}. Remedy: {remedy or kind}.")
        self.kind, self.where, self.what, self.remedy = kind, where, what, remedy or kind


def _refuse(where: Where, *faults: tuple[object, str, str]) -> None:
    """Raise the first of `faults` (condition, what, remedy) whose condition holds."""
    for holds, what, remedy in faults:
        if holds:
            raise PatchError(Kind.BAD_PATCH, where, what, remedy)


@dataclass(frozen=True)
class Edit:
    """One `[[edit]]` of an edits.toml, validated. `text` is dedented, without blank lines around it."""

    where: Where
    op: str
    text: str
    place: str = ""
    sha256: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()
    match: str = ""
    guard: str = ""
    part: str = ""
    reason: str = ""
    test: str = ""

    @property
    def is_python(self) -> bool:
        return self.where.file.endswith((".py", ".pyi"))


@dataclass(frozen=True)
class Patch:
    """One patch folder: one commit upstream. `files` maps a path in the upstream to an overlay file's bytes."""

    upstream: str
    name: str
    message: str
    files: dict[str, bytes]
    edits: tuple[Edit, ...]


def load_series(patches_root: Path, upstream: str) -> list[Patch]:
    """The patches of `patches_root/upstream` in order, validated on their own; [] where there are none."""
    return [_load_patch(path, upstream) for path in sorted((patches_root / upstream).glob("*")) if path.is_dir()]


def _load_patch(folder: Path, upstream: str) -> Patch:
    where = Where(upstream, patch=folder.name)
    message = _text(folder / "MESSAGE.md").strip()
    try:
        document = tomllib.loads(_text(folder / "edits.toml"))
    except tomllib.TOMLDecodeError as error:
        raise PatchError(Kind.BAD_PATCH, where, f"edits.toml is not valid TOML ({error})") from None
    tables = document.pop("edit", [])
    overlay = [path for path in sorted((folder / "files").rglob("*")) if path.is_file()]
    files = {p.relative_to(folder / "files").as_posix(): p.read_bytes() for p in overlay if p.suffix != ".pyc"}
    strangers = sorted({path.name for path in folder.iterdir()} - {"MESSAGE.md", "edits.toml", "files"})
    twins = sorted(path.name for path in folder.parent.glob(f"{folder.name[:4]}-*"))
    well_named = re.fullmatch(r"\d{4}-[a-z0-9][a-z0-9-]*", folder.name)
    splits = re.search(r"^(---|diff |From )", message, re.MULTILINE)
    _refuse(
        where,
        (not well_named, "the folder's name is not of the form NNNN-topic", "rename it"),
        (len(twins) > 1, f"{twins} have the same number", "give each patch its own"),
        (strangers, f"unexpected {strangers}", "keep MESSAGE.md, edits.toml and files/ only"),
        (not message, "MESSAGE.md is missing or empty", "write the commit message, subject first"),
        (splits, "MESSAGE.md has a line that git am takes for something else", "begin no line with ---, diff or From"),
        (document or not isinstance(tables, list), "edits.toml has other keys", "write [[edit]] tables only"),
        (not files and not tables, "the patch changes nothing", "add files/ or an edit, or remove the folder"),
    )
    for name, data in files.items():
        if name.endswith(".py"):
            parse(data.decode("utf-8"), replace(where, file=name), "the overlay file")
    edits = tuple(_load_edit(table, where, number, folder.parents[2]) for number, table in enumerate(tables, 1))
    return Patch(upstream, folder.name, message, files, edits)


def _text(path: Path) -> str:
    return path.read_text("utf-8") if path.is_file() else ""


def _load_edit(table: dict[str, Any], patch: Where, number: int, repository: Path) -> Edit:
    file, symbol, op = (str(table.get(key, "")) for key in ("file", "symbol", "op"))
    where = replace(patch, edit=number, file=file, symbol=symbol)
    keys = KEYS.get(op, {})
    wrong = [key for key, value in table.items() if not isinstance(value, keys.get(key, ()))]
    _refuse(
        where,
        (not keys or not file or "text" not in table, "file, text or op is missing", "op is insert or replace"),
        (wrong, f"for op {op!r} {wrong} mean nothing, or have the wrong type", f"use {', '.join(keys)}"),
    )
    text, place = textwrap.dedent(table["text"]).strip("\n"), table.get("where", "")
    rest = {key: table[key] for key in ("match", "guard", "part", "reason", "test") if key in table}
    edit = Edit(where, op, text, place, tuple(table.get("sha256", ())), tuple(table.get("bases", ())), **rest)
    if edit.is_python and edit.part != "header":
        _check_text(edit)
    if op == "insert":
        _check_insert(edit)
    else:
        _check_replace(edit, repository)
    return edit


def _check_text(edit: Edit) -> None:
    tree = parse(edit.text, edit.where, "the text")
    docstrings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant | ast.JoinedStr)]
    if any(string.lineno != string.end_lineno and string not in docstrings for string in strings):
        what, remedy = "indenting would change its multi-line string", "use one line, or a file of its own"
        raise PatchError(Kind.TEXT_DOES_NOT_PARSE, edit.where, what, remedy)


def _check_insert(edit: Edit) -> None:
    places = (IN_SYMBOL + AT_STATEMENT if edit.where.symbol else IN_MODULE) if edit.is_python else AT_LINE
    unmatched = bool(edit.match) != (edit.place in AT_STATEMENT + AT_LINE)
    _refuse(
        edit.where,
        (edit.place not in places, f"where = {edit.place!r} does not fit", f"use one of {', '.join(places)}"),
        (unmatched, "match goes with a statement or a line, and they with it", "add or remove it"),
    )
    try:
        re.compile(edit.match)
    except re.error as error:
        raise PatchError(Kind.BAD_PATCH, edit.where, f"match is no regular expression ({error})") from None
    remedy = "" if edit.is_python else f"write guard = {NOT_CODE!r}"
    if not edit.is_python:
        guarded, what = edit.guard == NOT_CODE, "a guard means nothing here"
    elif edit.guard == NAMES:
        guarded = all(map(_only_binds, ast.parse(edit.text).body))
        what = "the text is not only imports of names, definitions and constants"
    else:
        guard = parse(edit.guard, edit.where, "the guard")
        is_expression = [type(statement) for statement in guard.body] == [ast.Expr]
        guarded = is_expression and any(isinstance(node, ast.Name) for node in ast.walk(guard))
        what = f"guard = {edit.guard!r} is no condition"
    if not guarded:
        raise PatchError(Kind.INSERT_WITHOUT_GUARD, edit.where, what, remedy)


def _only_binds(statement: ast.stmt) -> bool:
    """Whether it does no more than bind names that the text shows: an import, a definition or a constant."""
    match statement:
        case ast.ImportFrom(names=[ast.alias(name="*")]):
            return False
        case ast.Expr(value=ast.Constant(value=str())):  # a field's docstring
            return True
        case ast.Assign(targets=[ast.Name()]) | ast.AnnAssign(target=ast.Name(), value=ast.expr()):
            return all(isinstance(node, LITERAL) for node in ast.walk(statement.value or statement))
    return isinstance(statement, Scope | ast.Import | ast.ImportFrom)


def _check_replace(edit: Edit, repository: Path) -> None:
    floating = edit.is_python and not edit.where.symbol
    hashed = edit.sha256 and all(re.fullmatch("[0-9a-f]{64}", str(digest)) for digest in edit.sha256)
    _refuse(
        edit.where,
        (floating, "a replace needs the symbol that holds the statement", "add it"),
        (edit.part not in ("", "header"), f"part = {edit.part!r} is unknown", 'write part = "header" or leave it out'),
        (not hashed, "a replace needs the sha256 of the statement", "see `samebits patch hashes --help`"),
    )
    file, _, name = edit.test.partition("::")
    name = name.rpartition("::")[2].partition("[")[0]
    tested = name and re.search(rf"\bdef {re.escape(name)}\(", _text(repository / file))
    if not edit.reason.strip() or not tested:
        raise PatchError(Kind.REPLACE_WITHOUT_REASON, edit.where, f"it has no reason, or no test {edit.test!r}")


def parse(text: str, where: Where, what: str, compiled: bool = False) -> ast.Module:
    """The syntax tree of `text`, which compiles too if asked; an error says `what` it is."""
    if "\r" in text:  # Python ends a line there, the engine does not
        raise PatchError(Kind.TEXT_DOES_NOT_PARSE, where, f"{what} has a carriage return", "only \\n may end a line")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
            if compiled:  # the compiler refuses more, such as a return outside of a function
                compile(text, where.file, "exec", dont_inherit=True)
            return tree
    except SyntaxError as error:
        what = f"{what} does not parse (line {error.lineno}: {error.msg})"
        raise PatchError(Kind.TEXT_DOES_NOT_PARSE, where, what) from None
