"""Tables of the terminal, and figures above them, as one self-contained page."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup, escape
from rich.console import Console
from rich.table import Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME

WIDTH = 180  # characters: no column of ours is cut
FIGURES = (
    "main { display: flex; flex-wrap: wrap; gap: 16px; } figure { margin: 0; width: 460px; background: var(--card); }"
)

Figure = tuple[str, Markup]  # what it shows, and an <svg> of `charts`


def write_page(
    path: Path, title: str, tables: Sequence[Table], notes: Sequence[str], figures: Sequence[Figure] = ()
) -> None:
    """The figures, the tables, and the notes below them a line each."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(f"[bold]{title}[/]\n")
    for table in tables:
        console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)
    page = console.export_html(theme=DEFAULT_TERMINAL_THEME)
    if figures:
        style = Path(__file__).with_name("style.css").read_text(encoding="utf-8") + FIGURES
        drawn = "".join(f"<figure><figcaption>{escape(what)}</figcaption>{svg}</figure>" for what, svg in figures)
        page = page.replace("</head>", f"<style>{style}</style></head>", 1)
        page = page.replace("<body>", f"<body><main>{drawn}</main>", 1)
    path.write_text(page, encoding="utf-8")
