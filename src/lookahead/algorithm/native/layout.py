"""The structs of `drafter.h` that Python packs: their fields, in order, and the check that the library agrees.

A `Struct` is packed in a third of the time that a `ctypes.Structure` takes, and lists of integers in a tenth of the
time that an `array` of them takes.
"""

from __future__ import annotations

import ctypes
from struct import Struct, calcsize
from typing import Any

VERSION = 1
"""Raised in `layout.c`, too, when the meaning of an argument changes and no struct shows it."""


class Record:
    """One of C's structs. Fields are given as format characters of `struct`: '3i' is an array of three integers."""

    def __init__(self, name: str, **fields: str) -> None:
        self.name = name
        self.offsets, format = dict[str, int](), ""
        for field, code in fields.items():
            self.offsets[field] = calcsize(f"{format}0{code[-1]}")
            format += code
        aligned = "P" if any(code[-1] in "Pd" for code in fields.values()) else "i"
        self._codes, self._struct = fields, Struct(f"{format}0{aligned}")
        self.size, self.pack = self._struct.size, self._struct.pack

    def with_only(self, *fields: str) -> Struct:
        """Packs these fields, in the struct's order; all others are zero."""
        format, end = "", 0
        for field in fields:
            format += f"{self.offsets[field] - end}x{self._codes[field]}"
            end = calcsize(format)
        return Struct(f"{format}{self.size - end}x")


SETTINGS = Record(
    "Settings", ngram="i", guesses="i", key="i", branches="i", reach="i", suffix="i", fed="2i", longest_match="i",
    deepest="i",
)  # fmt: skip
COMPUTED = Record("Computed", nodes="i", needed_count="i", count="i", before="2i", only="i", stride="i")
CANDIDATES = Record(
    "Candidates", last="P", own="P", shared="P", text="P", rates="P", guesses="P", scores="P", taught="d",
    rate_count="i", first_origin="i", capacity="i",
)  # fmt: skip
STEP = Record(
    "Step", candidates="P", cost="P", trust="P", bonus="d", floor="d", all_taken="i", cost_count="i", room="i",
    max_depth="i", branch="i", text_end="3i", chain_token_count="i", chain_count="i", most_tokens="i", root="i",
)  # fmt: skip
SHARE = Record("Share", cost="P", floor="d", cost_count="i", sequences="i", most="i", room="i")
RAN = Record("Ran", candidates="P", nodes="i", branch="i", width="i", needed_count="i")

RECORDS = (SETTINGS, COMPUTED, CANDIDATES, STEP, SHARE, RAN)
"""In the order of `layout.c`."""


def check_layout(library: Any) -> None:
    """Raise RuntimeError unless the library's version, sizes and offsets are those that Python packs."""
    try:
        layout = library.drafter_layout
    except AttributeError:
        raise RuntimeError("the compiled drafter does not say how its structs are laid out") from None
    layout.restype, layout.argtypes = ctypes.POINTER(ctypes.c_int32), []
    numbers = layout()
    packed = [("its version", VERSION)]
    for record in RECORDS:
        packed.append((f"the size of its {record.name}", record.size))
        packed += [(f"the offset of its {record.name}.{field}", at) for field, at in record.offsets.items()]
    if numbers[0] != len(packed):
        raise RuntimeError(f"the compiled drafter has {numbers[0]} sizes and offsets, and Python {len(packed)}")
    for (what, expected), number in zip(packed, numbers[1 : 1 + len(packed)], strict=True):
        if number != expected:
            raise RuntimeError(f"of the compiled drafter, {what} is {number}, and Python has {expected}")
