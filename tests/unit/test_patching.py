"""The patch engine: where edits land, what every refusal looks like, and that it never harms what stands around."""

import ast
import hashlib
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import toy
from hypothesis import assume, given
from hypothesis import strategies as st

from samebits.sources import patching, patchset
from samebits.sources.patching import edit_file, list_statements, statement_sha256
from samebits.sources.patchset import Edit, Kind, PatchError, Where

SOURCE = '''\
"""A module."""

import os
from typing import Any

LIMIT = 3


# about size
def size(values, scale=1):
    """How many."""
    total = 0
    for value in values:
        # each counts once
        total += 1
    if scale != 1:
        total = total * scale
    elif total > LIMIT:
        total = LIMIT
    return total


class Box:
    width = 1

    @property
    def area(self):
        return self.width * self.width

    def grow(self): self.width += 1
'''


class Repository:
    """A folder with patches/up, tests/ and a tree of one file, `pkg/mod.py`."""

    def __init__(self, root: Path) -> None:
        self.root, self.patches, self.tree = root, root / "patches", root / "tree"
        (root / "tests").mkdir()
        (root / "tests" / "test_it.py").write_text("def test_default_arm():\n    assert True\n")
        (self.tree / "pkg").mkdir(parents=True)
        (self.tree / "pkg" / "mod.py").write_text(SOURCE)

    def patch(self, *edits: dict[str, Any], name: str = "0001-topic", files: dict[str, str] | None = None) -> None:
        folder = self.patches / "up" / name
        folder.mkdir(parents=True)
        (folder / "MESSAGE.md").write_text("Do a thing\n\nBecause.\n")
        for path, text in (files or {}).items():
            (folder / "files" / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / "files" / path).write_text(text)
        if edits:
            (folder / "edits.toml").write_text("\n".join(map(to_toml, edits)))

    def apply(self, base: str = "1.0") -> str:
        toy.apply_series(self.tree, "up", base, self.patches)
        return (self.tree / "pkg" / "mod.py").read_text()


def to_toml(edit: dict[str, Any]) -> str:
    def value(v: Any) -> str:
        return str(v) if isinstance(v, list) else f"'''\n{v}'''"

    return "[[edit]]\n" + "\n".join(f"{key} = {value(v)}" for key, v in edit.items())


def insert(**keys: Any) -> dict[str, Any]:
    return {"file": "pkg/mod.py", "symbol": "size", "op": "insert", "guard": "os.sep", "text": "x = 1", **keys}


def replace(**keys: Any) -> dict[str, Any]:
    edit = {"file": "pkg/mod.py", "symbol": "size", "op": "replace", "text": "total = 0.0", "reason": "It must."}
    return {**edit, "sha256": [sha("total = 0")], "test": "tests/test_it.py::test_default_arm", **keys}


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def refused(kind: Kind, match: str | None = None) -> Iterator[None]:
    with pytest.raises(PatchError, match=match) as caught:
        yield
    assert caught.value.kind is kind


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


@pytest.mark.parametrize(
    ("keys", "above", "below"),
    [
        ({"where": "body-start"}, '    """How many."""', "    total = 0"),
        ({"where": "body-end"}, "    return total", ""),
        ({"where": "before"}, "", "# about size"),
        ({"where": "after"}, "    return total", ""),
        ({"where": "after-statement", "match": "^total = 0$"}, "    total = 0", "    for value in values:"),
        ({"where": "before-statement", "match": "^for "}, "    total = 0", "    for value in values:"),
        ({"where": "after-statement", "match": "^for "}, "        total += 1", "    if scale != 1:"),
        ({"where": "after-statement", "match": r"total \+= 1"}, "        total += 1", "    if scale != 1:"),
        ({"where": "imports-end", "symbol": ""}, "from typing import Any", ""),
        ({"where": "module-end", "symbol": ""}, "    def grow(self): self.width += 1", None),
        ({"where": "body-start", "symbol": "Box"}, "class Box:", "    width = 1"),
        ({"where": "before", "symbol": "Box.area"}, "", "    @property"),
        (
            {"where": "body-start", "symbol": "Box.area"},
            "    def area(self):",
            "        return self.width * self.width",
        ),
    ],
)
def test_an_insert_stands_guarded_between_its_neighbours(
    repository: Repository, keys: dict[str, Any], above: str, below: str | None
) -> None:
    repository.patch(insert(**keys))
    lines = repository.apply().split("\n")
    at = next(n for n, line in enumerate(lines) if line.strip() == "if os.sep:")
    indent = len(lines[at]) - len(lines[at].lstrip())
    assert lines[at + 1] == " " * (indent + 4) + "x = 1"
    assert lines[at - 1] == above
    assert lines[at + 2 :] == [""] if below is None else lines[at + 2] == below


def test_names_go_in_without_a_guard_and_with_blank_lines(repository: Repository) -> None:
    text = 'import sys\nDEPTH = (1, 2)\nclass Lid:\n    """On top."""\n'
    repository.patch(insert(symbol="size", where="after", guard="names", text=text))
    assert (
        '    return total\n\n\nimport sys\nDEPTH = (1, 2)\nclass Lid:\n    """On top."""\n\n\nclass Box'
        in repository.apply()
    )


def test_a_replace_finds_its_statement_by_hash_and_takes_its_indentation(repository: Repository) -> None:
    repository.patch(replace(sha256=[sha("total = total * scale")], text="total = [\n    total,\n]"))
    assert "    if scale != 1:\n        total = [\n            total,\n        ]\n    elif" in repository.apply()


@pytest.mark.parametrize(
    ("old", "new", "result"),
    [
        ("for value in values:", "for value in list(values):", "    for value in list(values):\n        # each counts"),
        ("elif total > LIMIT:", "elif total >= LIMIT:", "    elif total >= LIMIT:\n        total = LIMIT\n"),
        (
            "def size(values, scale=1):",
            "def size(\n    values, scale=2\n):",
            'def size(\n    values, scale=2\n):\n    """H',
        ),
    ],
)
def test_a_header_is_replaced_without_its_body(repository: Repository, old: str, new: str, result: str) -> None:
    repository.patch(replace(part="header", sha256=[sha(old)], text=new))
    assert result in repository.apply()


def test_one_hash_for_each_text_over_the_bases(repository: Repository) -> None:
    repository.patch(replace(sha256=[sha("total = 7"), sha("total = 0")]))
    assert "total = 0.0" in repository.apply()


def test_an_edit_can_be_limited_to_bases(repository: Repository) -> None:
    repository.patch(replace(bases=["2.0"]))
    assert repository.apply("1.0") == SOURCE
    assert repository.apply("2.0") != SOURCE


def test_edits_of_one_patch_are_located_in_the_file_as_the_patch_before_left_it(repository: Repository) -> None:
    both = [insert(where="after-statement", match="^total = 0$", text=f"total = {n}") for n in (10, 20)]
    repository.patch(*both, name="0001-first")
    repository.patch(replace(sha256=[sha("total = 20")], text="total = 30"), name="0002-second")
    text = repository.apply()
    assert "    total = 0\n    if os.sep:\n        total = 10\n    if os.sep:\n        total = 30\n    for" in text


def test_at_one_place_the_deeper_block_comes_first(repository: Repository) -> None:
    repository.patch(
        insert(symbol="Box.area", where="after", guard="names", text="depth = 1"),
        insert(symbol="Box.area", where="body-end", text="y = 2"),
    )
    assert "        if os.sep:\n            y = 2\n    depth = 1\n" in repository.apply()


def test_lines_of_other_files(repository: Repository) -> None:
    (repository.tree / "setup.cfg").write_text("[a]\n  b = 1\n  c = 2\n")
    keys = {"file": "setup.cfg", "symbol": "", "guard": "none: not code"}
    repository.patch(
        insert(**keys, where="after-line", match="b = 1", text="d = 3"),
        {**replace(file="setup.cfg", sha256=[sha("c = 2")], text="c = 4"), "symbol": ""},
    )
    repository.apply()
    assert (repository.tree / "setup.cfg").read_text() == "[a]\n  b = 1\n  d = 3\n  c = 4\n"


def test_an_upstream_without_patches_stays_as_it_is(repository: Repository) -> None:
    (repository.patches / "up").mkdir(parents=True)
    assert toy.apply_series(repository.tree, "up", "1.0", repository.patches) == []
    assert toy.apply_series(repository.tree, "none", "1.0", repository.patches) == []


def test_the_touched_files_are_reported_with_their_hashes(repository: Repository) -> None:
    repository.patch(replace(), files={"pkg/new.py": "y = 1\n"})
    changes = toy.apply_series(repository.tree, "up", "1.0", repository.patches)
    after = sha((repository.tree / "pkg" / "mod.py").read_text())
    assert [(c.path, c.before, c.after) for c in changes] == [
        ("pkg/mod.py", sha(SOURCE), after),
        ("pkg/new.py", None, sha("y = 1\n")),
    ]


def test_outside_of_a_wheels_folders_nothing_is_planned(repository: Repository) -> None:
    document = insert(file="docs/a.md", symbol="", where="after-line", match="x", guard="none: not code")
    repository.patch(replace(), document)
    steps = patching.plan_series(toy.read_folder(repository.tree), "up", "1.0", repository.patches, ["pkg"])
    assert [list(changed) for _, changed in steps] == [["pkg/mod.py"]]


REFUSALS: list[tuple[Kind, dict[str, Any]]] = [
    (Kind.SYMBOL_MISSING, insert(symbol="length", where="body-start")),
    (Kind.SYMBOL_MISSING, insert(symbol="Box.volume", where="body-start")),
    (Kind.STATEMENT_MISSING, insert(where="after-statement", match="^nothing$")),
    (Kind.STATEMENT_AMBIGUOUS, insert(where="after-statement", match="^total")),
    (Kind.STATEMENT_AMBIGUOUS, insert(where="before-statement", match="^elif ")),
    (Kind.STATEMENT_AMBIGUOUS, insert(symbol="Box.grow", where="body-start")),
    (Kind.STATEMENT_AMBIGUOUS, insert(symbol="Box.grow", where="after-statement", match="self.width")),
    (Kind.STATEMENT_HASH_UNLIKE, replace(sha256=[sha("total = 1")])),
    (Kind.FILE_MISSING, insert(file="pkg/gone.py", where="body-start")),
    (Kind.STATEMENT_HASH_UNLIKE, replace(part="header", sha256=[sha("total = 0")])),
    (Kind.INSERT_WITHOUT_GUARD, insert(where="body-start", guard="")),
    (Kind.INSERT_WITHOUT_GUARD, insert(where="body-start", guard="True")),
    (Kind.INSERT_WITHOUT_GUARD, insert(where="body-start", guard="x = os.sep")),
    (Kind.INSERT_WITHOUT_GUARD, insert(where="body-start", guard="names", text="run()")),
    (Kind.INSERT_WITHOUT_GUARD, insert(where="body-start", guard="names", text="x = run()")),
    (Kind.INSERT_WITHOUT_GUARD, insert(where="body-start", guard="names", text="x = [values]")),
    (Kind.INSERT_WITHOUT_GUARD, insert(where="body-start", guard="names", text="1 + 1")),
    (Kind.INSERT_WITHOUT_GUARD, insert(where="body-start", guard="names", text="total = 5")),
    (Kind.INSERT_WITHOUT_GUARD, insert(where="body-start", guard="names", text="value = 5")),
    (Kind.INSERT_WITHOUT_GUARD, insert(where="body-start", guard="names", text="scale = 5")),
    (Kind.INSERT_WITHOUT_GUARD, insert(symbol="", where="imports-end", guard="names", text="from os import *")),
    (Kind.INSERT_WITHOUT_GUARD, insert(symbol="", where="imports-end", guard="names", text="import os.path")),
    (Kind.INSERT_WITHOUT_GUARD, insert(symbol="", where="module-end", guard="names", text="def size(): ...")),
    (Kind.INSERT_WITHOUT_GUARD, insert(file="a.cfg", symbol="", where="after-line", match="b", guard="x")),
    (Kind.REPLACE_WITHOUT_REASON, replace(reason="")),
    (Kind.REPLACE_WITHOUT_REASON, replace(test="")),
    (Kind.REPLACE_WITHOUT_REASON, replace(test="tests/test_it.py::test_other")),
    (Kind.REPLACE_WITHOUT_REASON, replace(test="tests/test_gone.py::test_default_arm")),
    (Kind.TEXT_DOES_NOT_PARSE, insert(where="body-start", text="x = (")),
    (Kind.TEXT_DOES_NOT_PARSE, insert(where="body-start", text="# a comment")),
    (Kind.TEXT_DOES_NOT_PARSE, insert(where="body-start", guard="not a guard")),
    (Kind.TEXT_DOES_NOT_PARSE, replace(text="total = )")),
    (Kind.TEXT_DOES_NOT_PARSE, replace(part="header", sha256=[sha("for value in values:")], text="for value in")),
    (Kind.TEXT_DOES_NOT_PARSE, insert(symbol="", where="module-end", text="return 1")),
    (Kind.TEXT_DOES_NOT_PARSE, insert(where="body-start", text='x = """a\nb"""')),
    (Kind.BAD_PATCH, insert(where="sideways")),
    (Kind.BAD_PATCH, insert(symbol="", where="body-start")),
    (Kind.BAD_PATCH, insert(where="after-statement")),
    (Kind.BAD_PATCH, insert(where="after-statement", match="(")),
    (Kind.BAD_PATCH, insert(where="body-start", reasons="typo")),
    (Kind.BAD_PATCH, insert(where="body-start", file="")),
    (Kind.BAD_PATCH, insert(where=["body-start"])),
    (Kind.BAD_PATCH, replace(sha256=["abc"])),
    (Kind.BAD_PATCH, replace(sha256=[])),
    (Kind.BAD_PATCH, replace(symbol="")),
    (Kind.BAD_PATCH, replace(part="tail")),
    (Kind.BAD_PATCH, replace(op="delete")),
]


@pytest.mark.parametrize(("kind", "edit"), REFUSALS, ids=[f"{n}-{k.name}" for n, (k, _) in enumerate(REFUSALS)])
def test_a_refusal_names_upstream_version_file_symbol_and_remedy(
    repository: Repository, kind: Kind, edit: dict[str, Any]
) -> None:
    repository.patch(edit, files={"pkg/new.py": "y = 1\n"})
    with pytest.raises(PatchError) as caught:
        repository.apply()
    message = str(caught.value)
    assert caught.value.kind is kind
    assert "patches/up/0001-topic, edit 1" in message and "Remedy: " in message
    assert edit["file"] in message and edit["symbol"] in message
    located = kind.name.startswith(("SYMBOL", "STATEMENT", "FILE"))
    assert not located or message.startswith("up 1.0: ")
    assert (repository.tree / "pkg" / "mod.py").read_text() == SOURCE
    assert not (repository.tree / "pkg" / "new.py").exists()


def test_a_symbol_that_is_defined_twice_is_ambiguous(repository: Repository) -> None:
    (repository.tree / "pkg" / "mod.py").write_text("try:\n    def f(): pass\nexcept E:\n    def f(): pass\n")
    repository.patch(insert(symbol="f", where="before"))
    with refused(Kind.SYMBOL_AMBIGUOUS, match="lines 2, 4"):
        repository.apply()


def test_two_statements_of_one_hash_are_ambiguous(repository: Repository) -> None:
    (repository.tree / "pkg" / "mod.py").write_text("def size():\n    total = 0\n    total = 0\n")
    repository.patch(replace())
    with refused(Kind.STATEMENT_AMBIGUOUS, match="lines 2, 3"):
        repository.apply()


def test_an_upstream_file_that_does_not_parse_is_refused(repository: Repository) -> None:
    (repository.tree / "pkg" / "mod.py").write_text("def size(:\n")
    repository.patch(insert(where="body-start"))
    with refused(Kind.TEXT_DOES_NOT_PARSE, match="the upstream's file"):
        repository.apply()


@pytest.mark.parametrize(
    "edit",
    [insert(where="body-start"), insert(where="after"), insert(symbol="", where="module-end"), replace()],
    ids=["body", "after", "module", "replace"],
)
def test_what_is_applied_already_is_refused(repository: Repository, edit: dict[str, Any]) -> None:
    repository.patch(edit)
    first = repository.apply()
    with refused(Kind.ALREADY_APPLIED):
        repository.apply()
    assert (repository.tree / "pkg" / "mod.py").read_text() == first


def test_an_overlay_file_that_is_there_already_is_refused(repository: Repository) -> None:
    repository.patch(files={"pkg/new.py": "y = 1\n"})
    repository.apply()
    with refused(Kind.ALREADY_APPLIED):
        repository.apply()


def test_an_overlay_file_never_covers_one_of_the_upstream(repository: Repository) -> None:
    repository.patch(files={"pkg/mod.py": "y = 1\n"})
    with refused(Kind.FILE_IN_THE_WAY):
        repository.apply()


def test_an_overlay_file_that_does_not_parse_is_refused(repository: Repository) -> None:
    repository.patch(files={"pkg/new.py": "y = (\n"})
    with refused(Kind.TEXT_DOES_NOT_PARSE, match="overlay"):
        repository.apply()


def test_edits_that_claim_the_same_lines_are_refused(repository: Repository) -> None:
    inner = insert(where="before-statement", match=r"^total \+= 1")
    whole = replace(sha256=[sha("for value in values:\n    # each counts once\n    total += 1")], text="pass")
    repository.patch(inner, whole)
    with refused(Kind.EDITS_OVERLAP):
        repository.apply()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("0001-topic/notes.txt", "x"),
        ("0001-topic/MESSAGE.md", "\n"),
        ("0001-topic/MESSAGE.md", "Subject\n\n---\nlost\n"),
        ("0001-topic/edits.toml", "[[edit]\n"),
        ("0001-topic/edits.toml", "[edits]\n"),
        ("0001-other/MESSAGE.md", "same number"),
        ("topic/MESSAGE.md", "no number"),
    ],
)
def test_a_malformed_patch_folder_is_refused(repository: Repository, path: str, text: str) -> None:
    repository.patch(files={"pkg/new.py": "y = 1\n"})
    (repository.patches / "up" / path).parent.mkdir(exist_ok=True)
    (repository.patches / "up" / path).write_text(text)
    with refused(Kind.BAD_PATCH):
        repository.apply()


def test_a_patch_that_changes_nothing_is_refused(repository: Repository) -> None:
    repository.patch()
    with refused(Kind.BAD_PATCH, match="changes nothing"):
        repository.apply()


def test_every_kind_of_error_is_tested_here_or_with_the_records() -> None:
    text = Path(__file__).read_text() + (Path(__file__).parent / "test_records.py").read_text()
    assert [kind.name for kind in Kind if f"Kind.{kind.name}" not in text] == []


names = st.sampled_from(["a", "b", "c", "d"])
simple = st.sampled_from(["x = 1", "y(x)  # said", "z = [\n    1,\n]", "pass", "assert x, 'é'", 's = """one\ntwo"""'])


def _compound(inner: st.SearchStrategy[list[str]]) -> st.SearchStrategy[str]:
    heads = st.sampled_from(["if x:", "for q in x:  # over x", "while (\n    x\n):", "with x as q:"])
    return st.builds(lambda head, body: head + "\n" + _indent(body), heads, inner)


def _indent(statements: list[str]) -> str:
    # only lines that begin outside of a string may be moved, as in real source
    return "\n".join(textwrap.indent(s, "    ", lambda line: not line.startswith("two")) for s in statements)


blocks = st.recursive(
    st.lists(simple, min_size=1, max_size=3),
    lambda inner: st.lists(simple | _compound(inner), min_size=1, max_size=4),
    max_leaves=8,
)
doc = st.sampled_from([[], ['"""What it does."""'], ["# a comment"], ['"""Two\nlines."""', "# and a comment"]])
functions = st.builds(lambda d, body: "def f(x):\n" + _indent([*d, *body]), doc, blocks)
classes = st.builds(
    lambda d, body, f: "class K:\n" + _indent([*d, *body, "@staticmethod\n" + f]), doc, blocks, functions
)
modules = st.builds(
    lambda d, *parts: "\n".join([*d, "import os", *parts]) + "\n", doc, blocks.map("\n".join), functions, classes
)
places = st.sampled_from(
    [("f", w) for w in patchset.IN_SYMBOL]
    + [(s, w) for s in ("K", "K.f") for w in patchset.IN_SYMBOL]
    + [("", w) for w in patchset.IN_MODULE]
)


def _edit(symbol: str, place: str, number: int = 1, **keys: Any) -> Edit:
    where = Where("up", "1.0", "0001-topic", number, "pkg/mod.py", symbol)
    return Edit(where, "insert", keys.pop("text", "mark()"), place, guard="mark", **keys)


@given(modules, st.lists(places, min_size=1, max_size=4, unique=True))
def test_an_insert_taken_out_again_gives_the_original(source: str, where: list[tuple[str, str]]) -> None:
    edits = [_edit(symbol, place, n, text=f"mark({n})") for n, (symbol, place) in enumerate(where)]
    result = edit_file(source, edits)
    kept = [line for line in result.split("\n") if not line.lstrip().startswith(("mark(", "if mark:"))]
    assert kept == source.split("\n")
    assert result.count("if mark:") == len(edits)


@given(modules, places)
def test_an_insert_leaves_the_statements_around_it_as_they_were(source: str, where: tuple[str, str]) -> None:
    class Out(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> Any:
            if isinstance(node.test, ast.Name) and node.test.id == "mark":
                assert not node.orelse, "the insert took an else that was not its own"
                return None
            return self.generic_visit(node)

    tree = Out().visit(ast.parse(edit_file(source, [_edit(*where)])))
    assert ast.dump(tree) == ast.dump(ast.parse(source))


@given(modules, st.sampled_from(["f", "K", "K.f"]), st.data())
def test_a_statement_replaced_by_itself_gives_the_original(source: str, symbol: str, data: st.DataObject) -> None:
    lines = source.split("\n")
    scope = patching.find_symbol(ast.parse(source), Where("up", symbol=symbol))[-1]
    statements = [node for node in patching.own_nodes(scope) if isinstance(node, ast.stmt)]
    chosen = data.draw(st.sampled_from(statements))
    first = min([chosen.lineno, *(d.lineno for d in getattr(chosen, "decorator_list", []))])
    text = lines[first - 1 : chosen.end_lineno]
    digest = statement_sha256(text)
    assert digest in [row[1] for row in list_statements(source, symbol)]
    indent = len(text[0]) - len(text[0].lstrip())
    dedented = "\n".join(line[indent:] if not line[:indent].strip() else line for line in text)
    where = Where("up", "1.0", "0001-topic", 1, "pkg/mod.py", symbol)
    assume("\ntwo" not in dedented)  # an edit with such a string is refused when it is loaded
    try:
        result = edit_file(source, [Edit(where, "replace", dedented, sha256=(digest,))])
    except PatchError as error:
        assert error.kind is Kind.STATEMENT_AMBIGUOUS, "the same statement twice: refused, not misplaced"
    else:
        assert result == source


source_lines = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=8))


@given(source_lines, st.integers(0, 8))
def test_a_statements_hash_does_not_see_indentation_or_trailing_space(lines: list[str], indent: int) -> None:
    lines = ["s", *(line.strip() for line in lines)]
    moved = [" " * indent + line + " " for line in lines]
    assert statement_sha256(moved) == statement_sha256(lines) == sha("\n".join(lines).rstrip("\n"))


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_a_file_with_other_line_ends_is_refused(end: str) -> None:
    with refused(Kind.TEXT_DOES_NOT_PARSE, match="carriage return"):
        edit_file(SOURCE.replace("\n", end), [_edit("size", "body-start")])


def test_a_file_keeps_its_missing_final_newline() -> None:
    assert edit_file("x = 1", [_edit("", "module-end")]) == "x = 1\nif mark:\n    mark()"
