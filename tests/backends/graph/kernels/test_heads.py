"""Locating rows, norms of heads and the rotary write, against their twins."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from flat import Part, random_parents, rows_of, tables_of, tree_of
from rounding import DTYPES, close

from lookahead.algorithm.visibility import visibility
from lookahead.backends.graph.kernels import heads, locate, reference_heads
from lookahead.backends.graph.kernels.projections import Projections
from lookahead.backends.graph.kernels.rows import Rows
from lookahead.models.norm import Norm


@pytest.mark.parametrize(
    "shapes", [[(0, 0, 1)], [(7, 0, 33)], [(61, 5, 16), (107, 70, 0), (64, 0, 2)], [(3, 0, 130)], [(190, 2, 64)] * 3]
)
@pytest.mark.thinned(1, most=2)
def test_locate_rows(device: torch.device, shapes: list[tuple[int, int, int]]) -> None:
    """Random trees, chunks and rows that are left over, against `visibility`."""
    rng = random.Random(repr(shapes))
    parts = [Part(length, chunk, random_parents(nodes, rng)) for length, chunk, nodes in shapes]
    tables, _ = tables_of(parts, device)
    rows = rows_of(parts, tables, (1, 16), padding=5)  # located by the reference
    found = replace(
        rows, **{name: torch.full_like(getattr(rows, name), -77) for name in ("positions", "cells", "bits")}
    )
    locate.locate_rows(found)
    for name in ("positions", "cells", "bits"):
        assert torch.equal(getattr(found, name), getattr(rows, name)), name
    start = 0
    for slot, part in enumerate(parts):
        depths = tree_of(part.parents).depths
        end = start + part.chunk + len(part.parents)
        first_node = part.length + part.chunk
        positions = [*range(part.length, first_node), *[first_node + depth for depth in depths]]
        assert found.positions[start:end].tolist() == positions
        indices = range(part.length, part.end)
        assert found.cells[start:end].tolist() == [64 * int(tables[slot, at // 64]) + at % 64 for at in indices]
        seen = [
            sum((int(word) & 0xFFFFFFFF) << 32 * index for index, word in enumerate(words))
            for words in found.bits[start + part.chunk : end]
        ]
        assert seen == visibility(part.parents)
        start = end
    assert (found.cells[start:] < 64).all()  # page 0 is for padding


def test_shifted_positions(device: torch.device) -> None:
    """Each slot has its own shift; no position is below 0 or beyond the tables. Cells and masks stay as they are."""
    parts = [Part(30, 4, (-1, 0, 0)), Part(62, 0, (-1, 0, 1)), Part(2, 0, (-1, 0))]
    tables, _ = tables_of(parts, device)
    plain = rows_of(parts, tables, (1, 16), padding=2)
    shifts = torch.tensor([-11, 9, -3, 50], dtype=torch.int32, device=device)
    expected = [*[19, 20, 21, 22, 23, 24, 24], *[71, 72, 72], *[0, 0], *[0, 0]]
    for module in (locate, reference_heads):
        empty = {name: torch.full_like(getattr(plain, name), -77) for name in ("positions", "cells", "bits", "rotary")}
        rows = replace(plain, **empty, shifts=shifts, furthest=72)
        module.locate_rows(rows)
        assert rows.rotary.tolist() == expected
        for name in ("positions", "cells", "bits"):
            assert torch.equal(getattr(rows, name), getattr(plain, name)), name


class Case:
    """A step of two sequences with random projections, and what the kernels make of it."""

    def __init__(self, device: torch.device, dtype: torch.dtype, heads: int = 4, kv_heads: int = 2, dim: int = 16):
        torch.manual_seed(0)
        self.device, self.dtype, self.shape = device, dtype, (heads, kv_heads, dim)
        self.use([Part(30, 1), Part(63, 0, (-1, 0))], padding=1)

    def use(self, parts: list[Part], padding: int) -> None:
        """Use a step of these sequences."""
        self.parts = parts
        self.tables, self.pages = tables_of(parts, self.device)
        self.rows = rows_of(parts, self.tables, (1, 16), padding=padding)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(self.device, self.dtype)

    def norm(self, *shape: int, **changes: Any) -> Norm:
        return Norm(1 + 0.3 * self.random(*shape), 0.03, **changes)

    def layer_norm(self, *shape: int, **changes: Any) -> Norm:
        return self.norm(*shape, bias=self.random(*shape), centered=True, rounds_first=False, **changes)

    def rotation(self, pairs: int) -> dict[str, torch.Tensor]:
        angle = torch.rand(80, pairs, device=self.device) * 6
        return {"cosine": angle.cos(), "sine": angle.sin()}

    def results(self, module: Any, qkv: torch.Tensor, given: Projections, rows: Rows) -> list[torch.Tensor]:
        """Queries, keys and values, by the launches that a layer makes."""
        if given.needs_norm_heads:
            out = torch.full((len(rows.rotary), given.total * given.dim), float("nan"), dtype=qkv.dtype).to(qkv.device)
            qkv, given = module.norm_heads(qkv, given, out), given.after_norm_heads()
        q = torch.zeros(len(rows.rotary), given.heads, given.dim, dtype=self.dtype, device=self.device)
        cache = torch.zeros(2, self.pages, max(1, given.kv_heads), 64, given.dim, dtype=self.dtype, device=self.device)
        module.rotate_write(qkv, given, rows, q, *(cache if given.kv_heads else (None, None)))
        return [q, *cache]

    def check(self, *, sources: int | None = None, kv_heads: int | None = None, **changes: Any) -> list[torch.Tensor]:
        heads_, own, dim = self.shape
        own = own if kv_heads is None else kv_heads
        given = Projections(heads_, own, dim, **changes)
        qkv = self.random(16, (given.total if sources is None else sources) * dim)
        found, expected = (self.results(module, qkv, given, self.rows) for module in (heads, reference_heads))
        for one, other in zip(found, expected, strict=True):
            assert close(one, other)
        assert bool((found[0] != 0).any())
        return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 80), (2, 1, 128)])
@pytest.mark.parametrize("extras", ["none", "bias", "norms"])
@pytest.mark.thinned(1, most=1)
def test_rotate_write(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, extras: str
) -> None:
    case = Case(device, dtype, heads, kv_heads, dim)
    case.use([Part(30, 4, (-1, 0, 0)), Part(62, 0, (-1, 0, 1))], padding=2)
    found = case.check(
        bias=case.random((heads + 2 * kv_heads) * dim) if extras == "bias" else None,
        q_norm=case.norm(dim) if extras == "norms" else None,
        k_norm=case.norm(dim) if extras == "norms" else None,
        **case.rotation(dim // 2),
    )
    written = (found[1] != 0).any(3).any(1).sum(1)  # per page
    used = [int(case.tables[0, 0]), *case.tables[1, :2].tolist()]
    assert written[used].tolist() == [7, 2, 1]
    assert written[1:].sum() == 10  # the others belong to someone else; padding writes to page 0


def projections(name: str, case: Case) -> dict[str, Any]:
    """The fields of `Projections` that a layer of this kind has, for heads of shape (4, 2, 16)."""
    norm, rotation = case.norm, case.rotation(8)
    fields: dict[str, Any] = {
        "no rope": {"cosine": None, "sine": None},
        "a part": case.rotation(4),
        "interleaved": {"interleaved": True},
        "an interleaved part": {"interleaved": True, **case.rotation(3)},
        "scaled": {"query_scale": 1 + torch.rand(80, device=case.device)},
        "q norm alone": {"q_norm": norm(16)},
        "k norm alone": {"k_norm": norm(16)},
        "different eps": {"q_norm": norm(16), "k_norm": Norm(norm(16).weight, 0.5)},
        "Gemma 3": {f"{part}_norm": norm(16, offset=1.0, rounds_first=False) for part in "qk"},
        "offset, rounded first": {f"{part}_norm": norm(16, offset=1.0) for part in "qk"},
        "Gemma 4": {
            "q_norm": norm(16, rounds_first=False),
            "k_norm": norm(16, rounds_first=False),
            "v_norm": Norm(None, 1e-6),
        },
        "values are keys": {
            "sources": 6,
            "order": torch.tensor([0, 1, 2, 3, 4, 5, 4, 5], dtype=torch.int32, device=case.device),
            "k_norm": norm(16),
            "v_norm": norm(16),
            "bias": case.random(6 * 16),
        },
        "heads in groups": {
            "order": torch.tensor([0, 1, 4, 5, 2, 6, 3, 7], dtype=torch.int32, device=case.device),
            "bias": case.random(8 * 16),
            "clip": 0.4,
        },
        "norms last": {"q_norm": norm(16), "k_norm": norm(16), "norms_last": True},
        "bare norms last": {"q_norm": Norm(None, 1e-5), "k_norm": Norm(None, 1e-5), "norms_last": True},
        "queries alone": {"kv_heads": 0, "q_norm": norm(16), "bias": case.random(4 * 16)},
        # In two launches:
        "over all heads": {"q_norm": norm(64, rounds_first=False), "k_norm": norm(32), "whole_norms": True},
        "layer norms": {f"{part}_norm": case.layer_norm(16) for part in "qk"},
        "layer norms over all heads": {
            "q_norm": case.layer_norm(64), "k_norm": case.layer_norm(32), "whole_norms": True, "clip": 0.7,
        },
        "a layer norm per head": {
            "q_norm": norm(4, 16, centered=True, rounds_first=False),
            "k_norm": norm(2, 16, centered=True, bias=case.random(2, 16)),
            "bias": case.random(8 * 16),
        },
        "bare layer norms, an order": {
            "q_norm": Norm(None, 1e-5, centered=True),
            "v_norm": Norm(None, 1e-5, bias=case.random(16)),
            "order": torch.tensor([0, 1, 4, 5, 2, 6, 2, 6], dtype=torch.int32, device=case.device),
            "sources": 7,
        },
        "rounded differently": {"q_norm": norm(16, rounds_first=False), "k_norm": norm(16)},
        "layer norms of queries alone": {"kv_heads": 0, "q_norm": case.layer_norm(16), "interleaved": True},
    }[name]  # fmt: skip
    return {**rotation, **fields}


FUSED = [
    "no rope", "a part", "interleaved", "an interleaved part", "scaled", "q norm alone", "k norm alone",
    "different eps", "Gemma 3", "offset, rounded first", "Gemma 4", "values are keys", "heads in groups", "norms last",
    "bare norms last", "queries alone",
]  # fmt: skip
IN_TWO_LAUNCHES = [
    "over all heads", "layer norms", "layer norms over all heads", "a layer norm per head",
    "bare layer norms, an order", "rounded differently", "layer norms of queries alone",
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*FUSED, *IN_TWO_LAUNCHES])
@pytest.mark.thinned(1, most=10)
def test_every_kind_of_projections(device: torch.device, dtype: torch.dtype, name: str) -> None:
    case = Case(device, dtype)
    changes = projections(name, case)
    case.check(**changes)
    changes = {key: value for key, value in changes.items() if key not in ("sources", "kv_heads")}
    assert Projections(4, 2, 16, **changes).needs_norm_heads == (name in IN_TWO_LAUNCHES)


@pytest.mark.parametrize("dim", [6, 40, 512])
@pytest.mark.thinned(1, most=1)
def test_head_widths(device: torch.device, dim: int) -> None:
    case = Case(device, torch.float32, 3, 1, dim)
    case.check(**case.rotation(dim // 2), q_norm=case.norm(dim))
    case.check(**case.rotation(1), k_norm=case.layer_norm(dim))


@pytest.mark.parametrize("name", ["Gemma 4", "over all heads", "layer norms"])
def test_a_row_does_not_depend_on_the_others(device: torch.device, name: str) -> None:
    """The bits of one sequence's rows are the same alone and in the batch."""
    case = Case(device, torch.float16)
    given, qkv = Projections(4, 2, 16, **projections(name, case)), case.random(16, 8 * 16)
    together = case.results(heads, qkv, given, case.rows)
    rows = rows_of(case.parts[1:], case.tables, (1, 16), slots=[1])
    alone = case.results(heads, qkv[2:], given, rows)
    assert torch.equal(alone[0], together[0][2:4])
    for found, expected in zip(alone[1:], together[1:], strict=True):
        for page in case.tables[1, :2].tolist():
            assert torch.equal(found[page], expected[page])
            assert bool((found[page] != 0).any())
