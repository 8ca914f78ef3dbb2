"""The eager backend: what it refuses and why, its K/V buffer, which rows it computes, and masks of every kind."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from marks import slow_but
from tiny import PROMPTS, TINY, greedy, root, run, tiny
from torch import nn

from lookahead import LookaheadConfig
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.eager import backend as eager
from lookahead.backends.eager import kv
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.eager.kv import BLOCK, KVBuffer
from lookahead.backends.probe import probe
from lookahead.config import StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request
from lookahead.models.facts import UnsupportedModelError

Plain = Callable[[Any, Sequence[int], int], list[int]]


def decode(
    backend: EagerBackend, prompts: Sequence[Sequence[int]], settings: LookaheadConfig, count: int = 24
) -> list[list[int]]:
    """Greedy outputs of all prompts in one batch."""
    sequences = run(backend, prompts, settings, count)
    assert sum(s.stats.steps for s in sequences) < count * len(sequences)  # blocks were accepted
    return [sequence.output for sequence in sequences]


def chain(*tokens: int, rows: Sequence[int] | None = None) -> TokenTree:
    """A root and guesses behind each other."""
    size = len(tokens)
    needed = list(range(size)) if rows is None else list(rows)
    return TokenTree(list(tokens), list(range(-1, size - 1)), list(range(size)), needed)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("Llama", stirred=False)


# Refusals


def test_refuses_an_encoder_decoder() -> None:
    config = transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModelError, match=r"model type 't5' .* encoder-decoder"):
        EagerBackend(transformers.T5ForConditionalGeneration(config).eval())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Mamba", {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}),
        ("Rwkv", {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "attention_hidden_size": 16}),
    ],
)
def test_refuses_a_recurrent_state(kind: str, changes: dict[str, Any]) -> None:
    config = getattr(transformers, f"{kind}Config")(**changes)
    with pytest.raises(UnsupportedModelError, match=rf"model type '{kind.lower()}' .* recurrent state"):
        EagerBackend(getattr(transformers, f"{kind}ForCausalLM")(config).eval())


def test_refuses_attention_without_a_mask(llama: Any) -> None:
    model = copy.deepcopy(llama)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match=r"'llama' .* 'flash_attention_2' .* attn_implementation='sdpa'"):
        EagerBackend(model)


def test_refuses_layers_it_does_not_know(llama: Any) -> None:
    model = copy.deepcopy(llama)
    model.config.layer_types = ["full_attention", "indexed_attention"]
    with pytest.raises(UnsupportedModelError, match=r"'llama' .* indexed_attention layers"):
        EagerBackend(model)


class Wrapper(nn.Module):
    """A model that leaves out one argument of its forward pass."""

    def __init__(self, model: Any, dropped: str) -> None:
        super().__init__()
        self.model, self.dropped = model, dropped
        self.config, self.dtype = model.config, model.dtype

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def forward(self, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is not None:
            kwargs.pop(self.dropped, None)
        return self.model(**kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropped", ["attention_mask", "position_ids"])
def test_the_probe_catches_a_model_that_ignores(llama: Any, dropped: str, dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedModelError, match=r"model type 'llama' .* does not follow the mask or the positions"):
        EagerBackend(Wrapper(copy.deepcopy(llama).to(dtype), dropped))


@pytest.mark.parametrize(
    ("trees", "rows", "error"),
    [(0.15, 0.15, None), (0.5, 0.5, r"relative error 0\.5"), (0.15, 0.0, r"relative error 0\.1")],
)
def test_in_half_precision_kernels_may_differ_but_not_trees(
    llama: Any, trees: float, rows: float, error: str | None
) -> None:
    """The same error in every logit of the backend's is taken for other kernels, unless it is large; an error of the
    tree alone is a broken mask."""

    class Rounded(EagerBackend):
        def step(self, inputs: Any) -> Any:
            results = super().step(inputs)
            for item, result in zip(inputs, results, strict=True):
                if result.logits is not None:
                    result.logits = result.logits * (1 + (trees if len(item.tree) > 1 else rows))
            return results

    backend = Rounded(copy.deepcopy(llama).to(torch.bfloat16), probed=False)
    if error is None:
        probe(backend)
    else:
        with pytest.raises(UnsupportedModelError, match=error):
            probe(backend)


def test_the_probe_passes_the_same_wrapper_when_it_drops_nothing(
    llama: Any, settings: LookaheadConfig, plain: Plain
) -> None:
    """A forward without `logits_to_keep` in its signature: the rows are picked afterwards."""
    backend = EagerBackend(Wrapper(llama, "nothing"))
    assert decode(backend, PROMPTS, settings) == [plain(llama, p, 24) for p in PROMPTS]


def test_the_probe_catches_a_model_without_a_cache(llama: Any) -> None:
    class Cacheless(Wrapper):
        def forward(self, **kwargs: Any) -> Any:
            return self.model(**{**kwargs, "use_cache": False, "past_key_values": None})

    with pytest.raises(UnsupportedModelError, match=r"'llama' .* returns no K/V cache"):
        EagerBackend(Cacheless(llama, "nothing"))


def exact_or_refused(model: Any, settings: LookaheadConfig, plain: Plain) -> None:
    """A model may be refused, or its context cut short; other tokens than its own are never right."""
    try:
        backend = EagerBackend(model)
    except UnsupportedModelError:
        return
    output = decode(backend, PROMPTS[:1], settings)[0]
    assert output == plain(model, PROMPTS[0], 24)[: len(output)]


def test_gpt_neo_is_exact_or_refused(settings: LookaheadConfig, plain: Plain) -> None:
    torch.manual_seed(1)
    fields = {k: TINY[k] for k in ("vocab_size", "hidden_size", "max_position_embeddings", "initializer_range")}
    config = transformers.GPTNeoConfig(
        **fields, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=8,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    exact_or_refused(transformers.GPTNeoForCausalLM(config).eval(), settings, plain)


@pytest.mark.parametrize("kind", ["Llama", "Phi3"])
def test_longrope_is_exact_or_refused(settings: LookaheadConfig, plain: Plain, kind: str) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 16,
        "factor": 16.0,
    }
    model = tiny(kind, rope_parameters=rope, original_max_position_embeddings=16)
    exact_or_refused(model, settings, plain)


def test_the_probe_gives_its_slot_back(llama: Any) -> None:
    backend = EagerBackend(llama)
    assert backend._index == {}


# The K/V buffer


def filled(sequences: int, capacity: int) -> KVBuffer:
    """Two layer shapes, as some models have; every number differs."""
    like = [(torch.zeros(1, h, 1, d), torch.zeros(1, h, 1, d + 1)) for h, d in ((2, 3), (1, 4), (2, 3))]
    buffer = KVBuffer(like)
    buffer.reserve(sequences, capacity)
    for i, tensor in enumerate([*buffer.keys, *buffer.values]):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 0.25 * i)
    return buffer


def tensors(buffer: KVBuffer) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in (*buffer.keys, *buffer.values)]


def test_layers_of_one_shape_share_a_tensor() -> None:
    buffer = filled(1, 1)
    assert [tensor.shape[0] for tensor in buffer.keys] == [2, 1]
    assert buffer.group_of == {0: (0, 0), 1: (1, 0), 2: (0, 1)}


def test_buffer_grows_in_blocks_and_keeps_what_is_there() -> None:
    buffer = filled(2, 1)
    assert buffer.capacity == BLOCK
    before = tensors(buffer)
    buffer.reserve(2, BLOCK)
    buffer.reserve(1, 7)
    assert (buffer.sequences, buffer.capacity) == (2, BLOCK)

    buffer.reserve(3, BLOCK + 1)
    assert (buffer.sequences, buffer.capacity) == (3, 2 * BLOCK)
    for old, new in zip(before, tensors(buffer), strict=True):
        assert torch.equal(new[:, :2, :, :BLOCK], old)
        assert not new[:, 2:].any()
        assert not new[:, :, :, BLOCK:].any()

    buffer.reserve(3, 4 * BLOCK)
    buffer.reserve(3, 4 * BLOCK + 1)
    assert buffer.capacity == 6 * BLOCK  # by half, so that a long answer is not copied at every block


@pytest.mark.parametrize("indices", [[1], [0, 2], [0, 1, 2]])
def test_move_copies_the_given_tokens_of_the_given_sequences_alone(indices: list[int]) -> None:
    buffer = filled(3, BLOCK)
    before = tensors(buffer)
    # The targets overlap the sources, and one more is where it should be.
    moves = {index: ([20 + index, 23, 21], 19 + index) for index in indices}
    buffer.move([*((index, *move) for index, move in moves.items()), (1, [60, 61], 60)])
    for old, new in zip(before, tensors(buffer), strict=True):
        for index, (source, target) in moves.items():
            assert torch.equal(new[:, index, :, target : target + 3], old[:, index, :, source])
            new[:, index, :, target : target + 3] = old[:, index, :, target : target + 3]
        assert torch.equal(new, old)


def test_commit_keeps_the_prefix_and_the_accepted_rows(llama: Any) -> None:
    backend = EagerBackend(llama)
    slot, other = backend.open(), backend.open()
    chunk = [3, 4, 5]
    backend.step([greedy(slot, chunk, root(6)), greedy(other, [9] * 9, root(2))])
    backend.commit([(slot, ()), (other, ())])
    assert (backend.length(slot), backend.length(other)) == (4, 10)

    tree = TokenTree([7, 11, 12, 13, 14], [-1, 0, 0, 2, 2], [0, 1, 1, 2, 2], [0, 1, 2, 3, 4])
    backend.step([greedy(slot, (), tree), greedy(other, (), tree)])
    buffer = backend._buffer
    row, neighbour = backend._index[slot], backend._index[other]
    before = tensors(buffer)
    backend.commit([(slot, [2, 4])])  # the step's tokens stand behind the longer neighbour, at 10..14
    assert backend.length(slot) == 7
    for old, new in zip(before, tensors(buffer), strict=True):
        assert torch.equal(new[:, row, :, :4], old[:, row, :, :4])
        assert torch.equal(new[:, row, :, 4:7], old[:, row, :, [10, 12, 14]])
        assert torch.equal(new[:, neighbour], old[:, neighbour])

    # What is cached is what the model itself would cache for the accepted tokens in a row.
    with torch.inference_mode():
        cache = llama(torch.tensor([[*chunk, 6, 7, 12, 14]]), use_cache=True).past_key_values
    for layer in range(2):
        group, index = buffer.group_of[layer]
        assert torch.allclose(buffer.keys[group][index, row, :, :7], cache.layers[layer].keys[0], atol=1e-4)
        assert torch.allclose(buffer.values[group][index, row, :, :7], cache.layers[layer].values[0], atol=1e-4)


@pytest.mark.parametrize("count", slow_but([48, 80], 48))
def test_a_long_answer_outgrows_the_buffer(
    count: int, llama: Any, settings: LookaheadConfig, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "BLOCK", 16)
    backend = EagerBackend(llama)
    sizes = set()
    reserve = backend._buffer.reserve

    def noted(rows: int, capacity: int) -> None:
        reserve(rows, capacity)
        sizes.add(backend._buffer.capacity)

    monkeypatch.setattr(backend._buffer, "reserve", noted)
    assert decode(backend, PROMPTS, settings, count) == [plain(llama, p, count) for p in PROMPTS]
    assert len(sizes) > 2
    assert all(size % 16 == 0 for size in sizes)


# Rows of the head


def head_rows(model: Any) -> tuple[list[tuple[int, ...]], Any]:
    """Shapes [B, rows] that the head saw, noted by a hook."""
    shapes: list[tuple[int, ...]] = []
    handle = model.lm_head.register_forward_hook(lambda _, inputs, __: shapes.append(tuple(inputs[0].shape[:2])))
    return shapes, handle


def test_logits_only_for_needed_rows(llama: Any) -> None:
    backend = EagerBackend(llama)
    slot, other = backend.open(), backend.open()
    shapes, handle = head_rows(llama)
    try:
        backend.step([greedy(slot, [3] * 20, root(5))])
        assert shapes.pop() == (1, 1)  # of a prompt, the last token's alone
        backend.commit([(slot, ())])
        backend.step([greedy(other, [4], root(5))])
        backend.commit([(other, ())])
        shapes.clear()

        backend.step([greedy(slot, (), chain(5, 6, 7, 8, 9, 10, rows=[0, 3, 5]))])
        backend.commit([(slot, ())])
        assert shapes == [(1, 3)]
        shapes.clear()

        first, second = chain(5, 6, 7, 8, rows=[0, 2]), chain(5, 6, 7, 8, 9, rows=[0, 3, 4])
        backend.step([greedy(slot, (), first), greedy(other, (), second)])
        assert shapes == [(2, 4)]  # the union of rows 0, 2 and 0, 3, 4
    finally:
        handle.remove()


def test_a_row_means_the_same_alone_and_in_a_batch(llama: Any) -> None:
    trees = [chain(5, 6, 7, 8, rows=[0, 2]), chain(11, 6, 2, 8, 9, rows=[0, 3, 4]), root(3)]
    alone = []
    for prompt, tree in zip(PROMPTS, trees, strict=False):
        backend = EagerBackend(llama)
        alone += backend.step([greedy(backend.open(), prompt, tree, top=3)])
    backend = EagerBackend(llama)
    items = [greedy(backend.open(), p, t, top=3) for p, t in zip(PROMPTS, trees, strict=False)]
    together = backend.step(items)
    assert [t.targets for t in together] == [t.targets for t in alone]
    assert [t.top[:, :3].tolist() for t in together] == [t.top[:, :3].tolist() for t in alone]
    assert [len(t.targets) for t in together] == [2, 3, 1]


# Prompts, attention, windows, dtypes


@pytest.mark.parametrize("chunk", [1, 8, 29, 30])
@pytest.mark.thinned(1, most=2)
def test_chunked_prefill(
    llama: Any, settings: LookaheadConfig, plain: Plain, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(eager, "PREFILL_CHUNK", chunk)
    backend = EagerBackend(llama)
    sizes = []
    handle = llama.register_forward_pre_hook(
        lambda _, __, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        outputs = decode(backend, PROMPTS, settings)
    finally:
        handle.remove()
    assert outputs == [plain(llama, p, 24) for p in PROMPTS]
    assert max(sizes) <= chunk + settings.budget
    assert sizes.count(chunk) >= (len(PROMPTS[2]) - 1) // chunk - 1


def test_eager_attention_equals_sdpa(settings: LookaheadConfig, plain: Plain) -> None:
    model = tiny("Llama", attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    expected = [plain(tiny("Llama"), p, 24) for p in PROMPTS]
    assert decode(EagerBackend(model), PROMPTS, settings) == expected


HYBRID = {
    "sliding_window": 7,
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": False,  # tied and this small, it would say its last token again and again
}
WINDOWED: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 7},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "Gemma2": HYBRID,
    "Gemma3Text": HYBRID,
}


def windowed(kind: str, **changes: Any) -> Any:
    return tiny(kind, **{**WINDOWED[kind], **changes})


@pytest.mark.parametrize("kind", slow_but(WINDOWED, "Mistral", "Gemma2"))
@pytest.mark.thinned(1, most=1)
def test_sliding_window(kind: str, settings: LookaheadConfig, plain: Plain) -> None:
    """Prompts shorter and longer than the window, outputs that pass it, alone and in a batch."""
    model = windowed(kind)
    expected = [plain(model, p, 24) for p in PROMPTS]
    wide = [plain(windowed(kind, sliding_window=200), p, 24) for p in PROMPTS]
    assert wide != expected  # the window matters, so the test can fail
    backend = EagerBackend(model)
    assert [decode(backend, [p], settings)[0] for p in PROMPTS] == expected
    assert decode(backend, PROMPTS, settings) == expected


@pytest.mark.parametrize("chunk", [3, 8])
def test_sliding_window_with_chunked_prefill(
    settings: LookaheadConfig, plain: Plain, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(eager, "PREFILL_CHUNK", chunk)
    model = windowed("Mistral")
    assert decode(EagerBackend(model), PROMPTS, settings) == [plain(model, p, 24) for p in PROMPTS]


def test_autoregressive_steps_in_a_sliding_window(plain: Plain) -> None:
    """Steps of one token leave the mask to the model."""
    model = windowed("Mistral")
    backend = EagerBackend(model)
    for prompt in PROMPTS:
        sequence = DecodingSequence(prompt, LookaheadConfig.autoregressive(), rules=StopRules(24))
        engine = Engine(backend)
        engine.submit(Request(sequence))
        while engine.running:
            engine.step()
        assert sequence.output == plain(model, prompt, 24)


def test_bfloat16_runs_on_a_cpu(settings: LookaheadConfig) -> None:
    backend = EagerBackend(tiny("Llama").to(torch.bfloat16))
    assert backend.dtype is torch.bfloat16
    assert all(tensor.dtype is torch.bfloat16 for tensor in backend._buffer.keys)
    assert [len(output) for output in decode(backend, PROMPTS, settings)] == [24] * len(PROMPTS)


# Slots

ORDERS = list(itertools.permutations(range(4)))[::5]


@pytest.mark.parametrize("order", slow_but(ORDERS, *ORDERS[:2]))
def test_slots_close_in_any_order(llama: Any, settings: LookaheadConfig, plain: Plain, order: Sequence[int]) -> None:
    """Four open, one leaves at a time between steps, and the rest stay exact."""
    backend = EagerBackend(llama)
    engine = Engine(backend)
    sequences = [DecodingSequence(p, settings, rules=StopRules(40)) for p in PROMPTS]
    ids = [engine.submit(Request(sequence)) for sequence in sequences]
    for leaver in order:
        engine.step()
        engine.step()
        engine.cancel(ids[leaver])
        latecomer = DecodingSequence(PROMPTS[leaver], settings, rules=StopRules(3))
        engine.submit(Request(latecomer))
        while latecomer.finish_reason is None:
            engine.step()
        assert latecomer.output == plain(llama, PROMPTS[leaver], 3)
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        assert sequence.output == plain(llama, prompt, 40)[: len(sequence.output)]
    assert max(len(s.output) for s in sequences) > 12
    assert backend._index == {}


def test_rows_that_are_not_neighbours(llama: Any, settings: LookaheadConfig, plain: Plain) -> None:
    """Two engines share a backend: the rows of one lie around those of the other."""
    backend = EagerBackend(llama)
    engines = [Engine(backend), Engine(backend)]
    sequences = [DecodingSequence(p, settings, rules=StopRules(24)) for p in PROMPTS]
    for i, sequence in enumerate(sequences):
        engines[i % 2].submit(Request(sequence))
    engines[0].step()
    while any(engine.running for engine in engines):
        for engine in engines:
            if engine.running:
                engine.step()
    assert [s.output for s in sequences] == [plain(llama, p, 24) for p in PROMPTS]


def test_a_slot_that_is_opened_again_is_empty(llama: Any) -> None:
    backend = EagerBackend(llama)
    first = backend.open()
    target = backend.step([greedy(first, [8, 9], root(3))])[0].targets
    backend.commit([(first, ())])
    backend.close(first)
    second = backend.open()
    assert backend.length(second) == 0
    assert backend.step([greedy(second, [8, 9], root(3))])[0].targets == target
