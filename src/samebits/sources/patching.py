"""The patch engine: puts a series of patch folders onto an upstream's source tree, anchored on symbols.

Pure over a `read(path) -> bytes | None` function, so that a folder, a wheel and a git checkout are patched alike.
It never guesses: whatever is missing, ambiguous, applied already or unlike its recorded hash is a `PatchError`.
"""

import ast
import hashlib
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from samebits.sources.patchset import (
    AT_STATEMENT,
    NAMES,
    AlreadyApplied,
    Edit,
    EditsOverlap,
    FileInTheWay,
    FileMissing,
    InsertWithoutGuard,
    Patch,
    PatchError,
    Scope,
    StatementAmbiguous,
    StatementHashUnlike,
    StatementMissing,
    SymbolAmbiguous,
    SymbolMissing,
    TextDoesNotParse,
    Where,
    load_series,
    parse,
)

Read = Callable[[str], bytes | None]


@dataclass(frozen=True)
class FileChange:
    """A touched file's sha256 before (None: the file is new) and after."""

    path: str
    before: str | None
    after: str


# --- locating ----------------------------------------------------------------------------------------------------


def own_statements(block: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a block and of the compound statements in it, without entering a def or a class."""
    for statement in block:
        yield statement
        if not isinstance(statement, Scope):
            parts = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
            arms = [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]
            for part in [*parts, *(arm.body for arm in arms)]:
                yield from own_statements(part)


def find_symbol(tree: ast.Module, where: Where) -> list[ast.Module | Scope]:
    """The nodes from the module down to `where.symbol`. Raises SymbolMissing or SymbolAmbiguous."""
    path: list[ast.Module | Scope] = [tree]
    for name in where.symbol.split(".") if where.symbol else ():
        found = [s for s in own_statements(path[-1].body) if isinstance(s, Scope) and s.name == name]
        if not found:
            raise SymbolMissing(where, f"there is no {name!r}", "find its new name in this version, or limit `bases`")
        if len(found) > 1:
            lines = ", ".join(str(s.lineno) for s in found)
            raise SymbolAmbiguous(where, f"{name!r} is defined on lines {lines}", "anchor on an enclosing symbol")
        path.append(found[0])
    return path


def statement_sha256(lines: Sequence[str]) -> str:
    """The sha256 that names a statement: its source lines dedented, without trailing white space or final newline."""
    indent = len(lines[0]) - len(lines[0].lstrip())
    dedented = [line[indent:] if not line[:indent].strip() else line for line in lines]
    return hashlib.sha256("\n".join(line.rstrip() for line in dedented).rstrip("\n").encode()).hexdigest()


def list_statements(text: str, symbol: str) -> list[tuple[int, str, str | None, str]]:
    """For authors: (line, sha256, sha256 of the header or None, first line) of each statement of a symbol."""
    lines = text.split("\n")
    scope = find_symbol(ast.parse(text), Where("source", symbol=symbol))[-1]
    return [
        (
            _first(s),
            statement_sha256(lines[_first(s) - 1 : _last(s)]),
            statement_sha256(lines[_first(s) - 1 : _header_end(s, lines)]) if _body(s) else None,
            lines[_first(s) - 1].strip(),
        )
        for s in ([scope] if isinstance(scope, ast.stmt) else []) + list(own_statements(scope.body))
    ]


def _first(statement: ast.stmt) -> int:
    return min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))])


def _last(statement: ast.stmt) -> int:
    return statement.end_lineno or statement.lineno


def _body(statement: ast.stmt) -> list[ast.stmt]:
    """The body of a compound statement; [] for a simple one."""
    return getattr(statement, "body", None) or [s for c in getattr(statement, "cases", []) for s in c.body]


def _header_end(statement: ast.stmt, lines: Sequence[str]) -> int:
    """The last line of a statement's header (a simple statement is all header).

    Comments between the header and the body belong to the body; a body on the header's own line belongs to the header.
    """
    if not _body(statement):
        return _last(statement)
    start = _body(statement)[0]
    if not _starts_line(start, lines):
        return start.lineno
    last = _first(start) - 1
    while last > statement.lineno and re.match(r"\s*(#|$)", lines[last - 1]):
        last -= 1
    return last


def _starts_line(statement: ast.stmt, lines: Sequence[str]) -> bool:
    return not lines[statement.lineno - 1].encode()[: statement.col_offset].strip()


# --- placing -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Splice:
    """Lines [start, end) of the file (0-based) become `lines`, which stand at `indent` columns."""

    start: int
    end: int
    indent: int
    lines: list[str]
    edit: Edit

    @property
    def order(self) -> tuple[int, int, int, int]:
        # At one place the deeper block comes first: it ends the preceding body.
        return self.start, self.end, -self.indent, self.edit.where.edit


def plan_patch(read: Read, patch: Patch, base: str) -> dict[str, bytes]:
    """The files that `patch` changes on `base`, with their new bytes. Every edit is located in what `read` gives."""
    changed: dict[str, bytes] = {}
    for path, data in patch.files.items():
        there, where = read(path), Where(patch.upstream, base, patch.name, file=path)
        if there == data:
            raise AlreadyApplied(where, "the overlay file is there already", "start from the pristine source")
        if there is not None:
            raise FileInTheWay(where, "the upstream has a file of this name", "rename ours, or edit theirs")
        changed[path] = data
    edits = [replace(e, where=replace(e.where, base=base)) for e in patch.edits if not e.bases or base in e.bases]
    for path in dict.fromkeys(edit.file for edit in edits):
        mine = [edit for edit in edits if edit.file == path]
        before = read(path)
        if before is None:
            raise FileMissing(mine[0].where, "the file is not in this version", "find its new place, or limit `bases`")
        changed[path] = edit_file(before.decode("utf-8"), mine).encode("utf-8")
    return changed


def edit_file(text: str, edits: Sequence[Edit]) -> str:
    """`text` with all `edits` (of one file) in place, each located in `text` itself. Raises PatchError."""
    python, where = edits[0].is_python, edits[0].where
    tree = parse(text, where, "the upstream's file") if python else None
    end_of_line = "\r\n" if text.partition("\n")[0].endswith("\r") else "\n"
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []
    splices = sorted((_splice(edit, lines, tree) for edit in edits), key=lambda s: s.order)
    for one, two in itertools.pairwise(splices):
        if two.start < one.end:
            raise EditsOverlap(two.edit.where, f"it overlaps edit {one.edit.where.edit}", "join the two edits")
    ends_line = text.endswith("\n") or splices[-1].end == len(lines)
    for splice in reversed(splices):
        lines[splice.start : splice.end] = splice.lines
    result = "\n".join(lines) + ("\n" if ends_line else "")
    if python:
        parse(result, where, "the file after the patch", compiled=True)
    return result.replace("\n", end_of_line)


def _splice(edit: Edit, lines: list[str], tree: ast.Module | None) -> _Splice:
    if tree is None:
        return _splice_line(edit, lines)
    path = find_symbol(tree, edit.where)
    return _replace(edit, lines, path[-1]) if edit.op == "replace" else _insert(edit, lines, path)


def _splice_line(edit: Edit, lines: list[str]) -> _Splice:
    missing: PatchError
    if edit.op == "insert":
        found = [n for n, line in enumerate(lines) if re.search(edit.match, line)]
        missing = StatementMissing(edit.where, f"no line matches {edit.match!r}", "adapt match, or limit `bases`")
    else:
        found = [n for n, line in enumerate(lines) if statement_sha256([line]) in edit.sha256]
        missing = StatementHashUnlike(edit.where, "no line has the recorded sha256", "record the new line's")
    start = _only(found, [n + 1 for n in found], edit, lines, missing)
    indent = _indent(lines[start])
    if edit.op == "replace":
        return _Splice(start, start + 1, indent, _indented(edit.text, indent), edit)
    block = _indented(edit.text, indent)
    _refuse_twice(edit, block, lines)
    at = start + (edit.place == "after-line")
    return _Splice(at, at, indent, block, edit)


def _only[T](found: Sequence[T], at: list[int], edit: Edit, lines: list[str], missing: PatchError) -> T:
    """The one element of `found`, else an error: already applied if the edit's text stands there, or `missing`."""
    if not found:
        if edit.op == "replace" and edit.text:
            indents = {_indent(line) for line in lines}
            for indent in indents:
                _refuse_twice(edit, _indented(edit.text, indent), lines)
        raise missing
    if len(found) > 1:
        places = ", ".join(map(str, at))
        raise StatementAmbiguous(edit.where, f"lines {places} match", "narrow the symbol or the match to one of them")
    return found[0]


def _replace(edit: Edit, lines: list[str], scope: ast.Module | Scope) -> _Splice:
    header = edit.part == "header"
    candidates = [*([scope] if isinstance(scope, Scope) else []), *own_statements(scope.body)]
    if header:
        candidates = [s for s in candidates if _body(s)]
    spans = [(_first(s) - 1, _header_end(s, lines) if header else _last(s), s) for s in candidates]
    found = [span for span in spans if statement_sha256(lines[span[0] : span[1]]) in edit.sha256]
    missing = StatementHashUnlike(
        edit.where,
        f"none of its {len(spans)} {'headers' if header else 'statements'} has the recorded sha256",
        "see what changed upstream (`samebits patch hashes`), adapt the text and record the new sha256",
    )
    region = lines[_first(scope) - 1 : _last(scope)] if isinstance(scope, Scope) else lines
    start, end, statement = _only(found, [a + 1 for a, _, _ in found], edit, region, missing)
    _refuse_shared_line(edit, lines, statement, header)
    indent = _indent(lines[start])
    block = _indented(edit.text, indent, edit.where)
    if header:  # a header alone is no statement: try it with a body
        lead = "if 0:\n    pass\n" if edit.text.startswith("elif") else ""
        parse(f"{lead}{edit.text}\n    pass", edit.where, "the header")
    return _Splice(start, end, indent, block, edit)


def _insert(edit: Edit, lines: list[str], path: list[ast.Module | Scope]) -> _Splice:
    scope = path[-1]
    parent = path[-2] if edit.place in ("before", "after") else scope
    if edit.place in AT_STATEMENT:
        statement = _match_statement(edit, lines, scope)
        at = _first(statement) - 1 if edit.place == "before-statement" else _last(statement)
        indent = _indent(lines[_first(statement) - 1])
    elif isinstance(scope, ast.Module):
        at, indent = _imports_end(scope) if edit.place == "imports-end" else len(lines), 0
    elif edit.place == "before":
        at, indent = _first(scope) - 1, _indent(lines[_first(scope) - 1])
        while at and re.match(rf" {{{indent}}}#", lines[at - 1]):  # the comment over a symbol stays with it
            at -= 1
    elif edit.place == "after":
        at, indent = _last(scope), _indent(lines[_first(scope) - 1])
    else:
        at, indent = _body_place(edit, lines, scope)
    text = edit.text
    if edit.guard != NAMES:
        text = f"if {edit.guard}:\n" + "\n".join(_indented(edit.text, 4, edit.where))
    else:
        _refuse_rebinding(edit, parent)
    block = _indented(text, indent, edit.where)
    _refuse_twice(edit, block, lines[_first(parent) - 1 : _last(parent)] if isinstance(parent, Scope) else lines)
    if re.search(r"^(class|(async )?def|@)", edit.text, re.MULTILINE):
        blank = [""] * (1 if indent else 2)
        block = [*block, *blank] if edit.place in ("before", "body-start") else [*blank, *block]
    return _Splice(at, at, indent, block, edit)


def _match_statement(edit: Edit, lines: list[str], scope: ast.Module | Scope) -> ast.stmt:
    """The statement whose dedented source (of a compound one: its header) matches."""
    found = []
    for statement in own_statements(scope.body):
        first = _first(statement) - 1
        header, indent = lines[first : _header_end(statement, lines)], _indent(lines[first])
        if re.search(edit.match, "\n".join(line[indent:] for line in header), re.MULTILINE):
            found.append(statement)
    missing = StatementMissing(edit.where, f"no statement matches {edit.match!r}", "adapt match, or limit `bases`")
    statement = _only(found, [s.lineno for s in found], edit, lines, missing)
    _refuse_shared_line(edit, lines, statement)
    if edit.place == "before-statement" and lines[_first(statement) - 1].lstrip().startswith("elif"):
        raise StatementAmbiguous(edit.where, "nothing can stand before an elif", "anchor on its if")
    return statement


def _imports_end(module: ast.Module) -> int:
    """The line after the last plain import before the first def or class, else after the docstring."""
    end = _last(module.body[0]) if ast.get_docstring(module, clean=False) is not None else 0
    for statement in module.body:
        if isinstance(statement, Scope):
            break
        if isinstance(statement, ast.Import | ast.ImportFrom):
            end = _last(statement)
    return end


def _body_place(edit: Edit, lines: list[str], scope: Scope) -> tuple[int, int]:
    body = scope.body
    if not _starts_line(body[0], lines):
        raise StatementAmbiguous(edit.where, "its body stands on the line of its header", "replace the symbol instead")
    indent = _indent(lines[_first(body[0]) - 1])
    if edit.place == "body-end":
        return _last(body[-1]), indent
    has_docstring = ast.get_docstring(scope, clean=False) is not None
    return (_last(body[0]) if has_docstring else _first(body[0]) - 1), indent


def _refuse_rebinding(edit: Edit, scope: ast.Module | Scope) -> None:
    """Names that an unguarded insert adds must be new to their scope, or the default arm would see them."""

    def bound(statements: Iterable[ast.stmt]) -> set[str]:
        names: set[str] = set()
        for s in statements:
            if isinstance(s, Scope):
                names.add(s.name)
            elif isinstance(s, ast.Import | ast.ImportFrom):
                names.update((a.asname or a.name).partition(".")[0] for a in s.names)
            elif isinstance(s, ast.Assign | ast.AnnAssign | ast.AugAssign):
                names.update(n.id for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        return names

    again = bound(ast.parse(edit.text).body) & bound(own_statements(scope.body))
    if again:
        what = f"under guard = {NAMES!r} the text binds {', '.join(sorted(again))}, which its scope binds already"
        raise InsertWithoutGuard(edit.where, what, "use new names, or guard it by an expression")


def _refuse_twice(edit: Edit, block: list[str], region: list[str]) -> None:
    for n in range(len(region) - len(block) + 1):
        if region[n : n + len(block)] == block:
            raise AlreadyApplied(edit.where, "its text stands there already", "start from the pristine source")


def _refuse_shared_line(edit: Edit, lines: list[str], statement: ast.stmt, header: bool = False) -> None:
    after = b"" if header else lines[_last(statement) - 1].encode()[statement.end_col_offset :].strip()
    one_line = header and not _starts_line(_body(statement)[0], lines)
    if not _starts_line(statement, lines) or one_line or (after and not after.startswith(b"#")):
        raise StatementAmbiguous(edit.where, f"line {statement.lineno} holds other code too", "anchor on all of it")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _indented(text: str, indent: int, where: Where | None = None) -> list[str]:
    if where and indent:
        try:
            tree = ast.parse(text)
        except SyntaxError:  # a header; checked elsewhere
            tree = ast.Module([], [])
        loose = {id(s.value) for s in ast.walk(tree) if isinstance(s, ast.Expr)}  # docstrings may be indented
        for node in ast.walk(tree):
            string = isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
            if string and id(node) not in loose and "\n" in (ast.get_source_segment(text, node) or ""):
                remedy = "write it on one line, or put it into a file of its own"
                raise TextDoesNotParse(where, "indenting would change a multi-line string of the text", remedy)
    return textwrap.indent(text, " " * indent).split("\n") if text else []


# --- applying ----------------------------------------------------------------------------------------------------


def read_folder(tree: Path) -> Read:
    """A `read` over a folder; a path that does not exist gives None."""
    return lambda path: (tree / path).read_bytes() if (tree / path).is_file() else None


def plan_series(
    read: Read, upstream: str, base: str, patches_root: Path, folders: Sequence[str] = ()
) -> list[tuple[Patch, dict[str, bytes]]]:
    """Each patch of the series with the files it changes and their new bytes, each on top of the ones before.

    With `folders` (a wheel's top folders) what lies outside of them, such as an upstream's tests, is left out.
    """
    state: dict[str, bytes] = {}
    steps = []
    for patch in load_series(patches_root, upstream):
        if folders:
            files = {path: data for path, data in patch.files.items() if path.partition("/")[0] in folders}
            edits = tuple(edit for edit in patch.edits if edit.file.partition("/")[0] in folders)
            patch = replace(patch, files=files, edits=edits)
        changed = plan_patch(lambda path: state[path] if path in state else read(path), patch, base)
        state.update(changed)
        steps.append((patch, changed))
    return steps


def file_changes(read: Read, steps: Iterable[tuple[Patch, dict[str, bytes]]]) -> list[FileChange]:
    """What the steps of `plan_series` do to each file, by path."""
    final = {path: data for _, changed in steps for path, data in changed.items()}
    changes = []
    for path, data in sorted(final.items()):
        before = read(path)
        digest = None if before is None else hashlib.sha256(before).hexdigest()
        changes.append(FileChange(path, digest, hashlib.sha256(data).hexdigest()))
    return changes


def apply_series(tree: Path, upstream: str, base: str, patches_root: Path) -> list[FileChange]:
    """Put the series of `patches_root/upstream` onto the source folder `tree` of version `base`, in place.

    Returns the touched files. Raises PatchError, and then has written nothing.
    """
    read = read_folder(tree)
    steps = plan_series(read, upstream, base, patches_root)
    changes = file_changes(read, steps)
    for _, changed in steps:
        for path, data in changed.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(data)
    return changes
