"""Norm, rotary write, gate, K/V move and top-8 against their twins."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from marks import slow_interpreted

from lookahead.algorithm.tree import visibility
from lookahead.backends.graph.kernels import fused, reference, top

DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=[] if torch.cuda.is_available() else pytest.mark.skip("needs CUDA")),
]


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within two roundings of the dtype."""
    eps = torch.finfo(expected.dtype).eps
    return torch.allclose(found.double(), expected.double(), rtol=2 * eps, atol=4 * eps)


@pytest.mark.parametrize(("batch", "count"), [(1, 1), (1, 33), (3, 16), (2, 64), (1, 130)])
def test_place_nodes(device: torch.device, batch: int, count: int) -> None:
    """Random trees, chains and nodes that are left over, against `tree.packed_visibility`."""
    rng = random.Random(count)
    trees = [[-1, *(rng.randrange(max(0, i - 9), i) for i in range(1, count))] for _ in range(batch)]
    trees[-1] = [*range(-1, count // 2 - 1), *[-1] * (count - count // 2)]
    parents = torch.tensor(trees, dtype=torch.int32, device=device)
    lengths = torch.tensor([7 + 100 * entry for entry in range(batch)], dtype=torch.int32, device=device)
    words = (count + 31) // 32
    found = []
    for module in (fused, reference):
        positions, bits = (
            torch.full((batch, count, *rest), -77, dtype=torch.int32, device=device) for rest in ((), (words,))
        )
        module.place_nodes(parents, lengths, positions, bits)
        found.append((positions.cpu(), bits.cpu()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    for entry, tree in enumerate(trees):
        depths: list[int] = []
        for parent in tree:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        assert found[0][0][entry].tolist() == [int(lengths[entry]) + depth for depth in depths]
        seen = [
            sum((int(word) & 0xFFFFFFFF) << 32 * place for place, word in enumerate(line))
            for line in found[0][1][entry]
        ]
        assert seen == visibility(tree)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 576), (3, 100)])
@pytest.mark.parametrize("with_delta", [False, True])
def test_add_norm(device: torch.device, dtype: torch.dtype, rows: int, width: int, with_delta: bool) -> None:
    torch.manual_seed(0)
    stream, delta, weight = (torch.randn(*s).to(device, dtype) for s in ((rows, width), (rows, width), (width,)))
    given = delta if with_delta else None
    streams, outs = [stream.clone(), stream.clone()], []
    for module, x in zip((fused, reference), streams, strict=True):
        outs.append(module.add_norm(x, given, weight, torch.full_like(stream, float("nan")), 1e-5))
    assert close(*outs)
    assert torch.equal(*streams)
    assert torch.equal(streams[0], stream) != with_delta


def test_add_norm_of_some_rows(device: torch.device) -> None:
    """The last norm reads only the rows whose logits are needed, in their order, and leaves the stream alone."""
    torch.manual_seed(0)
    stream, delta, weight = (torch.randn(*s, device=device) for s in ((7, 96), (7, 96), (96,)))
    rows = torch.tensor([6, 0, 0, 3], dtype=torch.int32, device=device)
    before = stream.clone()
    outs = [
        m.add_norm(stream, delta, weight, torch.empty(4, 96, device=device), 1e-5, rows) for m in (fused, reference)
    ]
    assert close(*outs)
    assert torch.equal(stream, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 80), (2, 1, 128)])
@pytest.mark.parametrize("extras", ["none", "bias", "norms"])
def test_rotate_write(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, extras: str
) -> None:
    torch.manual_seed(0)
    batch, count, capacity, lanes = 2, 5, 40, 3
    whole = {"dtype": torch.int32, "device": device}
    angle = torch.rand(64, dim // 2, device=device) * 6
    options: dict[str, Any] = {
        "qkv": torch.randn(16, (heads + 2 * kv_heads) * dim).to(device, dtype),
        "bias": torch.randn((heads + 2 * kv_heads) * dim).to(device, dtype) if extras == "bias" else None,
        "norms": torch.randn(2, dim).to(device, dtype) if extras == "norms" else None,
        "cosine": angle.cos(),
        "sine": angle.sin(),
        "lanes": torch.tensor([2, 0], **whole),
        "lengths": torch.tensor([7, 30], **whole),
        "positions": torch.randint(0, 60, (batch, count)).to(**whole),
    }
    results = []
    for module in (fused, reference):
        q = torch.zeros(batch, count, heads, dim, dtype=dtype, device=device)
        keys = torch.zeros(lanes, kv_heads, capacity, dim, dtype=dtype, device=device)
        values = torch.zeros_like(keys)
        module.rotate_write(**options, q=q, keys=keys, values=values)
        results.append((q, keys, values))
    for found, expected in zip(*results, strict=True):
        assert close(found, expected)
        assert bool((expected != 0).any())
    assert not results[0][1][1].any()  # the lane between belongs to someone else


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 2 * 300).to(device, dtype)
    outs = [m.gate(x, torch.empty(5, 300, dtype=dtype, device=device)) for m in (fused, reference)]
    assert close(*outs)


def test_move_accepted_moves_the_path_next_to_the_prefix(device: torch.device) -> None:
    torch.manual_seed(0)
    cache = torch.randn(2, 2, 4, 3, 50, 16, device=device)
    whole = {"dtype": torch.int32, "device": device}
    paths = torch.tensor([[1, 2, 5, 9], [3, 0, 0, 0], [0, 0, 0, 0]], **whole)
    places = [torch.tensor(x, **whole) for x in ([3, 0, 2], [20, 7, 11])]
    counts = torch.tensor([4, 1, 0], **whole)
    caches = [cache.clone(), cache.clone()]
    for module, x in zip((fused, reference), caches, strict=True):
        module.move_accepted(x, *places, paths, counts)
    assert torch.equal(*caches)
    assert torch.equal(caches[0][:, :, 3, :, 21:25], cache[:, :, 3, :, [21, 22, 25, 29]])
    assert torch.equal(caches[0][:, :, 0, :, 8], cache[:, :, 0, :, 10])
    assert torch.equal(caches[0][:, :, 2], cache[:, :, 2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [8, 120, slow_interpreted(4096), slow_interpreted(9001)])
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
    places = sorted(random.Random(0).sample(range(9000), 8))
    logits[1, places] = 5.0
    out = torch.zeros(2, 17, dtype=torch.int32, device=device)
    top.top_tokens(logits, out, top.TopWork(2, 9000, 8, device))
    assert out[0, :9].tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7]
    assert out[1, 1:9].tolist() == places


def test_embed(device: torch.device) -> None:
    table = torch.randn(50, 100, device=device)
    tokens = torch.tensor([3, 49, 0, 3], dtype=torch.int32, device=device)
    outs = [m.embed(table, tokens, torch.full((4, 100), float("nan"), device=device)) for m in (fused, reference)]
    assert torch.equal(*outs)


@pytest.mark.parametrize("size", [1, 512, 1300])
def test_copy_pinned(device: torch.device, size: int) -> None:
    """To the device and back, from and to pinned memory where there is a device."""
    host = torch.arange(size, dtype=torch.int32)
    back = torch.full((size,), -1, dtype=torch.int32)
    if device.type == "cuda":
        host, back = host.pin_memory(), back.pin_memory()
    there = torch.full((size + 1,), -1, dtype=torch.int32, device=device)
    fused.copy_pinned(host, there[:size])
    fused.copy_pinned(there[:size], back)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(back, host)
    assert there[size] == -1
