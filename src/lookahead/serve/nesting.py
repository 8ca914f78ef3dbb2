"""Limit of JSON nesting: Python's parser and encoder and chat templates fail beyond some depth."""

from __future__ import annotations

import re

MOST_DEPTH = 64
STRING_OR_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)


def too_deep(text: str) -> bool:
    """Whether a JSON text is nested more than `MOST_DEPTH` levels deep."""
    return text.count("[") + text.count("{") > MOST_DEPTH and deepest(text) > MOST_DEPTH


def deepest(text: str) -> int:
    """How deeply a JSON text is nested. Brackets inside strings do not count."""
    depth = most = 0
    for found in STRING_OR_BRACKET.finditer(text):
        if found[0] in "[{":
            depth += 1
            most = max(most, depth)
        elif found[0] in "]}":
            depth -= 1
    return most
