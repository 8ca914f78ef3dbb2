"""A canvas for figures in SVG: boxes, text and lines on a white card."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

# White text stands on these, and all of it on a white card, so a page may be light or dark.
BLUE, ORANGE, GREEN, RED = "#2563c9", "#b85c00", "#2b8149", "#c8323f"
TEAL, PURPLE, GREY = "#0f7f8c", "#7446bd", "#8a94a3"
INK, FAINT, LINE = "#1f2733", "#5a6575", "#d4dae2"


class Canvas:
    """SVG elements on a white card."""

    def __init__(self, width: int, height: int, title: str, about: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" font-family="Helvetica, Arial, sans-serif" font-size="14">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(about)}</desc>",
        ]
        self.box(1, 1, width - 2, height - 2, "#ffffff", edge=LINE, radius=10)

    def box(
        self,
        x: int,
        y: int,
        w: int,
        h: int,
        fill: str,
        *,
        edge: str = "none",
        radius: int = 5,
        dash: str = "",
    ) -> None:
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="{radius}" fill="{fill}" stroke="{edge}" '
            f'stroke-width="1.5"{dashes}/>'
        )

    def text(
        self,
        x: int,
        y: int,
        words: str,
        *,
        fill: str = INK,
        anchor: str = "start",
        bold: bool = False,
        size: int = 14,
        turn: int = 0,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        turned = f' transform="rotate({turn} {x} {y})"' if turn else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" fill="{fill}" text-anchor="{anchor}" font-size="{size}"{weight}{turned}>'
            f"{escape(words)}</text>"
        )

    def path(self, points: Sequence[tuple[int, int]], edge: str, width: int, *, opacity: float = 1) -> None:
        line = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(
            f'<polyline points="{line}" fill="none" stroke="{edge}" stroke-width="{width}" '
            f'stroke-linecap="round" stroke-linejoin="round" opacity="{opacity}"/>'
        )

    def arrow(self, start: tuple[int, int], end: tuple[int, int]) -> None:
        """A line with a head at its end."""
        self.path([start, end], INK, 2)
        (ax, ay), (bx, by) = start, end
        length = math.hypot(bx - ax, by - ay)
        dx, dy = (bx - ax) / length, (by - ay) / length
        head = [(round(bx - 9 * dx + side * 5 * dy), round(by - 9 * dy - side * 5 * dx)) for side in (1, -1)]
        self.path([head[0], end, head[1]], INK, 2)

    def chip(self, x: int, y: int, w: int, h: int, label: str, fill: str, *, ring: bool = False) -> None:
        """A token: a coloured box with its label, centred on (x, y)."""
        if ring:
            self.box(x - w // 2 - 4, y - h // 2 - 4, w + 8, h + 8, "none", edge=fill, radius=8)
        self.box(x - w // 2, y - h // 2, w, h, fill)
        self.text(x, y + 5, label, fill="#ffffff", anchor="middle", bold=True)

    def done(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])
