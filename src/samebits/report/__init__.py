"""The report: one page for people, drawn from receipts and capsules, that needs nothing but itself."""

from .page import render, render_svg_summary

__all__ = ["render", "render_svg_summary"]
