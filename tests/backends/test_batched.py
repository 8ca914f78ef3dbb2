"""The K/V buffer of the eager and the CPU backend: it grows with what is asked, and is made smaller afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import greedy, outputs, root, tiny

from lookahead import LookaheadConfig
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.backends import batched
from lookahead.backends.eager.backend import EagerBackend
from lookahead.config import StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request
from lookahead.machine import available_memory

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


@pytest.mark.thinned(1, most=1)
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


@pytest.mark.thinned(1, most=1)
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


@pytest.mark.thinned(1, most=1)
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


@pytest.mark.thinned(1, most=1)
def test_a_little_memory_is_kept(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below KEPT_BYTES the next sequences find it."""
    monkeypatch.setattr(batched, "KEPT_BYTES", 1 << 30)
    slot = cache(backend, LONG)
    before = held(backend)
    backend.close(slot)
    assert held(backend) == before


@pytest.mark.thinned(1, most=1)
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


@pytest.mark.thinned(1, most=1)
def test_bytes_are_those_of_the_buffer(backend: Any) -> None:
    for sequences, tokens in ((1, 10), (3, 300), (5, 1000)):
        backend._buffer.reserve(0, 0)
        made = MAKERS["eager" if isinstance(backend, EagerBackend) else "cpu"](backend.model)
        slots = [cache(made, LONG[:20]) for _ in range(sequences - 1)] + [cache(made, LONG[:tokens])]
        assert len(slots) == sequences
        assert made._buffer.bytes_for(sequences, tokens) <= held(made)
        made._buffer.shrink(sequences, tokens)
        assert held(made) <= 2 * made._buffer.bytes_for(sequences, tokens)


@pytest.mark.thinned(1, most=1)
def test_sequences_wait_or_are_preempted_beyond_a_limit(backend: Any) -> None:
    """Texts are those without a limit, and memory stays within it, but for a single long sequence."""
    prompts, config = [LONG[:40], LONG[3:9], LONG[7:500], LONG[2:30]], LookaheadConfig(window=2, ngram=3, budget=12)
    expected = outputs(backend, prompts, config)
    fresh = MAKERS["eager" if isinstance(backend, EagerBackend) else "cpu"](backend.model)
    fresh.most_bytes = fresh._buffer.bytes_for(1, 560)
    assert outputs(fresh, prompts, config) == expected
    most, rules = list[int](), StopRules(24, frozenset(), fresh.max_length)
    engine = Engine(fresh)
    for prompt in prompts:
        engine.submit(Request(DecodingSequence(prompt, config, None, rules)))
    together = 0
    while engine.running:
        engine.step()
        most.append(held(fresh))
        together = max(together, len(fresh._index))
    assert max(most) <= 2 * fresh.most_bytes
    assert together >= 2  # the short ones run together
    assert held(fresh) <= fresh.most_bytes


def test_a_limit_comes_from_the_free_memory(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend.prepare(100, 8)
    assert backend.most_bytes is None  # a single sequence needs none
    monkeypatch.setattr(batched, "available_memory", lambda: 3000)
    backend.prepare(100, 8, sequences=4)
    assert backend.most_bytes == 1000
    slot, other = backend.open(), backend.open()
    assert not backend.reserve(slot, 5000)
    backend.close(other)
    assert backend.reserve(slot, 5000)
    assert (available_memory() or 1) > 0
