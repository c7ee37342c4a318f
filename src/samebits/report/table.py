"""The numbers of a README as Markdown, and their places in it: each between two markers, generated.

As on the page, each receipt and matrix is judged again first.
"""

from __future__ import annotations

import statistics
import textwrap
from pathlib import Path
from typing import Any

from samebits.errors import SamebitsError
from samebits.evidence import invariance, measurement, planted
from samebits.evidence import receipt as receipts
from samebits.judge import (
    engines,
    missed_engines,
    missed_faults,
    missed_operators,
    missed_products,
    missed_speed,
    products,
    rejudge,
    rejudge_matrix,
)
from samebits.judge.operators import counts
from samebits.judge.speed import MUST, ratios

WIDTH = 120


class TableError(SamebitsError):
    """A file that has no place for a block, or evidence that one cannot be made from."""


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


def render_measured(folder: Path) -> str:
    """What the matrix, the planted faults and the paired measurement of a folder say, each from its JSON.

    SamebitsError if one is missing, damaged or contradicts itself."""
    matrix = invariance.KIND.read(folder / "invariance.json")
    rejudge_matrix(matrix)
    faults = planted.KIND.read(folder / "planted.json")
    speed = measurement.BENCH.read(folder / "bench.json")
    for name, wrong in (("planted.json", missed_faults(faults)), ("bench.json", missed_speed(speed))):
        if wrong:
            raise TableError(f"{folder / name} is not what it must be: {'; '.join(wrong[:3])}; make it again")
    prose = [_matrix(matrix), _planted(faults), _speed_heading(speed)]
    return "\n\n".join(textwrap.fill(text, WIDTH, break_on_hyphens=False) for text in prose) + "\n\n" + _speed(speed)


def render_card(folder: Path) -> str:
    """What the engines and operators of a folder did on a card: a row a case that must be reached, and what is missed.

    SamebitsError if a file is missing or damaged, or the operators' is not what it must be."""
    operators = measurement.OPERATORS.read(folder / "operators.json")
    if wrong := missed_operators(operators):
        raise TableError(f"{folder / 'operators.json'} is not what it must be: {'; '.join(wrong[:3])}; make it again")
    documents = [measurement.ENGINES.read(file) for file in sorted(folder.glob("engines-*.json"))]
    timed = [document for document in documents if engines.RELEASE in document["arms"]]
    rows = {engines.case_of(row): row for document in timed for row in document["rows"]}
    title = f"{engines.MODEL} on one {operators['card']['name']}, tokens/s"
    said = [f"| {title} | vLLM, BI=0 | first commit ÷ that | BI=1 ÷ that | must be |", "|---|---|---|---|---|"]
    for case, must in engines.MUST.items():
        if (row := rows.get(case)) is None:
            continue
        base = f"{statistics.median(row['values'][engines.RELEASE]):,.0f}"
        parts = (
            _ranged(engines.ratios(row, arm), "{:.3f}") if arm in row["values"] else "" for arm in ("first", "bi1")
        )
        said.append(f"| {engines.name(case)} | {base} | {' | '.join(parts)} | {must['bi1'][0].text()} |")
    lacking = missed_engines(documents)
    prose = f"Missed or not measured: {'; '.join(lacking)}." if lacking else "Nothing is missed."
    compared = sum(count["of"] for count in counts(operators))
    bits = (
        f"Elements of norms, activation, log-softmax and decode attention that were compared with the row alone, in a "
        f"graph, again and again, or with FlashAttention 3: {compared:,}; that differ: 0 (`operators.json`)."
    )
    matrix = _matrix(invariance.KIND.read(folder / "invariance.json"))
    gemm = measurement.GEMM.read(folder / "gemm.json")
    if wrong := missed_products(gemm):
        raise TableError(f"{folder / 'gemm.json'} is not what it must be: {'; '.join(wrong[:3])}; make it again")
    figures = products.summary(gemm)
    speed = (
        f"Products of 1 to {max(products.ROWS)} rows, cuBLAS with split-K ÷ what serves: geometric mean "
        f"{figures[products.MEAN]:.2f}, the worst {figures[products.WORST]:.2f}; weights of 50 MB and more are read at "
        f"{figures[products.SHARE]:.2f} of a copy's bandwidth or faster. Elements compared with the reference: "
        f"{sum(row['of'] for row in gemm['bits']):,}; that differ: {figures[products.DIFFER]:.0f} (`gemm.json`)."
    )
    return (
        "\n".join(said)
        + "\n\n"
        + "\n\n".join(textwrap.fill(t, WIDTH, break_on_hyphens=False) for t in (prose, matrix, speed, bits))
        + "\n"
    )


def _matrix(document: dict[str, Any]) -> str:
    """How many cells differ, by arm and dtype."""
    found: dict[int, dict[str, list[bool]]] = {}
    for c in document["cells"]:
        found.setdefault(c["arm"], {}).setdefault(c["dtype"], []).append(c["mismatched"] > 0)
    said = []
    for arm, dtypes in sorted(found.items()):
        counts = (f"{sum(differ)} of {len(differ)} in {dtype}" for dtype, differ in sorted(dtypes.items()))
        said.append(f"BI={arm} {' and '.join(counts)}")
    return f"Ways of asking in which a logprob differs: {', '.join(said)} (`invariance.json`)."


def _planted(document: dict[str, Any]) -> str:
    """How many faults were named and unchanged runs accused, and how long a seed took."""
    named, accused, seconds = [], [], []
    for arm, tried in document["arms"].items():
        rows = tried["seeds"]
        named.append(f"{sum(row['right'] for row in rows)} of {len(rows)} at BI={arm}")
        accused.append(f"{sum(row['unchanged'] is not None for row in rows)} of {len(rows)} at BI={arm}")
        seconds += [row["seconds"] for row in rows]
    return (
        f"Planted faults that were named, by layer, module and operator: {', '.join(named)}; unchanged runs that were "
        f"accused: {', '.join(accused)}; seconds a seed: {statistics.median(seconds):.1f}, at most {max(seconds):.1f} "
        "(`planted.json`)."
    )


def _speed_heading(document: dict[str, Any]) -> str:
    identity = document["executions"]["1"]
    widest = "AVX-512" if "avx512f" in identity["instruction_set"] else "AVX2"
    return (
        f"Speed on {identity['threads']} threads of a processor ({identity['device_name']}) with {widest}, arms in "
        f"turn, beside other work of load {document['load']:.1f}: the median of {document['rounds']} rounds, the least "
        "and the largest (`bench.json`)."
    )


def _speed(document: dict[str, Any]) -> str:
    """A row a workload: both arms, and the ratio of each round's pair."""
    size = document["executions"]["1"]["model"]
    title = f"{size['layers']} layers, hidden {size['hidden']}, bf16"
    rows = [f"| {title} | BI=0 | BI=1 | BI=1 ÷ BI=0 | must be |", "|---|---|---|---|---|"]
    for row in document["rows"]:
        arms = (_ranged(row["values"][arm], "{:.3g}") for arm in ("0", "1"))
        must = MUST[row["workload"]].text()
        ratio = _ranged(ratios(row), "{:.2f}")
        rows.append(f"| {row['workload']}, {row['unit']} | {' | '.join(arms)} | {ratio} | {must} |")
    return "\n".join(rows) + "\n"


def _ranged(values: list[float], form: str) -> str:
    middle, least, most = (form.format(value) for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({least} to {most})"


def block(name: str, text: str) -> str:
    """The text between the two markers of its name."""
    return f"<!-- {name} -->\n{text}<!-- /{name} -->"


def insert_block(file: Path, name: str, text: str) -> None:
    """Replace what stands between the markers of a Markdown file; TableError if it does not have each once."""
    begin, end = block(name, "").split("\n")
    whole = file.read_text(encoding="utf-8")
    if whole.count(begin) != 1 or whole.count(end) != 1 or whole.index(begin) > whole.index(end):
        raise TableError(f"{file} has no place for the table: write {begin} and, below it, {end} where it belongs")
    before, rest = whole.split(begin)
    file.write_text(before + block(name, text) + rest.split(end)[1], encoding="utf-8")
