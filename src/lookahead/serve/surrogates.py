r"""Lone surrogates: a JSON escape can encode half a character, such as "\ud83d", which is not valid Unicode.

Tokenizers, templates and encoders all fail on them, each in its own way. So bodies with one are refused.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from lookahead.serve.errors import ApiError, bad_request

ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]")
PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
LONE = re.compile("[\ud800-\udfff]")
LONGEST_NAME = 200


class LoneSurrogate(NamedTuple):
    """A lone surrogate in a body. `field` names the string, or the object if the surrogate is in one of its keys."""

    field: str
    surrogate: str
    is_key: bool

    def error(self) -> ApiError:
        where = self.field[:LONGEST_NAME] or "the body"
        what = f"a key of {where}" if self.is_key else where
        escape = rf"\u{ord(self.surrogate):04x}"
        message = f"{what} has a lone surrogate ({escape}), which is not text; send the whole character"
        return bad_request(message, self.field[:LONGEST_NAME] or None, "lone_surrogate")


def check_surrogates(body: bytes) -> None:
    """Raise a 400 that names the string with a lone surrogate in a JSON body, which must be valid UTF-8."""
    if not may_have_lone(body):
        return
    try:
        found = find(json.loads(body))
    except ValueError:  # not JSON: reported when the body is parsed
        return
    if found is not None:
        raise found.error()


def may_have_lone(body: bytes) -> bool:
    """Whether a JSON text may contain half a surrogate pair. Fast: most bodies have no such escape, and in the others
    complete pairs are removed first."""
    if b"\\u" not in body or not ESCAPED.search(body):
        return False
    text = body.replace(b"\\\\", b"  ")  # an escaped backslash starts no escape
    return ESCAPED.search(PAIR.sub(b"", text)) is not None


def find(value: Any, name: str = "") -> LoneSurrogate | None:
    """The first lone surrogate in a value called `name`."""
    if isinstance(value, str):
        lone = LONE.search(value)
        return None if lone is None else LoneSurrogate(name, lone[0], False)
    if isinstance(value, list):
        return next(filter(None, (find(item, f"{name}[{index}]") for index, item in enumerate(value))), None)
    if not isinstance(value, dict):
        return None
    for key, item in value.items():
        if lone := LONE.search(key):
            return LoneSurrogate(name, lone[0], True)
        if found := find(item, f"{name}.{key}" if name else key):
            return found
    return None


def is_text(value: Any) -> bool:
    """Whether a parsed JSON value has no lone surrogate."""
    return find(value) is None
