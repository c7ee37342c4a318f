"""A patch series as it stands in patches/<upstream>: folders of MESSAGE.md, edits.toml and files/, read and validated.

What can be said of an edit without the upstream's source is said here: its keys, its guard, its reason and its test.
Every refusal, here and in the engine (`patching`), is a `PatchError` that names upstream, patch, file, symbol, remedy.
"""

import ast
import re
import textwrap
import tomllib
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from samebits.errors import SamebitsError

Scope = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

IN_SYMBOL = ("body-start", "body-end", "before", "after")
AT_STATEMENT = ("before-statement", "after-statement")
IN_MODULE = ("imports-end", "module-end")
AT_LINE = ("before-line", "after-line")
NAMES = "names"
NOT_CODE = "none: not code"


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
    """A patch cannot be put where it belongs. `where` and `remedy` are attributes; the message has all of them."""

    def __init__(self, where: Where, what: str, remedy: str) -> None:
        super().__init__(f"{where}: {what}. Remedy: {remedy}.")
        self.where, self.what, self.remedy = where, what, remedy


class BadPatch(PatchError):
    """The patch folder or an edit is not well formed."""


class InsertWithoutGuard(PatchError):
    """An insert without a guard, or whose guard does not keep the default arm untouched."""


class ReplaceWithoutReason(PatchError):
    """A replace without a reason, or without a test that exists."""


class TextDoesNotParse(PatchError):
    """The text of an edit or an overlay file, the file before, or the file after is no valid Python."""


class FileMissing(PatchError):
    """The file that an edit names is not in the tree."""


class FileInTheWay(PatchError):
    """The upstream has a file of its own where an overlay file belongs."""


class AlreadyApplied(PatchError):
    """The edit's text, or the overlay file, stands in the tree already."""


class SymbolMissing(PatchError):
    """No class or function of that dotted name."""


class SymbolAmbiguous(PatchError):
    """More than one class or function of that dotted name."""


class StatementMissing(PatchError):
    """No statement (or line) matches."""


class StatementAmbiguous(PatchError):
    """More than one statement (or line) matches, or the statement shares its line with another."""


class StatementHashUnlike(PatchError):
    """No statement (or line) has a recorded sha256: the upstream's text changed."""


class EditsOverlap(PatchError):
    """Two edits of a patch claim the same lines."""


class FileHashUnlike(PatchError):
    """A touched file differs, before or after patching, from its record in manifests/patched."""


@dataclass(frozen=True)
class Edit:
    """One `[[edit]]` of an edits.toml, validated. `text` is dedented, without blank lines around it."""

    where: Where
    op: str
    text: str
    place: str = ""
    match: str = ""
    guard: str = ""
    part: str = ""
    sha256: tuple[str, ...] = ()
    reason: str = ""
    test: str = ""
    bases: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return self.where.file

    @property
    def is_python(self) -> bool:
        return self.file.endswith((".py", ".pyi"))


@dataclass(frozen=True)
class Patch:
    """One patch folder: one commit upstream. `files` maps a path in the upstream to an overlay file's bytes."""

    upstream: str
    name: str
    message: str
    files: dict[str, bytes] = field(repr=False)
    edits: tuple[Edit, ...] = field(repr=False)


def load_series(patches_root: Path, upstream: str) -> list[Patch]:
    """The patches of `patches_root/upstream` in order, validated on their own; [] where there are none.

    Raises BadPatch, InsertWithoutGuard, ReplaceWithoutReason or TextDoesNotParse.
    """
    folder = patches_root / upstream
    patches = [_load_patch(path, upstream) for path in sorted(folder.glob("*")) if path.is_dir()]
    numbers = [patch.name[:4] for patch in patches]
    for number in numbers:
        if numbers.count(number) > 1:
            raise BadPatch(Where(upstream), f"two patches have the number {number}", "give each patch its own number")
    return patches


def _load_patch(path: Path, upstream: str) -> Patch:
    where = Where(upstream, patch=path.name)
    if not re.fullmatch(r"\d{4}-[a-z0-9][a-z0-9-]*", path.name):
        raise BadPatch(where, "the folder's name is not of the form NNNN-topic", "rename it")
    strangers = {p.name for p in path.iterdir()} - {"MESSAGE.md", "edits.toml", "files"}
    if strangers:
        raise BadPatch(where, f"unexpected {sorted(strangers)}", "keep MESSAGE.md, edits.toml and files/ only")
    message = (path / "MESSAGE.md").read_text("utf-8").strip() if (path / "MESSAGE.md").is_file() else ""
    if not message:
        raise BadPatch(where, "MESSAGE.md is missing or empty", "write the commit message, subject first")
    if re.search(r"^(---|diff |From )", message, re.MULTILINE):
        raise BadPatch(where, "MESSAGE.md has a line that git am takes for something else", "no ---, diff or From")
    overlay = path / "files"
    found = sorted(p for p in overlay.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    files = {p.relative_to(overlay).as_posix(): p.read_bytes() for p in found}
    for name, data in files.items():
        if name.endswith(".py"):
            parse(data.decode("utf-8"), Where(upstream, patch=path.name, file=name), "the overlay file")
    edits: tuple[Edit, ...] = ()
    if (path / "edits.toml").is_file():
        try:
            document = tomllib.loads((path / "edits.toml").read_text("utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise BadPatch(where, f"edits.toml is not valid TOML ({error})", "mend it") from None
        if set(document) - {"edit"}:
            raise BadPatch(where, f"edits.toml has {sorted(set(document) - {'edit'})}", "write [[edit]] tables only")
        repository = path.parent.parent.parent
        edits = tuple(_load_edit(raw, where, n, repository) for n, raw in enumerate(document.get("edit", []), 1))
    if not files and not edits:
        raise BadPatch(where, "the patch changes nothing", "add files/ or an edit, or remove the folder")
    return Patch(upstream, path.name, message, files, edits)


def _load_edit(raw: dict, patch: Where, number: int, repository: Path) -> Edit:
    where = Where(patch.upstream, "", patch.patch, number, raw.get("file", ""), raw.get("symbol", ""))
    insert = {"where", "guard", "match"} if raw.get("op") == "insert" else {"sha256", "reason", "test", "part"}
    for key, value in raw.items():
        if key not in insert | {"file", "symbol", "op", "text", "bases"}:
            raise BadPatch(where, f"the key {key!r} has no meaning for op {raw.get('op')!r}", "remove or correct it")
        if not isinstance(value, list if key in ("bases", "sha256") else str):
            raise BadPatch(where, f"{key!r} has the wrong type", "write a string, or a list for bases and sha256")
    if raw.get("op") not in ("insert", "replace") or not raw.get("file") or "text" not in raw:
        raise BadPatch(where, "an edit needs file, text and op = insert or replace", "complete it")
    if Path(where.file).is_absolute() or ".." in Path(where.file).parts:
        raise BadPatch(where, "the file is outside of the upstream", "name it from the upstream's root")
    edit = Edit(
        where=where,
        op=raw["op"],
        text=textwrap.dedent(raw["text"]).strip("\n"),
        place=raw.get("where", ""),
        match=raw.get("match", ""),
        guard=raw.get("guard", "").strip(),
        part=raw.get("part", ""),
        sha256=tuple(raw.get("sha256", ())),
        reason=raw.get("reason", "").strip(),
        test=raw.get("test", ""),
        bases=tuple(raw.get("bases", ())),
    )
    (_check_insert if edit.op == "insert" else _check_replace)(edit, repository)
    return edit


def _check_insert(edit: Edit, _: Path) -> None:
    where = edit.where
    places = (IN_MODULE if not where.symbol else IN_SYMBOL + AT_STATEMENT) if edit.is_python else AT_LINE
    if edit.place not in places:
        raise BadPatch(where, f"where = {edit.place!r} does not fit", f"use one of {', '.join(places)}")
    if bool(edit.match) != (edit.place in AT_STATEMENT + AT_LINE):
        raise BadPatch(where, "match goes with a statement or a line, and they with it", "add or remove it")
    try:
        re.compile(edit.match)
    except re.error as error:
        raise BadPatch(where, f"match is no regular expression ({error})", "correct it") from None
    if not edit.guard:
        raise InsertWithoutGuard(where, "the insert has no guard", "add the expression under which the text may run")
    if not edit.is_python:
        if edit.guard != NOT_CODE:
            raise InsertWithoutGuard(where, "a guard means nothing here", f"write guard = {NOT_CODE!r}")
        return
    body = parse(edit.text, where, "the text").body
    if not body:
        raise BadPatch(where, "the text holds no statement", "write one, or remove the edit")
    if edit.guard == NAMES:
        for statement in body:
            if not (isinstance(statement, ast.Import | ast.ImportFrom | Scope) or _is_constant(statement)):
                what = f"line {statement.lineno} of the text is no import, def, class or constant (guard = {NAMES!r})"
                raise InsertWithoutGuard(where, what, "guard it by an expression")
        return
    try:
        expression = ast.parse(edit.guard, mode="eval").body
    except SyntaxError as error:
        raise InsertWithoutGuard(where, f"the guard is no expression ({error.msg})", "correct it") from None
    if not any(isinstance(node, ast.Name) for node in ast.walk(expression)):
        raise InsertWithoutGuard(where, "the guard is a constant", "name the condition under which the text may run")


def _check_replace(edit: Edit, repository: Path) -> None:
    where = edit.where
    if edit.is_python and not where.symbol:
        raise BadPatch(where, "a replace needs the symbol that holds the statement", "add it")
    if edit.part not in ("", "header"):
        raise BadPatch(where, f"part = {edit.part!r} is unknown", 'write part = "header" or leave it out')
    if not edit.sha256 or not all(re.fullmatch("[0-9a-f]{64}", digest) for digest in edit.sha256):
        raise BadPatch(where, "a replace needs the sha256 of the statement", "see `samebits patch hashes --help`")
    if not edit.reason:
        raise ReplaceWithoutReason(where, "the replace has no reason", "say in one sentence why the statement goes")
    file, _, name = edit.test.partition("::")
    name = name.rpartition("::")[2].partition("[")[0]
    test = repository / file
    if not (name and test.is_file() and re.search(rf"\bdef {re.escape(name)}\(", test.read_text("utf-8"))):
        raise ReplaceWithoutReason(
            where,
            f"its test {edit.test!r} does not exist",
            "name a test (file::function) that shows the default arm unchanged or mended",
        )
    if edit.is_python and edit.part != "header":
        parse(edit.text, where, "the text")


def _is_constant(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        return False
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    try:
        ast.literal_eval(statement.value)
    except ValueError:
        return False
    return all(isinstance(target, ast.Name) for target in targets)


def parse(text: str, where: Where, what: str, compiled: bool = False) -> ast.Module:
    """The syntax tree of `text`, which compiles too if asked. Raises TextDoesNotParse, which says `what` it is."""
    if "\r" in text.replace("\r\n", "\n"):
        raise TextDoesNotParse(where, f"{what} has a bare carriage return", "remove it")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
            if compiled:  # the compiler refuses more, such as a return outside of a function
                compile(text, where.file, "exec", dont_inherit=True)
            return tree
    except SyntaxError as error:
        what = f"{what} does not parse (line {error.lineno}: {error.msg})"
        raise TextDoesNotParse(where, what, "correct the edit's text") from None
