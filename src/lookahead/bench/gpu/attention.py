"""attention: the kernel against SDPA with a dense mask, and against the device's copy bandwidth. Needs triton, CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from lookahead.algorithm.tree import packed_visibility
from lookahead.backends.graph.kernels import attention, depths, tiles
from lookahead.bench.gpu.timing import graphed, median_ms, tree_of

HEADS = ((64, 64, 64), (32, 32, 128), (32, 8, 128))
"""(heads, K/V heads, dimension)."""
COUNTS, CONTEXTS = (1, 121), (1024, 2048, 16384)
CACHED = 2e8
"""Bytes of K/V that are read in turn, so that none of it is in the device's own cache."""


def attention_records() -> Iterator[dict[str, Any]]:
    """Kernel, SDPA with a dense mask over the live prefix, and the floor: K/V read once at copy bandwidth."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() * 4 / median_ms(lambda: target.copy_(source)) * 1e3
    for heads, kv_heads, dim in HEADS:
        for count in COUNTS:
            for context in CONTEXTS:
                yield from _case(heads, kv_heads, dim, count, context, bandwidth)


def _case(heads: int, kv_heads: int, dim: int, count: int, context: int, bandwidth: float) -> Iterator[dict[str, Any]]:
    device, dtype = torch.device("cuda"), torch.bfloat16
    integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
    capacity = context + 512
    sets = max(2, int(CACHED // (2 * kv_heads * capacity * dim * 2)) + 1)
    caches = [torch.randn(2, 1, kv_heads, capacity, dim, device=device, dtype=dtype) for _ in range(sets)]
    q = torch.randn(1, count, heads, dim, device=device, dtype=dtype)
    tree = tree_of(count)
    bits = torch.from_numpy(packed_visibility(tree.parents).view("<i4").copy())[None].to(device)
    places: dict[str, Any] = {
        "lanes": torch.zeros(1, **integers),
        "lengths": torch.tensor([context], **integers),
        "positions": torch.tensor([[context + d for d in tree.depths]], **integers),
        "bits": bits,
    }
    out, work, scale = torch.empty_like(q), attention.Workspace(device), dim**-0.5

    def ours(cut: Any, order: Any) -> None:
        for keys, values in caches:
            attention.attend(q, keys, values, **places, out=out, work=work, scale=scale, tiles=cut, order=order)

    node = torch.arange(count, device=device)
    seen = (bits[0][:, node // 32] >> (node % 32)) & 1 == 1
    mask = torch.zeros(1, 1, count, (context + count + 15) // 16 * 16, device=device, dtype=dtype)
    mask = mask[..., : context + count]
    mask[0, 0, :, context:].masked_fill_(~seen, float("-inf"))
    query, grouped = q.transpose(1, 2), heads != kv_heads

    def dense() -> None:
        for keys, values in caches:
            k, v = keys[:, :, : context + count], values[:, :, : context + count]
            torch.nn.functional.scaled_dot_product_attention(
                query, k, v, attn_mask=mask, enable_gqa=grouped, scale=scale
            )

    sdpa = median_ms(graphed(dense), repeats=10) / sets * 1e3
    floor = 2 * kv_heads * (context + count) * dim * 2 / bandwidth * 1e6
    for invariant in (True, False):
        cut, order = tiles.tiles_for(1, count, heads, kv_heads, dim), None
        if invariant:  # the tree's nodes by depth, once for all layers
            cut, group = tiles.invariant_tiles(count, heads, kv_heads, dim), heads // kv_heads
            order = depths.new_order(1, count, cut, group, device)
            depths.order_by_depth(places["positions"], places["lengths"], bits, order, cut, group)
        us = median_ms(graphed(partial(ours, cut, order)), repeats=10) / sets * 1e3
        yield {
            "heads": heads, "kv_heads": kv_heads, "dim": dim, "K": count, "context": context, "invariant": invariant,
            "us": round(us, 1), "sdpa_us": round(sdpa, 1), "speedup": round(sdpa / us, 2),
            "of_copy_bandwidth": round(floor / us, 2), "copy_tb_s": round(bandwidth / 1e12, 2),
        }  # fmt: skip
