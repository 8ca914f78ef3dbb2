"""The K/V buffer of the eager and the CPU backend: it grows with what is asked, and is made smaller afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import greedy, root, tiny

from lookahead.backends import batched
from lookahead.backends.eager.backend import EagerBackend

LONG = [5 + i % 40 for i in range(2000)]


def eager_backend(model: Any) -> Any:
    return EagerBackend(model, probed=False)


def cpu_backend(model: Any) -> Any:
    pytest.importorskip("onnxruntime")
    from lookahead.backends.cpu.backend import CpuBackend

    return CpuBackend(model, probed=False)


MAKERS: dict[str, Callable[[Any], Any]] = {"eager": eager_backend, "cpu": cpu_backend}


@pytest.fixture(params=MAKERS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny model's, of whose K/V a few kilobytes are many."""
    monkeypatch.setattr(batched, "KEPT_BYTES", 1 << 18)
    return MAKERS[request.param](tiny("Llama", seed=0, max_position_embeddings=4096))


def held(backend: Any) -> int:
    """Bytes of K/V memory."""
    buffer = backend._buffer
    return sum(t.nbytes for t in (buffer.tensors() if hasattr(buffer, "tensors") else (*buffer.keys, *buffer.values)))


def cache(backend: Any, tokens: list[int]) -> int:
    """A slot with these tokens in the cache."""
    slot = backend.open()
    backend.step([greedy(slot, tokens[:-1], root(tokens[-1]))])
    backend.commit([(slot, ())])
    return int(slot)


def target(backend: Any, slot: int) -> int:
    output = backend.step([greedy(slot, (), root(7))])[0]
    backend.commit([(slot, ())])
    return int(output.targets[0])


def test_memory_of_a_long_sequence_is_freed(backend: Any) -> None:
    """With what else runs as it is: it may be at another index then, in smaller memory."""
    short = LONG[:20]
    alone = cache(backend, short)
    expected = target(backend, alone)
    backend.close(alone)
    long, others = cache(backend, LONG), [cache(backend, short) for _ in range(3)]
    peak = held(backend)
    backend.close(long)
    assert held(backend) < peak / 8
    assert [target(backend, slot) for slot in others] == [expected] * 3
    for slot in others:
        backend.close(slot)
    assert held(backend) <= batched.KEPT_BYTES
    assert target(backend, cache(backend, short)) == expected


def test_many_sequences_do_not_make_a_long_one_wider(backend: Any) -> None:
    """Memory is sequences times the longest; those of the past do not count."""
    slots = [cache(backend, LONG[:200]) for _ in range(24)]
    for slot in slots:
        backend.close(slot)
    slot = cache(backend, LONG)
    peak = held(backend)
    backend.close(slot)
    slot = cache(backend, LONG)
    assert held(backend) <= peak
    assert peak < 24 * held(backend) / 8
    backend.close(slot)


def test_a_long_sequence_does_not_make_many_longer(backend: Any) -> None:
    """The length of one that has ended, times those that run now, would be the most memory of all."""
    slots = [cache(backend, LONG[:20]) for _ in range(24)]
    usual = held(backend)
    for slot in slots:
        backend.close(slot)
    backend.close(cache(backend, LONG))
    for _ in range(24):
        cache(backend, LONG[:20])
    assert held(backend) == usual


def test_kept_memory_is_little() -> None:
    """One block of 96 positions of the embedded model's K/V takes 6 MB."""
    assert batched.KEPT_BYTES <= 3 * 6 << 20


def test_a_little_memory_is_kept(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below KEPT_BYTES the next sequences find it."""
    monkeypatch.setattr(batched, "KEPT_BYTES", 1 << 30)
    slot = cache(backend, LONG)
    before = held(backend)
    backend.close(slot)
    assert held(backend) == before


def test_a_step_that_is_not_committed_keeps_its_memory(backend: Any) -> None:
    """Its K/V are behind the lengths that the buffer would be cut to."""
    long, short = cache(backend, LONG), cache(backend, LONG[:20])
    expected = target(backend, cache(backend, [*LONG[:20], 9]))
    output = backend.step([greedy(short, (), root(9))])
    assert output
    before = held(backend)
    backend.close(long)
    assert held(backend) == before
    backend.commit([(short, ())])
    assert target(backend, short) == expected


def test_what_is_excess() -> None:
    kept = batched.KEPT_BYTES
    assert not batched.is_excess(kept, 0)
    assert batched.is_excess(kept + 1, 0)
    assert not batched.is_excess(4 * kept, kept)
    assert batched.is_excess(4 * kept + 1, kept)


@pytest.mark.parametrize("name", MAKERS)
def test_memory_that_cannot_be_had_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = MAKERS[name](tiny("Llama", seed=0, max_position_embeddings=4096))
    slot = cache(backend, LONG[:20])
    expected = target(backend, slot)
    backend.close(slot)
    slot = cache(backend, LONG[:20])
    backend._buffer.reserve(1, 1)
    sizes = held(backend)

    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", fail)
        patch.setattr(torch.Tensor, "new_zeros", fail)
        with pytest.raises(RuntimeError, match="allocate memory"):
            backend._buffer.reserve(64, 4000)
    assert held(backend) == sizes
    assert target(backend, slot) == expected
