"""Products on a card: what a measurement of them must show, and the lies that are named."""

from collections.abc import Callable
from typing import Any

import pytest

from samebits.judge import products

Document = dict[str, Any]


def whole() -> Document:
    """A measurement that lacks nothing."""
    shapes = [shape for several in products.SHAPES.values() for shape in several]
    rows = []
    for n, k in shapes:
        # A copy of 4 TB/s; what serves reads the weight at 0.9 of it.
        taken = n * k * 2 / 3.6e6
        times = {"cublas": 1.1 * taken, "skinny": taken, "cublaslt": 1.2 * taken}
        rows += [{"n": n, "k": k, "m": m, "served": "skinny", "microseconds": dict(times)} for m in products.ROWS]
    bits = [
        {"n": n, "k": k, "implementation": name, "differ": 0, "of": of}
        for n, k in shapes
        for name, of in products.elements(n).items()
    ]
    return {"rows": rows, "bits": bits, "copy_tb_s": 4.0, "libraries": dict.fromkeys(products.LIBRARIES, "0" * 64)}


def test_a_measurement_that_holds_all_lacks_nothing() -> None:
    assert products.missed(whole()) == []
    assert products.summary(whole()) == pytest.approx(
        {products.MEAN: 1.1, products.WORST: 1.1, products.SHARE: 0.9, products.DIFFER: 0.0}
    )


def slower(times: float, rows: slice) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        for row in document["rows"][rows]:
            row["microseconds"]["skinny"] *= times

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d["rows"].pop(0), "4096 x 1024, 1 rows: is not timed"),
        (lambda d: d["bits"].pop(4), "1024 x 2048, skinny: 0 elements are compared, must be 29465600"),
        (lambda d: d["bits"][3].update(of=9), "1024 x 2048, cublaslt: 9 elements are compared, must be 675953664"),
        (lambda d: d["bits"].append(d["bits"][0]), "a row is there twice"),
        (lambda d: d["rows"].append(d["rows"][0]), "a row is there twice"),
        (lambda d: d["bits"][2].update(differ=1), "4096 x 1024, vllm: 1 elements differ"),
        (lambda d: d["libraries"].popitem(), "its hash is not there"),
        (slower(1.06, slice(None)), "geometric mean: 1.038, must be ≥ 1.05"),
        (slower(1.3, slice(0, 1)), "worst: 0.846, must be ≥ 0.90"),
        (lambda d: d.update(copy_tb_s=4.3), "share of the copy's bandwidth: 0.837, must be ≥ 0.85"),
    ],
)
def test_a_planted_lie_is_named(change: Callable[[Document], None], text: str) -> None:
    document = whole()
    change(document)
    assert [one for one in products.missed(document) if text in one], products.missed(document)


def test_what_another_implementation_took_does_not_count() -> None:
    """What serves is compared, and only few rows ask for bandwidth."""
    document = whole()
    for row in document["rows"]:
        row["microseconds"]["cublaslt"] = 1e9
        if row["m"] > products.FEW:
            row["microseconds"]["skinny"] *= 1.05
    assert products.summary(document)[products.SHARE] == pytest.approx(0.9)
