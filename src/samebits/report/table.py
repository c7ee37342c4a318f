"""The mismatches of some runs as a Markdown table, and its place in a README: between two markers, generated.

As on the page, each receipt is judged again first.
"""

from __future__ import annotations

from pathlib import Path

from samebits.errors import SamebitsError
from samebits.evidence import receipt as receipts
from samebits.judge import rejudge

BEGIN, END = "<!-- mismatches -->", "<!-- /mismatches -->"


class TableError(SamebitsError):
    """A file that has no place for the table."""


def render_table(runs: list[Path]) -> str:
    """One row a comparison: arm, weights, path, how many logprobs differ, the largest difference in nats.

    ReceiptError or JudgeError if a receipt is missing, damaged or contradicts itself."""
    rows = ["| arm | weights | path | logprobs that differ | largest difference, nats |", "|---|---|---|---|---|"]
    for run in runs:
        document = receipts.read(run / "receipt.json")
        rejudge(document)
        for c in document["compares"]:
            largest = f"{c['max_abs']:.3f}" if c["mismatched"] else "0"
            rows.append(
                f"| BI={document['arm']} | {c['weights'].replace('theta', 'θ')} | {c['path']} "
                f"| {c['mismatched']:,} of {c['valid_tokens']:,} | {largest} |"
            )
    return "\n".join(rows) + "\n"


def insert_table(file: Path, table: str) -> None:
    """Replace what stands between the markers of a Markdown file; TableError if it does not have each once."""
    text = file.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise TableError(f"{file} has no place for the table: write {BEGIN} and, below it, {END} where it belongs")
    before, rest = text.split(BEGIN)
    file.write_text(f"{before}{BEGIN}\n{table}{END}{rest.split(END)[1]}", encoding="utf-8")
