"""The report's plots as inline SVG: sized by a viewBox, coloured by the page's CSS classes, each with a text title."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH = 760
LABEL = 150  # room left of the bars
# Every stage that a system may report, in the order of a search, and how the page calls it.
STAGES = {
    "centroids": "centroid scores",
    "candidates": "candidates",
    "prune": "pruning",
    "decompress": "decompression",
    "maxsim": "MaxSim",
    "exact": "decompression + MaxSim, fused",
    "topk": "top-k",
    "search": "the whole search, not told apart",
}


def significant(value: float, digits: int = 3) -> str:
    """`digits` significant digits, thousands separated; an exponent below 0.001."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) < 1e-3:
        return f"{value:.{digits - 1}e}"
    rounded = float(f"{value:.{digits}g}")  # 9.999 is 10.0, not 10.00
    return f"{rounded:,.{max(0, digits - 1 - math.floor(math.log10(abs(rounded))))}f}"


def _svg(height: float, title: str, body: str, *, width: float = WIDTH, kind: str = "wide") -> str:
    return (
        f'<div class="scroll"><svg viewBox="0 0 {width:g} {height:g}" class="{kind}" role="img" '
        f'aria-label="{escape(title)}"><title>{escape(title)}</title>{body}</svg></div>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    tip = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{kind}">{tip}</rect>'


def legend(stages: Sequence[str]) -> str:
    """The stages' colours, as HTML that wraps."""
    items = "".join(f"<span><i class=s-{stage}></i>{escape(STAGES[stage])}</span>" for stage in stages)
    return f"<p class=legend>{items}</p>"


def stage_bars(groups: Sequence[tuple[str, Sequence[tuple[str, dict[str, float]]]]], title: str) -> str:
    """Stacked bars of milliseconds by stage: groups of (heading, [(row label, stage -> ms)]).

    Each group has its own scale, its longest bar as wide as the plot, so that lengths compare within a group.
    """
    body, y, room = [], 4.0, WIDTH - LABEL - 84
    for heading, rows in groups:
        body.append(_text(0, y + 14, heading, kind="strong"))
        y += 24
        longest = max((sum(stages.values()) for _, stages in rows), default=0.0)
        for row, stages in rows:
            x, total = float(LABEL), sum(stages.values())
            body.append(_text(LABEL - 10, y + 17, row, "end"))
            for stage, value in stages.items():
                width = room * value / longest if longest else 0.0
                tip = f"{row}, {STAGES[stage]}: {significant(value)} ms ({100 * value / max(total, 1e-12):.0f}%)"
                body.append(_rect(x, y, width, 25, f"s-{stage}", tip))
                inside = significant(value)
                if width > 8 + 7 * len(inside):
                    body.append(_text(x + width / 2, y + 17, inside, "middle", f"on-{stage}"))
                x += width
            body.append(_text(x + 8, y + 17, f"{significant(total)} ms", kind="strong"))
            y += 31
        y += 10
    return _svg(y, title, "".join(body))


def histogram(edges: Sequence[float], counts: Sequence[int], title: str, axis: str) -> str:
    """Bars of equal width over a symmetric axis, zero marked; heights are counts, the tallest one written down."""
    height, base, left, right = 190.0, 150.0, 40.0, WIDTH - 40.0
    low, high = edges[0], edges[-1]
    most = max(counts)
    step = (right - left) / len(counts)
    body = []
    for i, n in enumerate(counts):
        tall = (base - 24) * n / most
        tip = f"{significant(edges[i], 2)} to {significant(edges[i + 1], 2)}: {n:,}"
        if n:
            # Rare values stay visible: a bar is at least a line.
            body.append(_rect(left + i * step + 0.5, base - max(tall, 1), step - 1, max(tall, 1), "bar", tip))
    peak = left + (list(counts).index(most) + 0.5) * step
    body.append(_text(peak, base - (base - 24) - 6, f"{most:,}", "middle"))
    body.append(f'<line x1="{left}" x2="{right}" y1="{base}" y2="{base}" class="axis"/>')
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = left + share * (right - left)
        body.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 5}" class="axis"/>')
        body.append(_text(x, base + 20, "0" if share == 0.5 else significant(low + share * (high - low), 2), "middle"))
    body.append(_text((left + right) / 2, base + 38, axis, "middle"))
    return _svg(height, title, "".join(body))


def query_scatter(x: Sequence[float], y: Sequence[float], title: str, x_label: str, y_label: str) -> str:
    """One query a point, both axes from 0 to 1: what lies on the diagonal is equal. Equal points grow in area."""
    side, left, top = 216.0, 46.0, 10.0
    points: dict[tuple[float, float], int] = {}
    for pair in zip(x, y):
        points[pair] = points.get(pair, 0) + 1
    body = [_rect(left, top, side, side, "frame")]
    body.append(f'<line x1="{left}" y1="{top + side}" x2="{left + side}" y2="{top}" class="diagonal"/>')
    for (a, b), n in sorted(points.items(), key=lambda point: -point[1]):
        kind = "equal" if a == b else "gain" if b > a else "loss"
        radius = min(2.0 + 0.8 * math.sqrt(n - 1), 9.0)
        tip = f"{a:.4f} and {b:.4f}: {n:,} quer{'y' if n == 1 else 'ies'}"
        place = f'cx="{left + side * a:.1f}" cy="{top + side * (1 - b):.1f}" r="{radius:.1f}"'
        body.append(f'<circle {place} class="{kind}"><title>{escape(tip)}</title></circle>')
    for value in (0, 0.5, 1):
        body.append(_text(left + side * value, top + side + 16, f"{value:g}", "middle"))
        body.append(_text(left - 6, top + side * (1 - value) + 4, f"{value:g}", "end"))
    body.append(_text(left + side / 2, top + side + 33, x_label, "middle"))
    middle = top + side / 2
    body.append(f'<g transform="rotate(-90 10 {middle})">{_text(10, middle + 2, y_label, "middle")}</g>')
    return _svg(top + side + 40, title, "".join(body), width=left + side + 12, kind="small")


SERIES = 12  # colour classes c0, c1, ... of report.css


def series_class(i: int) -> str:
    return f"c{i % SERIES}"


class _Axes:
    """A frame with ticks on two axes; maps values to places."""

    def __init__(self, x: Sequence[float], y: Sequence[float], *, log_x: bool, log_y: bool, height: float) -> None:
        self.left, self.right, self.top, self.bottom = 64.0, WIDTH - 190.0, 12.0, height - 46.0
        self.log_x, self.log_y = log_x, log_y
        self.x, self.y = _span(x, log_x), _span(y, log_y)

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = _share(x, self.x, self.log_x)
        up = _share(y, self.y, self.log_y)
        return self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top)

    def body(self, x_label: str, y_label: str, x_ticks: Sequence[float] | None = None) -> str:
        parts = [_rect(self.left, self.top, self.right - self.left, self.bottom - self.top, "frame")]
        for value in x_ticks or _ticks(self.x, self.log_x):
            place, _ = self.at(value, self.y[0])
            parts.append(f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{self.bottom}" y2="{self.bottom + 5}" '
                         'class="axis"/>')  # fmt: skip
            parts.append(_text(place, self.bottom + 19, _plain(value), "middle"))
        for value in _ticks(self.y, self.log_y):
            _, place = self.at(self.x[0], value)
            parts.append(
                f'<line x1="{self.left}" x2="{self.right}" y1="{place:.1f}" y2="{place:.1f}" class="diagonal"/>'
            )
            parts.append(_text(self.left - 8, place + 4, _plain(value), "end"))
        parts.append(_text((self.left + self.right) / 2, self.bottom + 38, x_label, "middle"))
        middle = (self.top + self.bottom) / 2
        parts.append(f'<g transform="rotate(-90 14 {middle})">{_text(14, middle + 4, y_label, "middle")}</g>')
        return "".join(parts)


def _span(values: Sequence[float], log: bool) -> tuple[float, float]:
    """The values' range, widened so that no point lies on the frame."""
    low, high = min(values), max(values)
    if log:
        return low / 1.35, high * 1.35
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def _share(value: float, span: tuple[float, float], log: bool) -> float:
    low, high = (math.log(bound) for bound in span) if log else span
    return ((math.log(value) if log else value) - low) / (high - low)


def _ticks(span: tuple[float, float], log: bool) -> list[float]:
    """Round values within the span: at least two."""
    low, high = span
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
            found = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
            if len(found) >= 3:
                return found
        return found if len(found) > 1 else _ticks(span, False)
    size = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(size * factor for factor in (1, 2, 5, 10) if (high - low) / (size * factor) <= 6)
    first = math.ceil(low / step)
    return [n * step for n in range(first, math.floor(high / step) + 1)]


def _plain(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}" if value == round(value, 6) else f"{value:.3g}"


def _apart(places: list[float], least: float = 15.0) -> list[float]:
    """The same heights, moved down where two labels would overlap."""
    moved = list(places)
    for i, j in zip(order := sorted(range(len(places)), key=places.__getitem__), order[1:]):
        moved[j] = max(moved[j], moved[i] + least)
    return moved


def lines(series: Sequence[tuple[str, Sequence[tuple[float, float]]]], title: str, x_label: str, y_label: str) -> str:
    """One line a series over logarithmic axes, named at its end; ticks at the x values that occur."""
    points = [point for _, line in series for point in line]
    axes = _Axes([x for x, _ in points], [y for _, y in points], log_x=True, log_y=True, height=330)
    body = [axes.body(x_label, y_label, sorted({x for x, _ in points}))]
    ends = _apart([axes.at(*line[-1])[1] for _, line in series])
    for i, ((name, line), end) in enumerate(zip(series, ends)):
        kind = series_class(i)
        path = " ".join("{:.1f},{:.1f}".format(*axes.at(x, y)) for x, y in line)
        body.append(f'<polyline points="{path}" class="line {kind}"/>')
        for x, y in line:
            across, up = axes.at(x, y)
            tip = escape(f"{name}, {_plain(x)}: {significant(y)}")
            body.append(
                f'<circle cx="{across:.1f}" cy="{up:.1f}" r="4" class="dot {kind}"><title>{tip}</title></circle>'
            )
        body.append(_text(axes.right + 10, end + 4, name, kind=f"name {kind}"))
    return _svg(330, title, "".join(body))


def points(
    found: Sequence[tuple[str, str, float, float]],
    title: str,
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    roof: float | None = None,
) -> str:
    """(series, name of the point, x, y), y logarithmic. `roof`: a line y = roof * x, for a roofline."""
    xs, ys = [x for *_, x, _ in found], [y for *_, y in found]
    if roof is not None:
        ys = [*ys, roof * min(xs), roof * max(xs)]
    axes = _Axes(xs, ys, log_x=log_x, log_y=True, height=360)
    names = list(dict.fromkeys(series for series, *_ in found))
    body = [axes.body(x_label, y_label)]
    if roof is not None:
        (x1, y1), (x2, y2) = (axes.at(x, roof * x) for x in (min(xs), max(xs)))
        body.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="roof"/>')
    for series, name, x, y in found:
        across, up = axes.at(x, y)
        tip = escape(f"{series}, {name}: {significant(x, 4)}, {significant(y)}")
        kind = series_class(names.index(series))
        body.append(f'<circle cx="{across:.1f}" cy="{up:.1f}" r="6" class="dot {kind}"><title>{tip}</title></circle>')
    for i, series in enumerate(names):
        body.append(f'<circle cx="{axes.right + 16}" cy="{24 + 20 * i}" r="6" class="dot {series_class(i)}"/>')
        body.append(_text(axes.right + 28, 28 + 20 * i, series))
    return _svg(360, title, "".join(body))
