"""Runs inline PTX on a CPU: the few instructions that unpack codes, on words of 32 bits."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import torch

Words = np.ndarray
"""uint32 [n]: a register in n threads."""


def run_ptx(text: str, given: Mapping[int, Words]) -> dict[int, Words]:
    """The operands $0, $1, ... after the instructions, `given` those that are read. An unknown instruction raises."""
    count = len(next(iter(given.values())))
    registers: dict[str, Words] = {f"${number}": words.astype(np.uint32) for number, words in given.items()}

    def value(name: str) -> Words:
        return registers[name] if name in registers else np.full(count, int(name, 0), np.uint32)

    for statement in text.strip().strip("{}").split(";"):
        name, *operands = re.findall(r"[\w.$]+", statement) or [".reg"]
        if name == ".reg":
            continue
        target, (first, *rest) = operands[0], map(value, operands[1:])
        registers[target] = _instruction(name, first, rest)
    return {int(name[1:]): words for name, words in registers.items() if name[0] == "$"}


def _instruction(name: str, first: Words, rest: list[Words]) -> Words:
    if name == "mov.b32":
        return first
    if name == "and.b32":
        return first & rest[0]
    if name == "shl.b32":
        return first << rest[0]
    if name == "shr.u32":
        return first >> rest[0]
    if name == "prmt.b32":
        return _permuted(first, *rest)
    if name == "fma.rn.bf16x2":
        numbers = _numbers(first) * _numbers(rest[0]) + _numbers(rest[1])
        halves = numbers.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        return halves[:, 0] | halves[:, 1] << 16
    raise ValueError(f"{name} is not known")


def _permuted(low: Words, high: Words, selector: Words) -> Words:
    """Of the 8 bytes of two words those that the selector's nibbles name; with their highest bit, the sign of one."""
    both, made = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32), np.zeros(len(low), np.uint32)
    for byte in range(4):
        nibble = selector >> np.uint32(4 * byte) & np.uint32(15)
        chosen = (both >> (8 * (nibble & 7)).astype(np.uint64) & np.uint64(255)).astype(np.uint32)
        signs = np.where(chosen & 128, np.uint32(255), np.uint32(0))
        made |= np.where(nibble & 8, signs, chosen) << np.uint32(8 * byte)
    return made


def _numbers(words: Words) -> torch.Tensor:
    """The bf16 numbers fp64 [n, 2] in the lower and upper halves of words."""
    return torch.from_numpy(np.stack([words, words >> 16], 1).astype(np.uint16)).view(torch.bfloat16).double()
