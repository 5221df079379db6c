"""Draws the load per rank of a simulation: one HTML file with SVG in it, that needs nothing else."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator

from weightcast.offline.simulate import Simulation
from weightcast.transfer.planner.topology import LINK_NAMES, Link

__all__ = ["draw"]

_COLOURS = {
    Link.NIC_OUT: "#d1622b",
    Link.NIC_IN: "#2f6fb3",
    Link.NVLINK_OUT: "#c9a227",
    Link.NVLINK_IN: "#4f9d69",
    Link.MEMORY: "#8a8f98",
}
_WIDTH, _HEIGHT = 1200, 150
_LEFT, _TOP = 64, 34

_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:24px auto;max-width:1290px;padding:0 12px;color:#1c2128;background:#fff}
h1{font-size:20px;margin:0 0 4px}
p{margin:4px 0}
svg{display:block;width:100%;height:auto;margin:6px 0 10px}
text{font:12px system-ui,sans-serif;fill:#4a515c}
.title{font-weight:600;fill:#1c2128}
.grid{stroke:#e3e6ea}
.axis{stroke:#9aa1ab}
.bound{stroke:#1c2128;stroke-dasharray:5 4}
.key{display:inline-block;width:12px;height:12px;margin:0 6px 0 16px;border-radius:2px;vertical-align:-1px}
.dashed{border-top:2px dashed #1c2128;height:0;vertical-align:3px;border-radius:0}
table{border-collapse:collapse;margin:10px 0}
td,th{padding:3px 14px 3px 0;text-align:left;border-bottom:1px solid #e3e6ea}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
"""


def draw(simulation: Simulation, title: str) -> str:
    """An HTML page: the verdict, the bounds, and a chart for the trainer and each instance, all on one scale. A chart
    has the seconds that each rank's links are busy."""
    s = simulation
    scale = _nice(max(s.total, s.bounds[0].seconds))
    links = [link for link in Link if s.nbytes[link].any()]
    keys = "".join(f'<span class="key" style="background:{_COLOURS[link]}"></span>{LINK_NAMES[link]}' for link in links)
    bounds = "".join(
        f'<tr><td>{html.escape(bound.reason)}</td><td class="n">{bound.seconds:.4g} s</td></tr>' for bound in s.bounds
    )
    charts = "\n".join(_chart(s, int(s.first[side]), int(s.first[side + 1]), scale) for side in range(len(s.first) - 1))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>
<p>Predicted <b>{s.total:.4g} s</b>, {s.ratio:.2f} times the lower bound of {s.bounds[0].seconds:.4g} s.
It waits for <b>{html.escape(s.labels[s.bottleneck])}</b>, {s.link}.</p>
<p>{keys}<span class="key dashed"></span>lower bound</p>
{charts}
<table><tr><th>no plan takes less than</th><th class="n"></th></tr>{bounds}</table>
</body></html>
"""


def _nice(value: float) -> float:
    """The next round number from `value` on, less 0.01 % for rounding; 1 for a value of 0 or less."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power >= value * 0.9999)


def _chart(s: Simulation, begin: int, end: int, scale: float) -> str:
    """The ranks `begin`..`end - 1` of one side, with a bar for each link that the side uses."""
    links = [link for link in Link if s.nbytes[link, begin:end].any()] or [Link.MEMORY]
    label = s.labels[begin].rpartition(" ")[0]
    slot = min(_WIDTH / (end - begin), 26.0 * len(links))
    bar = slot * 0.84 / len(links)
    bottom = _TOP + _HEIGHT
    lines = list(_axes(scale))
    for index, link in enumerate(links):
        path = []
        for rank in range(begin, end):
            height = float(s.seconds[link, rank]) / scale * _HEIGHT
            if height > 0:
                x = _LEFT + (rank - begin) * slot + slot * 0.08 + index * bar
                path.append(f"M{x:.2f} {bottom}v{-height:.2f}h{bar:.2f}v{height:.2f}z")
        lines.append(f'<path fill="{_COLOURS[link]}" d="{"".join(path)}"/>')
    for rank in range(begin, end):
        x = _LEFT + (rank - begin) * slot
        tip = ", ".join(f"{LINK_NAMES[link]} {s.seconds[link, rank]:.4g} s ({s.nbytes[link, rank] / 1e9:.4g} GB)"
                        for link in links)  # fmt: skip
        lines.append(
            f'<rect x="{x:.2f}" y="{_TOP}" width="{slot:.2f}" height="{_HEIGHT}" fill="transparent">'
            f"<title>{html.escape(s.labels[rank])}: {tip}</title></rect>"
        )
    if begin <= s.bottleneck < end:
        x = _LEFT + (s.bottleneck - begin + 0.5) * slot
        lines.append(f'<path d="M{x - 4:.2f} {_TOP - 8}h8l-4 7z" fill="#1c2128"/>')
    step = _label_step(end - begin, slot)
    for rank in range(begin, end, step):
        x = _LEFT + (rank - begin + 0.5) * slot
        lines.append(f'<text x="{x:.2f}" y="{bottom + 16}" text-anchor="middle">{rank - begin}</text>')
    y = bottom - s.bounds[0].seconds / scale * _HEIGHT
    lines.append(f'<path class="bound" d="M{_LEFT} {y:.2f}h{_WIDTH}"/>')
    peak = max(float(s.seconds[:, begin:end].max()), 0.0)
    lines.append(
        f'<text class="title" x="{_LEFT}" y="16">{html.escape(label)}: {end - begin} ranks, '
        f"busiest link {peak:.4g} s</text>"
    )
    return f'<svg viewBox="0 0 {_LEFT + _WIDTH + 10} {bottom + 24}" role="img">{"".join(lines)}</svg>'


def _label_step(ranks: int, slot: float) -> int:
    """Ranks from one number under the chart to the next, so that the numbers have room."""
    return next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, ranks) if step * slot >= 28 or step >= ranks)


def _axes(scale: float) -> Iterator[str]:
    bottom = _TOP + _HEIGHT
    for i in range(5):
        y = bottom - _HEIGHT * i / 4
        kind = "grid" if i else "axis"
        yield f'<path class="{kind}" d="M{_LEFT} {y:.2f}h{_WIDTH}"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.2f}" text-anchor="end">{scale * i / 4:.3g} s</text>'
