"""Tables of the terminal as one self-contained page."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME

WIDTH = 180  # characters: no column of ours is cut


def write_page(path: Path, title: str, tables: Sequence[Table], notes: Sequence[str]) -> None:
    """The tables, and the notes below them a line each."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(f"[bold]{title}[/]\n")
    for table in tables:
        console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)
    path.write_text(console.export_html(theme=DEFAULT_TERMINAL_THEME), encoding="utf-8")
