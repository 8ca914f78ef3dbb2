"""The structs of `drafter.h` that Python packs: their fields, in order, and a check of the library's layout.

Packing with `struct.Struct` takes a third of the time of a `ctypes.Structure`, and packing a list of integers a tenth
of the time of creating an `array`.
"""

from __future__ import annotations

import ctypes
from struct import Struct, calcsize
from typing import Any

VERSION = 1
"""Increase it here and in `layout.c` when the meaning of an argument changes but no struct does."""


class Record:
    """A C struct. Fields are given as format characters of `struct`: '3i' is an array of three integers."""

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
        """A `Struct` that packs these fields, in the struct's order; all others are zero."""
        format, end = "", 0
        for field in fields:
            format += f"{self.offsets[field] - end}x{self._codes[field]}"
            end = calcsize(format)
        return Struct(f"{format}{self.size - end}x")


TEXT_SETTINGS = Record(
    "TextSettings", ngram="i", guesses="i", key="i", branches="i", reach="i", suffix="i", fed="2i", longest_match="i",
    deepest="i",
)  # fmt: skip
STEP_SUCCESSORS = Record("StepSuccessors", nodes="i", needed_count="i", count="i", before="2i", replace="i", stride="i")
CANDIDATES = Record(
    "Candidates", last="P", own="P", shared="P", bigrams="P", text="P", rates="P", drafted="P", scores="P", bonus="d",
    rate_count="i", first_origin="i", capacity="i", chain="i",
)  # fmt: skip
STEP = Record(
    "Step", candidates="P", cost="P", trust="P", bonus="d", floor="d", all_taken="i", cost_count="i", max_tokens="i",
    max_depth="i", branch="i", text_end="3i", chain_token_count="i", chain_count="i", max_text="i", root="i",
)  # fmt: skip
STEP_LIMITS = Record("StepLimits", cost="P", floor="d", cost_count="i", sequences="i", max_weighed="i", max_tokens="i")
STEP_TREE = Record("StepTree", candidates="P", nodes="i", branch="i", width="i", needed_count="i")
PACKET_FIELDS = Record(
    "PacketFields", numbers="P", row_room="i", needed_room="i", sequence_room="i", shapes="i", tokens="i",
    sequence_of="i", parents="i", sequences="i", needed="i",
)  # fmt: skip
TILE_FIELD = Record("TileField", first="i", room="i", group="i", block="i")

RECORDS = (TEXT_SETTINGS, STEP_SUCCESSORS, CANDIDATES, STEP, STEP_LIMITS, STEP_TREE, PACKET_FIELDS, TILE_FIELD)
"""In the order of `layout.c`."""


def check_layout(library: Any) -> None:
    """Raise RuntimeError unless the library's version, sizes and offsets equal Python's."""
    try:
        layout = library.drafter_layout
    except AttributeError:
        raise RuntimeError("the compiled drafter has no table of its struct layouts") from None
    layout.restype, layout.argtypes = ctypes.POINTER(ctypes.c_int32), []
    numbers = layout()
    packed = [("its version", VERSION)]
    for record in RECORDS:
        packed.append((f"the size of its {record.name}", record.size))
        packed += [(f"the offset of its {record.name}.{field}", offset) for field, offset in record.offsets.items()]
    if numbers[0] != len(packed):
        raise RuntimeError(f"the compiled drafter has {numbers[0]} sizes and offsets, and Python {len(packed)}")
    for (what, expected), number in zip(packed, numbers[1 : 1 + len(packed)], strict=True):
        if number != expected:
            raise RuntimeError(f"of the compiled drafter, {what} is {number}, and Python has {expected}")
