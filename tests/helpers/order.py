"""The order in which files are dealt out to processes: those that take longest first, so that none is left to the end.

xdist's own order is by the number of tests, and the longest files have few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LONGEST = (
    "parallel/test_model.py",
    "backends/graph/test_graph.py",
    "serve/test_web_page.py",
    "backends/graph/kernels/test_attention.py",
    "transformers_hook/test_graph_backend.py",
    "test_generate.py",
    "serve/test_fronts.py",
    "serve/test_grammar_limits.py",
    "backends/graph/test_graph_states.py",
    "backends/graph/test_graph_layers.py",
    "backends/graph/test_ahead.py",
    "algorithm/native/test_twins.py",
    "backends/cpu/test_cpu.py",
    "backends/test_adjusted.py",
    "models/test_reference.py",
    "bench/test_inflate_hybrids.py",
    "algorithm/test_reference.py",
    "backends/graph/kernels/test_draw.py",
    "loading/test_formats.py",
    "loading/test_embedded.py",
    "bench/test_bench_runner.py",
    "bench/test_bench_cli.py",
    "backends/eager/test_eager.py",
    "backends/graph/test_graph_interpreted.py",
    "backends/graph/test_graph_quantised.py",
    "backends/graph/kernels/test_recurrent_kernels.py",
    "backends/graph/kernels/test_expert_products.py",
    "transformers_hook/test_outputs.py",
    "transformers_hook/test_stops.py",
    "transformers_hook/test_processors.py",
    "transformers_hook/test_patches.py",
    "transformers_hook/test_adapters.py",
    "transformers_hook/test_sampling.py",
    "transformers_hook/test_batches.py",
    "algorithm/native/test_native_choose.py",
    "serve/test_life.py",
    "serve/test_chat.py",
    "serve/test_web_looks.py",
    "serve/test_web_export.py",
    "bench/test_gpu_check.py",
    "test_cli.py",
    "loading/test_bigrams.py",
    "loading/test_quantised_experts.py",
    "backends/cpu/test_screen.py",
    "backends/cpu/test_cpu_knobs.py",
    "backends/graph/test_device_memory.py",
    "backends/test_exact.py",
    "parallel/test_backend.py",
    "parallel/test_watchdog.py",
    "serve/ray/test_ray_failover.py",
    "serve/test_keys.py",
    "serve/test_device_lost.py",
    "serve/test_slow_clients.py",
    "transformers_hook/test_recurrent_graph.py",
    "engine/test_identity.py",
)
"""By the time of their quick tests. Behind them come the others by the number of their tests."""


def longest_first(items: list[pytest.Item]) -> None:
    """Sort the tests by their files, which stay whole."""
    counts = Counter(item.path for item in items)
    rank = {TESTS / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (rank.get(item.path, len(rank)), -counts[item.path], str(item.path)))


def drop(items: list[pytest.Item], unwanted: Sequence[pytest.Item], config: pytest.Config) -> None:
    """As `-m` does with what it does not choose."""
    if unwanted:
        gone = set(map(id, unwanted))
        items[:] = [item for item in items if id(item) not in gone]
        config.hook.pytest_deselected(items=unwanted)
