"""The report's charts as inline SVG, drawn by hand: no script, no font, no colour that carries meaning alone.

Every function returns one <svg> element. Colours come from the page's (or the picture's) style sheet by class:
`a` is the first series (solid), `b` the second (outlined).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup, escape

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 54, 10, 16, 34

LINES = ("line-a", "line-b", "line-c")

Series = tuple[str, Sequence[float]]


def shares(categories: Sequence[str], series: Sequence[Series], top: float, alt: str) -> Markup:
    """Grouped bars of shares (0 to 1) on a linear axis from 0 to `top`, each with its percentage above it."""
    out = []
    for tick in _ticks(top):
        out += [_line(*_span(), _y(tick, top), "grid"), _text(LEFT - 8, _y(tick, top) + 4, f"{100 * tick:.4g}%", "end")]
    slot = (WIDTH - LEFT - RIGHT) / len(categories)
    width = min(54, 0.36 * slot)
    for i, category in enumerate(categories):
        middle = LEFT + (i + 0.5) * slot
        out.append(_text(middle, HEIGHT - 12, category))
        for j, (_, values) in enumerate(series):
            x = middle + (j - len(series) / 2) * (width + 4) + 2
            y = _y(values[i], top)
            out.append(_bar(x, y, width, "ab"[j]))
            out.append(_text(x + width / 2, y - 5, percent(values[i]), css="value"))
    return _svg([*out, _line(*_span(), _y(0, top), "axis")], alt)


def magnitudes(series: Sequence[Series], first: int, alt: str) -> Markup:
    """Counts by power of two, on a logarithmic axis: value i of a series lies in [2^(first+i-1), 2^(first+i))."""
    bins = len(series[0][1])
    top = max(1.0, *(math.log10(v) + 0.35 for _, values in series for v in values if v))
    out = []
    for power in range(int(top) + 1):
        y = _y(power + 0.35, top + 0.35)
        out += [_line(*_span(), y, "grid"), _text(LEFT - 8, y + 4, f"{10**power:,}", "end")]
    slot = (WIDTH - LEFT - RIGHT) / bins
    every = next(n for n in (1, 2, 4, 8, 16, 32, 64, 1024) if bins / n <= 8)
    for i in range(bins):
        if (first + i - 1) % every == 0:
            out.append(_text(LEFT + i * slot, HEIGHT - 12, power_of_two(first + i - 1)))
            out.append(f'<path class="axis" d="M{LEFT + i * slot:.1f} {HEIGHT - BOTTOM}v4"/>')
        for j, (_, values) in enumerate(series):
            if values[i]:
                y = _y(math.log10(values[i]) + 0.35, top + 0.35)
                out.append(_bar(LEFT + slot * (i + 0.08 + 0.44 * j), y, 0.4 * slot, "ab"[j]))
    return _svg([*out, _line(*_span(), HEIGHT - BOTTOM, "axis")], alt)


def dots(
    categories: Sequence[str], series: Sequence[Series], low: int, high: int, bound: float | None, alt: str
) -> Markup:
    """Values on a logarithmic axis from 10^low to 10^high; zero stands on the axis itself; `bound` is a dashed line."""

    def y(value: float) -> float:
        share = 0.18 + 0.72 * (math.log10(value) - low) / (high - low) if value > 0 else 0.0
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    out = []
    for power in range(low, high + 1, max(1, (high - low) // 7)):
        out += [
            _line(*_span(), y(10.0**power), "grid"),
            _text(LEFT - 8, y(10.0**power) + 4, power_of_ten(power), "end"),
        ]
    out.append(_text(LEFT - 8, y(0) + 4, "0", "end"))
    if bound:
        out.append(_line(*_span(), y(bound), "bound"))
    slot = (WIDTH - LEFT - RIGHT) / len(categories)
    for i, category in enumerate(categories):
        middle = LEFT + (i + 0.5) * slot
        out.append(_text(middle, HEIGHT - 12, category))
        for j, (_, values) in enumerate(series):
            x, top = middle + (26 if j else -26), y(values[i])
            out.append(f'<path class="stem" d="M{x:.1f} {y(0):.1f}V{top:.1f}"/>')
            shape = f'<path class="b" d="M{x:.1f} {top - 6:.1f}l6 6l-6 6l-6-6z"/>'
            out.append(shape if j else f'<circle class="a" cx="{x:.1f}" cy="{top:.1f}" r="5"/>')
            out.append(_text(x, top - 10, number(values[i]), css="value"))
    if bound:
        out.append(_text(WIDTH - RIGHT, y(bound) - 5, f"bound {bound:.3g}", "end", "value"))
    return _svg([*out, _line(*_span(), y(0), "axis")], alt)


def rewards(categories: Sequence[str], groups: Sequence[Sequence[tuple[float, bool]]], alt: str) -> Markup:
    """One dot a GRPO group at its mean reward, filled if it has an advantage; a bar at the mean of each step."""
    values = [reward for step in groups for reward, _ in step] or [0.0]
    low, high = min(0.0, *values), max(0.0, *values)
    span = high - low or 1.0
    size = 10.0 ** math.floor(math.log10(span))
    tick = next(size * k for k in (0.2, 0.25, 0.5, 1.0, 2.5) if span / (size * k) <= 5)
    low, high = tick * math.floor(low / tick + 1e-9), tick * max(1, math.ceil(high / tick - 1e-9))

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - 8 - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM - 16)

    out = []
    for k in range(round((high - low) / tick) + 1):
        value = low + k * tick
        out += [_line(*_span(), y(value), "grid"), _text(LEFT - 8, y(value) + 4, f"{value:.3g}", "end")]
    slot = (WIDTH - LEFT - RIGHT) / len(categories)
    for i, (category, step) in enumerate(zip(categories, groups, strict=True)):
        middle = LEFT + (i + 0.5) * slot
        out.append(_text(middle, HEIGHT - 12, category))
        if not step:
            continue
        mean = sum(reward for reward, _ in step) / len(step)
        out.append(_line(middle - 0.42 * slot, middle + 0.42 * slot, y(mean), "mean"))
        rows: dict[int, list[tuple[bool, float]]] = {}
        for reward, learns in step:  # dots that would overlap stand side by side
            rows.setdefault(round(y(reward) / 9), []).append((learns, reward))
        for row in rows.values():
            gap = min(11.0, 0.8 * slot / len(row))
            for k, (learns, reward) in enumerate(sorted(row, reverse=True)):
                x = middle + (k - (len(row) - 1) / 2) * gap
                out.append(f'<circle class="{"a" if learns else "hollow"}" cx="{x:.1f}" cy="{y(reward):.1f}" r="4.5"/>')
    return _svg(out, alt)


def curves(series: Sequence[Series], alt: str) -> Markup:
    """A line a series over the steps 1, 2, …, on a linear axis that holds zero; its name stands above, by its dash."""
    values = [value for _, line in series for value in line]
    low, high = min(0.0, *values), max(0.0, *values)
    high = high if high > low else low + 1.0
    steps = max(len(line) for _, line in series)

    def x(step: int) -> float:
        return LEFT + 6 + (WIDTH - LEFT - RIGHT - 12) * (step - 1) / max(steps - 1, 1)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM - 20)

    out = []
    for tick in (low, (low + high) / 2, high):
        out += [_line(*_span(), y(tick), "grid"), _text(LEFT - 8, y(tick) + 4, f"{tick:.2g}", "end")]
    for step in sorted({1, (1 + steps) // 2, steps}):
        out.append(_text(x(step), HEIGHT - 12, str(step)))
    for i, (name, line) in enumerate(series):
        css = LINES[i]
        path = "L".join(f"{x(step):.1f} {y(value):.1f}" for step, value in enumerate(line, 1))
        out.append(f'<path class="{css}" d="M{path}"/>')
        left = LEFT + 8 + i * (WIDTH - LEFT - RIGHT) / len(LINES)
        out += [_line(left, left + 30, TOP - 2, css), _text(left + 36, TOP + 2, name, "start", "value")]
    return _svg([*out, _line(*_span(), y(0), "axis")], alt)


def number(value: float) -> str:
    """A positive value in three characters or so; zero as 0."""
    return "0" if value == 0 else f"{value:.2g}"


def percent(value: float) -> str:
    """A share as a percentage that is 0% only if it is zero, and 100% only if it is one."""
    if value in (0, 1):
        return f"{value:.0%}"
    if not 0.001 <= value <= 0.999:
        return "<0.1%" if value < 0.5 else ">99.9%"
    return f"{value:.1%}"


def power_of_two(power: int) -> str:
    return "2" + _superscript(power)


def power_of_ten(power: int) -> str:
    return f"{10.0**power:g}" if -4 < power < 4 else "10" + _superscript(power)


def _superscript(power: int) -> str:
    return str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _ticks(top: float) -> list[float]:
    step = next(s for s in (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5) if top / s <= 5)
    return [k * step for k in range(int(top / step + 1e-9) + 1)]


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)


def _span() -> tuple[float, float]:
    return LEFT, WIDTH - RIGHT


def _line(x1: float, x2: float, y: float, css: str) -> str:
    return f'<path class="{css}" d="M{x1:.1f} {y:.1f}H{x2:.1f}"/>'


def _bar(x: float, y: float, width: float, css: str) -> str:
    height = HEIGHT - BOTTOM - y
    return (
        f'<rect class="{css}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>' if height > 0 else ""
    )


def _text(x: float, y: float, text: str, anchor: str = "middle", css: str = "label") -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(body: Sequence[str], alt: str) -> Markup:
    return Markup(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(alt)}">'
        f"{''.join(body)}</svg>"
    )
