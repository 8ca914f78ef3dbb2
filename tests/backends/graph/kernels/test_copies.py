"""K/V move, packets and top-8 against their twins."""

from __future__ import annotations

import random

import pytest
import torch
from marks import slow_interpreted
from rounding import DTYPES

from lookahead.backends.graph.kernels import copies, reference, top


@pytest.mark.parametrize("sequences", [1, 3, 20])
def test_move_accepted(device: torch.device, sequences: int) -> None:
    """Each sequence's moves are made in their order, within pages and across them; what is not counted stays."""
    torch.manual_seed(0)
    pages = 2 * sequences + 1
    cache = torch.randn(2, 2, pages, 3, 64, 16, device=device)
    expected, commits, moves = cache.clone(), list[int](), list[int]()
    for number in range(sequences):
        path, root = [1, 2, 5, 9][: 4 - number % 3], 55 + number % 8
        first = 1 + 2 * number
        commits += [len(moves) // 2, len(path)]
        for place, node in enumerate(path, start=1):
            source, target = (64 * (first + at // 64) + at % 64 for at in (root + node, root + place))
            moves += [source, target]
            expected[:, :, target // 64, :, target % 64] = cache[:, :, source // 64, :, source % 64]
    assert not torch.equal(expected, cache)
    whole = {"dtype": torch.int32, "device": device}
    counts = torch.tensor([7, sequences], **whole)
    lists = [torch.tensor([*numbers, *[3] * 20], **whole).view(-1, 2) for numbers in (commits, moves)]
    for module in (copies, reference):
        found = cache.clone()
        module.move_accepted(found, counts, *lists)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [8, 120, slow_interpreted(4096), slow_interpreted(9001)])
@pytest.mark.thinned(1, most=2)
def test_top_tokens(device: torch.device, dtype: torch.dtype, vocabulary: int) -> None:
    torch.manual_seed(vocabulary)
    logits = (3 * torch.randn(6, vocabulary)).to(device, dtype)
    outs = []
    for out in (torch.full((6, 17), -1, dtype=torch.int32, device=device) for _ in range(2)):
        outs.append(out)
    top.top_tokens(logits, outs[0], top.TopWork(6, vocabulary, 8, device))
    reference.top_tokens(logits, outs[1])
    assert torch.equal(outs[0][:, 0], outs[1][:, 0])
    # Equal logits may come in either order from torch.topk; the values must agree.
    values = [logits.gather(1, out[:, 1:9].long()) for out in outs]
    assert torch.equal(*values)
    assert (outs[0][:, 9:] - outs[1][:, 9:]).abs().max() <= 1


def test_of_equal_logits_the_lower_id_comes_first(device: torch.device) -> None:
    """As argmax has it, also across pieces of the vocabulary."""
    logits = torch.zeros(2, 9000, device=device)
    indices = sorted(random.Random(0).sample(range(9000), 8))
    logits[1, indices] = 5.0
    out = torch.zeros(2, 17, dtype=torch.int32, device=device)
    top.top_tokens(logits, out, top.TopWork(2, 9000, 8, device))
    assert out[0, :9].tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7]
    assert out[1, 1:9].tolist() == indices


@pytest.mark.parametrize("size", [1, 512, 1300])
def test_copy_pinned(device: torch.device, size: int) -> None:
    """To the device and back, from and to pinned memory where there is a device."""
    host = torch.arange(size, dtype=torch.int32)
    back = torch.full((size,), -1, dtype=torch.int32)
    if device.type == "cuda":
        host, back = host.pin_memory(), back.pin_memory()
    there = torch.full((size + 1,), -1, dtype=torch.int32, device=device)
    copies.copy_pinned(host, there[:size])
    copies.copy_pinned(there[:size], back)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(back, host)
    assert there[size] == -1


@pytest.mark.parametrize(("size", "room", "changed"), [(20, 4, 0), (20, 4, 3), (1300, 600, 1), (1300, 600, 600)])
def test_copy_packet(device: torch.device, size: int, room: int, changed: int) -> None:
    """The packet is on the device, and the page tables have the first `changed` of its changes, and no other."""
    generator = torch.Generator().manual_seed(size + changed)
    host = torch.randint(0, 1000, (size,), generator=generator, dtype=torch.int32)
    start = size - 2 * room
    host[start - 1] = changed
    host[start::2] = torch.randperm(3 * 7 * 40, generator=generator)[:room].to(torch.int32)
    host = host.pin_memory() if device.type == "cuda" else host
    found = []
    for module in (copies, reference):
        there = torch.full((size + 1,), -1, dtype=torch.int32, device=device)
        tables = torch.full((3, 7, 40), -1, dtype=torch.int32, device=device)
        module.copy_packet(host, there[:size], host[start - 1 : start], host[start:].view(room, 2), tables)
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(there[:size].cpu(), host)
        assert there[size] == -1
        assert int((tables >= 0).sum()) == changed
        found.append(tables)
    assert torch.equal(*found)
    for index, page in host[start:].view(room, 2)[:changed].tolist():
        assert found[0].view(-1)[index] == page
