"""The report: one page for people, drawn from receipts and capsules, that needs nothing but itself."""

from .page import render, render_svg_summary
from .table import block, insert_block, render_card, render_measured, render_table

__all__ = ["block", "insert_block", "render", "render_card", "render_measured", "render_svg_summary", "render_table"]
