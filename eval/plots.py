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
