"""attention: the kernel against SDPA with a dense mask, and against the device's copy bandwidth."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import triton

from gpu_parts.bench import Bench
from gpu_parts.measure import graphed, median_ms, tree_of
from lookahead.algorithm.tree import packed_visibility
from lookahead.backends.graph.kernels import attention, depths, tiles

DEVICE = torch.device("cuda")
SWEEP = [
    (block_m, block_n, warps, stages)
    for block_m in (16, 64, 128)
    for block_n in (64, 128)
    for warps, stages in ((4, 3), (4, 4), (8, 2), (8, 3))
]


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.randn(1 << 28, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / median_ms(lambda: target.copy_(source)) * 1e3


def attention_part(bench: Bench) -> None:
    """Kernel, SDPA with a dense mask over the live prefix, and the floor: K/V read once at copy bandwidth."""
    bandwidth = copy_bandwidth()
    for heads, kv_heads, dim in ((64, 64, 64), (32, 32, 128), (32, 8, 128)):
        for count in (1, 121):
            for context in (1024, 2048, 16384):
                for row in case(heads, kv_heads, dim, count, context, bandwidth, bench.args.sweep):
                    bench.add(row)


def case(
    heads: int, kv_heads: int, dim: int, count: int, context: int, bandwidth: float, sweep: bool
) -> Iterator[dict[str, Any]]:
    """One row for the invariant cut and one for the other."""
    capacity = context + 512
    sets = max(2, int(2e8 // (2 * kv_heads * capacity * dim * 2)) + 1)  # more than the cache holds
    dtype, whole = torch.bfloat16, {"dtype": torch.int32, "device": DEVICE}
    caches = [torch.randn(2, 1, kv_heads, capacity, dim, device=DEVICE, dtype=dtype) for _ in range(sets)]
    q = torch.randn(1, count, heads, dim, device=DEVICE, dtype=dtype)
    tree = tree_of(count)
    bits = torch.from_numpy(packed_visibility(tree.parents).view("<i4").copy())[None].to(DEVICE)
    places = {
        "lanes": torch.zeros(1, **whole),
        "lengths": torch.tensor([context], **whole),
        "positions": torch.tensor([[context + d for d in tree.depths]], **whole),
        "bits": bits,
    }
    out, work, scale = torch.empty_like(q), attention.Workspace(DEVICE), dim**-0.5

    def timed(**options: Any) -> float:
        def run() -> None:
            for keys, values in caches:
                attention.attend(q, keys, values, **places, out=out, work=work, scale=scale, **options)

        return median_ms(graphed(run), 10) / sets * 1e3

    tried = {}
    for block_m, block_n, warps, stages in SWEEP if sweep and (heads, dim) == (64, 64) else ():
        if (block_m == 16) == (count == 1):
            for splits in (1, 2, 4) if count > 1 else (2, 4, 8):
                cut = tiles.Tiles(block_m, block_n, splits, warps, stages)
                with contextlib.suppress(triton.runtime.errors.OutOfResources):
                    tried[f"{block_m}x{block_n}/{splits}/{warps}/{stages}"] = timed(tiles=cut)
    node = torch.arange(count, device=DEVICE)
    seen = (bits[0][:, node // 32] >> (node % 32)) & 1 == 1
    mask = torch.zeros(1, 1, count, (context + count + 15) // 16 * 16, device=DEVICE, dtype=dtype)
    mask = mask[..., : context + count]
    mask[0, 0, :, context:].masked_fill_(~seen, float("-inf"))
    query = q.transpose(1, 2)

    def dense() -> None:
        for keys, values in caches:
            k, v = keys[:, :, : context + count], values[:, :, : context + count]
            torch.nn.functional.scaled_dot_product_attention(
                query, k, v, attn_mask=mask, enable_gqa=heads != kv_heads, scale=scale
            )

    sdpa = median_ms(graphed(dense), 10) / sets * 1e3
    best = sorted(tried.items(), key=lambda one: one[1])
    floor = 2 * kv_heads * (context + count) * dim * 2 / bandwidth * 1e6
    for invariant in (True, False):
        cut, order = tiles.tiles_for(1, count, heads, kv_heads, dim), None
        if invariant:  # the trees' nodes by depth, once for all layers
            cut, group = tiles.invariant_tiles(count, heads, kv_heads, dim), heads // kv_heads
            order = depths.new_order(1, count, cut, group, DEVICE)
            depths.order_by_depth(places["positions"], places["lengths"], bits, order, cut, group)
        ours = timed(tiles=cut, order=order)
        yield {
            "heads": heads, "kv_heads": kv_heads, "dim": dim, "K": count, "context": context, "invariant": invariant,
            "us": round(ours, 1),
            "tiles": f"{cut.block_m}x{cut.block_n}/{cut.splits}/{cut.warps}/{cut.stages}",
            "best": {name: round(us, 1) for name, us in best[:5]},
            "sdpa_us": round(sdpa, 1), "speedup": round(sdpa / ours, 2), "of_copy_bandwidth": round(floor / ours, 2),
            "copy_tb_s": round(bandwidth / 1e12, 2),
        }  # fmt: skip
