"""The patch engine: puts a series of patch folders onto an upstream's source tree, anchored on symbols.

Pure over a `read(path) -> bytes | None` function, so that a folder, a wheel and a git checkout are patched alike.
It never guesses: whatever is missing, ambiguous, applied already or unlike its recorded hash is a `PatchError`.
"""

import ast
import hashlib
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from samebits.sources.patchset import NAMES, Edit, Kind, Patch, PatchError, Scope, Where, load_series, parse

Read = Callable[[str], bytes | None]
Steps = list[tuple[Patch, dict[str, bytes]]]
Block = ast.Module | Scope | None  # None: a file that is not Python


class _Span(NamedTuple):
    """Lines [start, end), 0-based, that an edit can be anchored on: a statement, or a line of what is not Python."""

    start: int
    end: int
    header: int  # the header's end; that of the span where there is no body on lines of its own
    has_whole_lines: bool


class _Splice(NamedTuple):
    """Lines [start, end) become `text`, indented."""

    start: int
    end: int
    indent: int
    text: str
    edit: Edit


def plan_series(read: Read, upstream: str, base: str, patches_root: Path, folders: Sequence[str] = ()) -> Steps:
    """Each patch of the series with the files it changes and their new bytes, each on top of the ones before.

    With `folders` (a wheel's top folders) what lies outside of them, such as an upstream's tests, is left out.
    """
    state: dict[str, bytes] = {}
    steps: Steps = []
    for patch in load_series(patches_root, upstream):
        if folders:
            files = {path: data for path, data in patch.files.items() if path.partition("/")[0] in folders}
            edits = tuple(edit for edit in patch.edits if edit.where.file.partition("/")[0] in folders)
            patch = replace(patch, files=files, edits=edits)
        changed = plan_patch(lambda path: state[path] if path in state else read(path), patch, base)
        state.update(changed)
        steps.append((patch, changed))
    return steps


def plan_patch(read: Read, patch: Patch, base: str) -> dict[str, bytes]:
    """The files that `patch` changes on `base`, with their new bytes. Every edit is located in what `read` gives."""
    changed: dict[str, bytes] = {}
    for path, data in patch.files.items():
        there, where = read(path), Where(patch.upstream, base, patch.name, file=path)
        if there is not None:
            kind = Kind.ALREADY_APPLIED if there == data else Kind.FILE_IN_THE_WAY
            raise PatchError(kind, where, "where the overlay file belongs, there is a file")
        changed[path] = data
    edits = [replace(e, where=replace(e.where, base=base)) for e in patch.edits if not e.bases or base in e.bases]
    for path in dict.fromkeys(edit.where.file for edit in edits):
        mine = [edit for edit in edits if edit.where.file == path]
        before = read(path)
        if before is None:
            raise PatchError(Kind.FILE_MISSING, mine[0].where, "the file is not in this version")
        changed[path] = edit_file(before.decode("utf-8"), mine).encode("utf-8")
    return changed


def edit_file(text: str, edits: Sequence[Edit]) -> str:
    """`text` with all `edits` (of one file) in place, each located in `text` itself."""
    where = edits[0].where
    tree = parse(text, where, "the upstream's file") if edits[0].is_python else None
    lines = text.removesuffix("\n").split("\n") if text else []
    splices = [(_replace if edit.op == "replace" else _insert)(edit, lines, tree) for edit in edits]
    splices.sort(key=lambda s: (s.start, s.end, -s.indent))  # at one place a body's end is before its symbol's
    for one, two in itertools.pairwise(splices):
        if two.start < one.end:
            raise PatchError(Kind.EDITS_OVERLAP, two.edit.where, f"it overlaps edit {one.edit.where.edit}")
    for splice in reversed(splices):
        block = textwrap.indent(splice.text, " " * splice.indent)
        lines[splice.start : splice.end] = block.split("\n") if block else []
    result = "\n".join(lines) + ("\n" if text.endswith("\n") or not text else "")
    if tree:
        parse(result, where, "the file after the patch", compiled=True)
    return result


def _replace(edit: Edit, lines: list[str], tree: ast.Module | None) -> _Splice:
    scope = find_symbol(tree, edit.where)[-1] if tree else None
    spans = _spans(lines, scope)
    if edit.part == "header":
        spans = [span._replace(end=span.header) for span in spans if span.header < span.end]
    found = [span for span in spans if statement_sha256(lines[span.start : span.end]) in edit.sha256]
    if not found:
        _refuse_twice(edit, edit.text, lines, scope)
        what = f"none of its {len(spans)} {edit.part or 'statement'}s has the recorded sha256"
        raise PatchError(Kind.STATEMENT_HASH_UNLIKE, edit.where, what)
    span = _only(found, edit)
    return _Splice(span.start, span.end, _indent(lines[span.start]), edit.text, edit)


def _insert(edit: Edit, lines: list[str], tree: ast.Module | None) -> _Splice:
    path = find_symbol(tree, edit.where) if tree else [None]
    at, indent = _place(edit, lines, path[-1])
    outer = path[-2] if edit.place in ("before", "after") else path[-1]
    guarded = edit.is_python and edit.guard != NAMES
    text = f"if {edit.guard}:\n{textwrap.indent(edit.text, '    ')}" if guarded else edit.text
    _refuse_twice(edit, text, lines, outer)
    if edit.guard == NAMES and outer and (again := _bound_names(ast.parse(text)) & _bound_names(outer)):
        raise PatchError(Kind.INSERT_WITHOUT_GUARD, edit.where, f"its scope binds {', '.join(sorted(again))} already")
    if edit.is_python and re.search(r"^(class|(async )?def|@)", edit.text, re.MULTILINE):
        blank = "\n" if indent else "\n\n"
        text = text + blank if edit.place in ("before", "body-start") else blank + text
    return _Splice(at, at, indent, text, edit)


def _place(edit: Edit, lines: list[str], scope: Block) -> tuple[int, int]:
    """The line before which an insert goes, and its indentation."""
    if edit.match:
        span = _matching(edit, lines, scope)
        return span.start if edit.place.startswith("before-") else span.end, _indent(lines[span.start])
    if not isinstance(scope, Scope):
        return _imports_end(scope, lines) if scope and edit.place == "imports-end" else len(lines), 0
    span, first = _span(scope, lines), _span(scope.body[0], lines)
    at, indent = span.start, _indent(lines[span.start])
    if edit.place == "before":
        while at and re.match(rf" {{{indent}}}#", lines[at - 1]):  # the comment over a symbol stays with it
            at -= 1
        return at, indent
    if edit.place == "after":
        return span.end, indent
    if span.header == span.end:
        raise PatchError(Kind.STATEMENT_AMBIGUOUS, edit.where, "its body stands on the line of its header")
    indent = _indent(lines[first.start])
    if edit.place == "body-end":
        return span.end, indent
    return first.start if ast.get_docstring(scope, clean=False) is None else first.end, indent


def _imports_end(module: ast.Module, lines: list[str]) -> int:
    """The line after the last plain import before the first def or class, else after the docstring."""
    top = list(itertools.takewhile(lambda statement: not isinstance(statement, Scope), module.body))
    end = _span(top[0], lines).end if ast.get_docstring(module, clean=False) is not None else 0
    return max([end, *(_span(s, lines).end for s in top if isinstance(s, ast.Import | ast.ImportFrom))])


def _matching(edit: Edit, lines: list[str], scope: Block) -> _Span:
    """The one line, or the one statement inside of the symbol, whose dedented source (or header) matches."""
    inside = _spans(lines, scope)[1:] if isinstance(scope, Scope) else _spans(lines, scope)
    found = [s for s in inside if re.search(edit.match, _dedented(lines[s.start : s.header]), re.MULTILINE)]
    if not found:
        raise PatchError(Kind.STATEMENT_MISSING, edit.where, f"no statement or line matches {edit.match!r}")
    span = _only(found, edit)
    if edit.place == "before-statement" and lines[span.start].lstrip().startswith("elif"):
        raise PatchError(Kind.STATEMENT_AMBIGUOUS, edit.where, "nothing can stand before an elif", "anchor on its if")
    return span


def _only(found: Sequence[_Span], edit: Edit) -> _Span:
    numbers = ", ".join(str(span.start + 1) for span in found)
    if len(found) > 1:
        raise PatchError(Kind.STATEMENT_AMBIGUOUS, edit.where, f"lines {numbers} match")
    if not found[0].has_whole_lines:
        raise PatchError(Kind.STATEMENT_AMBIGUOUS, edit.where, f"line {numbers} holds other code too")
    return found[0]


def _refuse_twice(edit: Edit, text: str, lines: list[str], scope: Block) -> None:
    """Refuse an edit whose text stands in its scope already, at any indentation."""
    span = _span(scope, lines) if isinstance(scope, Scope) else None
    region, block = lines[span.start : span.end] if span else lines, text.split("\n")
    windows = (region[n : n + len(block)] for n in range(len(region) - len(block) + 1))
    if text and statement_sha256(block) in map(statement_sha256, windows):
        raise PatchError(Kind.ALREADY_APPLIED, edit.where, "its text stands there already")


def _bound_names(scope: ast.AST) -> set[str]:
    """The names that a module, class or function binds in its own code; rather one too many than too few."""
    names: set[str] = set()
    for node in own_nodes(scope):
        match node:
            case ast.alias(name=name, asname=asname):
                names.add(asname or name.partition(".")[0])
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                names.add(name)
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
    return names


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _dedented(lines: Sequence[str]) -> str:
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join((line[indent:] if not line[:indent].strip() else line).rstrip() for line in lines).rstrip("\n")


def statement_sha256(lines: Sequence[str]) -> str:
    """The sha256 that names a statement: its source lines dedented, without trailing white space or final newline."""
    return hashlib.sha256(_dedented(lines).encode()).hexdigest()


def list_statements(text: str, symbol: str) -> list[tuple[int, str, str | None, str]]:
    """For authors: (line, sha256, sha256 of the header or None, first line) of each statement of a symbol."""
    lines = text.split("\n")
    rows = []
    for span in _spans(lines, find_symbol(ast.parse(text), Where("source", symbol=symbol))[-1]):
        whole, header = (statement_sha256(lines[span.start : end]) for end in (span.end, span.header))
        rows.append((span.start + 1, whole, header if span.header < span.end else None, lines[span.start].strip()))
    return rows


def find_symbol(tree: ast.Module, where: Where) -> list[ast.Module | Scope]:
    """The nodes from the module down to `where.symbol`."""
    path: list[ast.Module | Scope] = [tree]
    for name in where.symbol.split(".") if where.symbol else ():
        found = [s for s in own_nodes(path[-1]) if isinstance(s, Scope) and s.name == name]
        if not found:
            raise PatchError(Kind.SYMBOL_MISSING, where, f"there is no {name!r}")
        if len(found) > 1:
            what = f"{name!r} is defined on lines {', '.join(str(s.lineno) for s in found)}"
            raise PatchError(Kind.SYMBOL_AMBIGUOUS, where, what)
        path.append(found[0])
    return path


def own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """All below a module, class or function in source order, without entering a def or class in it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, Scope):
            yield from own_nodes(node)


def _spans(lines: Sequence[str], scope: Block) -> list[_Span]:
    """What an edit can be anchored on: a symbol and its statements, or each line of a file that is not Python."""
    if scope is None:
        return [_Span(n, n + 1, n + 1, True) for n in range(len(lines))]
    return [_span(node, lines) for node in [scope, *own_nodes(scope)] if isinstance(node, ast.stmt)]


def _span(statement: ast.stmt, lines: Sequence[str]) -> _Span:
    decorators = getattr(statement, "decorator_list", [])
    start, end = min(node.lineno for node in [statement, *decorators]) - 1, statement.end_lineno or statement.lineno
    after = lines[end - 1].encode()[statement.end_col_offset :].strip()
    whole = _starts_line(statement, lines) and (not after or after.startswith(b"#"))
    body = getattr(statement, "body", None) or [s for case in getattr(statement, "cases", []) for s in case.body]
    if not body or not _starts_line(body[0], lines):
        return _Span(start, end, end, whole)
    header = _span(body[0], lines).start
    while header > statement.lineno and re.match(r"\s*(#|$)", lines[header - 1]):  # such comments are of the body
        header -= 1
    return _Span(start, end, header, whole)


def _starts_line(statement: ast.stmt, lines: Sequence[str]) -> bool:
    return not lines[statement.lineno - 1].encode()[: statement.col_offset].strip()
