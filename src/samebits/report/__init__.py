"""The report: one page for people, drawn from receipts and capsules, that needs nothing but itself."""

from .page import render, render_svg_summary
from .table import insert_table, render_table

__all__ = ["insert_table", "render", "render_svg_summary", "render_table"]
