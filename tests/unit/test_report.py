"""The report: one page that needs nothing but itself and states what the receipt states, for every reader."""

from __future__ import annotations

import re
import shutil
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import BOUNDS, make_run, rewrite

from samebits.errors import SamebitsError
from samebits.evidence import receipt
from samebits.judge import JudgeError, judge_run
from samebits.report import charts, insert_block, render, render_svg_summary, render_table

VOID = {"meta", "link", "br", "path", "circle", "rect"}


class Page(HTMLParser):
    """A page's text, tags with their attributes, and whether every tag is closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        assert not self.open, f"not closed: {self.open}"
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("runs")
    made = {arm: make_run(folder / f"arm{arm}", arm) for arm in (0, 1)}
    receipt.write(made[0] / "receipt.json", judge_run(made[0], "observe", BOUNDS))
    receipt.write(made[1] / "receipt.json", judge_run(made[1], "zero", BOUNDS))
    return made


@pytest.fixture
def damaged(runs: dict[int, Path], tmp_path: Path) -> Path:
    """A run of arm 0 in a copy, to be changed and judged."""
    shutil.copytree(runs[0], tmp_path / "run")
    return tmp_path / "run"


def page(tmp_path: Path, *folders: Path) -> Page:
    render(list(folders), tmp_path / "out/report.html")
    return Page((tmp_path / "out/report.html").read_text())


def test_the_verdict_comes_first(runs: dict[int, Path], tmp_path: Path) -> None:
    one = page(tmp_path, runs[0])
    assert next(tag for tag, _ in one.tags if re.fullmatch("h[1-6]", tag)) == "h1"
    first = one.text.index("Pass ")
    assert "% of the trainer's logprobs differ from the rollout's at BI=0" in one.text[first:][:120]


def test_both_arms_stand_side_by_side(runs: dict[int, Path], tmp_path: Path) -> None:
    two = page(tmp_path, runs[0], runs[1])
    tokens = sum(c["valid_tokens"] for c in receipt.read(runs[1] / "receipt.json")["compares"])
    assert f"BI=1: none of {tokens:,} logprobs differ." in two.text
    assert len(two.all("figure")) == 2 * len(page(tmp_path, runs[0]).all("figure")) == 8


def test_every_count_of_the_receipt_is_on_the_page(runs: dict[int, Path], tmp_path: Path) -> None:
    document, text = receipt.read(runs[0] / "receipt.json"), page(tmp_path, runs[0]).text
    for c in document["compares"]:
        row = f"{c['weights'].replace('theta', 'θ')} {c['path']} {c['valid_tokens']:,} {c['mismatched']:,}"
        assert row in text
    for u in document["updates"]:
        assert f"{u['grad_norm']:.4g}" in text and f"{u['changed_parameters'] / 1000:.1%} of 1,000" in text
    for digest in [*document["execution"]["wheels"].values(), document["execution"]["git_commit"]]:
        assert digest in text
    assert "samebits run rl --arm 0 --steps 3 --out RUN" in text
    assert "What is not covered" in text and "They are no signature" in text


def test_the_page_asks_nobody_for_anything(runs: dict[int, Path], tmp_path: Path) -> None:
    seen = page(tmp_path, runs[0], runs[1])
    html = (tmp_path / "out/report.html").read_text()
    assert not seen.all("script") and not seen.all("img") and not seen.all("a")
    assert [link["href"] for link in seen.all("link")] == ["data:,"]
    assert set(re.findall(r"https?://[^\"' ]+", html)) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in html and "@import" not in html and not re.search(r'\son\w+="', html)
    assert str(tmp_path) not in html and str(runs[0]) not in html, "no path of this machine"


def test_the_page_reads_without_eyes_or_colour(runs: dict[int, Path], tmp_path: Path) -> None:
    seen = page(tmp_path, runs[0], runs[1])
    levels = [int(tag[1]) for tag, _ in seen.tags if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1
    assert len(seen.all("table")) == len(seen.all("caption")) and all(th.get("scope") for th in seen.all("th"))
    assert all(
        (svg.get("role") == "img" and svg.get("aria-label")) or svg.get("aria-hidden") for svg in seen.all("svg")
    )
    scrolling = [d for d in seen.all("div") if d.get("class") == "scroll"]
    assert scrolling and all(d["tabindex"] == "0" and d["aria-label"] for d in scrolling)
    assert seen.all("html")[0]["lang"] == "en" and seen.all("meta")[1]["name"] == "viewport"


def test_reasons_are_told(damaged: Path, tmp_path: Path) -> None:
    rewrite(damaged, "step-0002", lambda meta, tensors: meta.update(bypass=True))
    rewrite(damaged, "step-0003", lambda meta, tensors: tensors["actor"].__imul__(np.float32(1.5)))
    receipt.write(damaged / "receipt.json", judge_run(damaged, "observe", BOUNDS))
    text = page(tmp_path, damaged).text
    assert "Fail " in text and "exceeds 0.25, which rounding explains" in text
    assert text.count("recomputation was bypassed") == 2, "as a reason, and among what is not covered"


@pytest.mark.parametrize("name", ["capsules", "capsules/step-0001"])
def test_a_receipt_alone_is_enough(damaged: Path, tmp_path: Path, name: str) -> None:
    shutil.rmtree(damaged / name)
    seen = page(tmp_path, damaged)
    assert "Pass " in seen.text
    assert ("The capsules are not at hand." in seen.text) == (name == "capsules")


def test_a_run_with_broken_numbers_is_drawn(damaged: Path, tmp_path: Path) -> None:
    rewrite(damaged, "step-0001", lambda meta, tensors: tensors["reward"].fill(np.nan))
    rewrite(damaged, "step-0002", lambda meta, tensors: tensors["actor"].fill(np.inf))
    rewrite(damaged, "step-0003", lambda meta, tensors: tensors["advantages"].fill(np.nan))
    receipt.write(damaged / "receipt.json", judge_run(damaged, "observe", BOUNDS))
    assert "a reward is infinite or NaN" in page(tmp_path, damaged).text
    assert not re.search(r' (x|y|cx|cy|d|width|height)="[^"]*(nan|inf)', (tmp_path / "out/report.html").read_text())


def test_an_empty_run_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    receipt.write(tmp_path / "run/receipt.json", judge_run(tmp_path / "run"))
    text = page(tmp_path, tmp_path / "run").text
    assert "Fail No logprob was compared." in text and "Nothing was compared." in text


def test_other_capsules_than_the_judged_ones_are_not_drawn(damaged: Path, tmp_path: Path) -> None:
    rewrite(damaged, "step-0002", lambda meta, tensors: tensors["reward"].fill(0.125))
    assert "0.125" not in page(tmp_path, damaged).text


def test_a_receipt_that_contradicts_itself_is_not_drawn(damaged: Path, tmp_path: Path) -> None:
    document = receipt.read(damaged / "receipt.json")
    document["compares"].pop()
    fields: dict[str, Any] = {k: v for k, v in document.items() if k not in ("schema", "checksum")}
    receipt.write(damaged / "receipt.json", receipt.build(**fields))
    with pytest.raises(JudgeError, match="theta2 actor: not compared"):
        page(tmp_path, damaged)
    with pytest.raises(receipt.ReceiptError, match="judge the run first"):
        page(tmp_path, tmp_path)
    with pytest.raises(receipt.ReceiptError, match="at least one folder"):
        page(tmp_path)


def test_what_a_run_says_of_itself_is_text(damaged: Path, tmp_path: Path) -> None:
    for file in [damaged / "execution.json"]:
        file.write_text(file.read_text().replace("A processor", "<script>alert(1)</script>"))
    document = receipt.read(damaged / "receipt.json")
    document["execution"]["device_name"] = "<script>alert(1)</script>"
    fields: dict[str, Any] = {k: v for k, v in document.items() if k not in ("schema", "checksum")}
    receipt.write(damaged / "receipt.json", receipt.build(**fields))
    seen = page(tmp_path, damaged)
    assert "<script>alert(1)</script>" in seen.text and not seen.all("script")


def test_the_picture_is_one_sound_svg(runs: dict[int, Path]) -> None:
    svg = render_svg_summary([runs[0]])
    root = ET.fromstring(svg)
    rates = [c["mismatched"] / c["valid_tokens"] for c in receipt.read(runs[0] / "receipt.json")["compares"]]
    texts = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [t for t in texts if t in {charts.percent(r) for r in rates}] == [charts.percent(r) for r in rates]
    assert "prefers-color-scheme: dark" in svg and "http" not in svg.replace("http://www.w3.org/2000/svg", "")


def test_the_picture_shows_both_arms(runs: dict[int, Path]) -> None:
    root = ET.fromstring(render_svg_summary([runs[0], runs[1]]))
    texts = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    tokens = sum(c["valid_tokens"] for c in receipt.read(runs[1] / "receipt.json")["compares"])
    assert f"BI=1: 0% of {tokens:,}" in texts and texts.count("0%") >= 6
    assert "BI=0: " in (root.get("aria-label") or "") and "BI=1: none of" in (root.get("aria-label") or "")


def test_the_table_says_what_the_receipts_hold_and_keeps_its_place(runs: dict[int, Path], tmp_path: Path) -> None:
    file, table = tmp_path / "README.md", render_table([runs[0], runs[1]])
    assert table.count("\n| BI=0 |") == table.count("\n| BI=1 |") == 6
    for arm, run in runs.items():
        for c in receipt.read(run / "receipt.json")["compares"]:
            counts = f"{c['mismatched']:,} of {c['valid_tokens']:,} | {c['max_abs']:.3f}" if arm == 0 else "0 of "
            assert f"| BI={arm} | θ{c['weights'][-1]} | {c['path']} | {counts}" in table
    file.write_text("before\n<!-- mismatches -->\nold\n<!-- /mismatches -->\nafter\n")
    for _ in range(2):
        insert_block(file, "mismatches", table)
        assert file.read_text() == f"before\n<!-- mismatches -->\n{table}<!-- /mismatches -->\nafter\n"
    file.write_text("no place")
    with pytest.raises(SamebitsError, match="has no place for the table: write"):
        insert_block(file, "mismatches", table)


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0%"), (1.0, "100%"), (1e-9, "<0.1%"), (1 - 1e-9, ">99.9%"), (0.2345, "23.4%"), (0.001, "0.1%")],
)
def test_only_zero_is_called_zero(share: float, text: str) -> None:
    assert charts.percent(share) == text


def test_the_page_is_drawn_alike_twice(runs: dict[int, Path], tmp_path: Path) -> None:
    render([runs[0]], tmp_path / "a.html")
    render([runs[0]], tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
