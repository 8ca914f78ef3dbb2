"""The graph backend on the real Triton kernels, run by Triton's interpreter: the whole step without a GPU.

`test_graph.py` runs the backend on the kernels' twins, and `kernels/` compares each kernel with its twin. What remains
to test is how the backend calls the kernels: strides, dtypes, and which buffer goes where.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from described import HIDDEN
from interpreting import interpreted_backends
from knobs import DIM, HEADS, KV_HEADS, Maker
from marks import slow_but
from model_table import ROUNDING, error
from model_table_recurrent import RECURRENT_ROWS
from tiny import PROMPTS, VOCABULARY, greedy, outputs, random_tree, root, tiny

pytest.importorskip("triton")

from lookahead import LookaheadConfig
from lookahead.algorithm.tree import TokenTree
from lookahead.algorithm.verify import accept
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.kernels import attention
from lookahead.config import SamplingParams
from lookahead.models.feed_forward import Activation
from lookahead.models.norm import Norm
from lookahead.models.reference import forward_tree
from lookahead.models.spec import Decoder

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here, see test_graph.py")

SETTINGS = LookaheadConfig(window=0, budget=5)
SIZES = (1, 4, 5, 16)
"""Small steps with little padding: the interpreter takes a millisecond per program, and a launch has one per token."""
PROMPT = [*range(2, 14)]
RECURRENT = {
    name: (kind, changes)
    for name, kind, changes in RECURRENT_ROWS
    if name in ("qwen3-next", "qwen3.5", "granite-mamba-limit", "falcon-h1", "nemotron-h", "mamba2", "lfm2-moe")
}
"""Of the table of recurrent models: each mixer, both orders of columns, limits, factors, and halves alone."""


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., GraphBackend]:
    return interpreted_backends(monkeypatch, SIZES)


def told(backend: GraphBackend, prompt: Sequence[int], answer: Sequence[int]) -> tuple[list[int], int]:
    """Decode as many tokens as the answer has, by trees that hold its next two tokens, each behind a wrong one.

    Returns the tokens and the number of steps. Accepted nodes never stand next to their prefix, so their K/V must move.
    """
    slot, tokens, steps = backend.open(), list(prompt), 0
    while len(tokens) < len(prompt) + len(answer):
        nodes = tokens[-1:]
        for right in answer[len(tokens) - len(prompt) :][:2]:
            nodes += [(right + 1) % VOCABULARY, right]
        size = len(nodes)
        tree = TokenTree(nodes, [-1, 0, 0, 2, 2][:size], [0, 1, 1, 2, 2][:size], list(range(size)))
        chunk = tokens[backend.length(slot) : -1]
        path, accepted = accept(tree, backend.step([greedy(slot, chunk, tree)])[0].targets)
        backend.commit([(slot, path)])
        tokens += accepted
        steps += 1
    return tokens[len(prompt) :], steps


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param("Llama", {}, marks=pytest.mark.slow),  # `test_penalties_and_a_bias` runs it as well
        pytest.param("Qwen3", {"head_dim": 16}, marks=pytest.mark.slow),
        pytest.param(
            "Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}, marks=pytest.mark.slow
        ),
        ("GptOss", {"num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7}),
        pytest.param(
            "Afmoe",
            {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_dense_layers": 1},
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.parametrize("count", slow_but([6, 12], 6))
def test_greedy_equals_transformers(
    kind: str,
    changes: dict[str, Any],
    count: int,
    interpreted: Callable[[Any], GraphBackend],
    plain: Callable[[Any, Sequence[int], int], list[int]],
) -> None:
    """Three tokens in each step."""
    model = tiny(kind, **changes)
    expected = plain(model, PROMPT, count)
    assert len(set(expected)) > count // 3
    assert told(interpreted(model), PROMPT, expected) == (expected, count // 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(SETTINGS, id="guesses", marks=pytest.mark.slow),
        pytest.param(LookaheadConfig.autoregressive(), id="steps ahead"),
    ],
)
def test_a_ragged_batch(
    config: LookaheadConfig,
    interpreted: Callable[[Any], GraphBackend],
    plain: Callable[[Any, Sequence[int], int], list[int]],
) -> None:
    """Three sequences, padded to four rows. Token by token, the device continues with its own targets."""
    model = tiny("Llama", num_hidden_layers=1)
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[3]]
    expected = [plain(model, prompt, 5) for prompt in prompts]
    assert outputs(interpreted(model), prompts, config, 5) == expected


def test_blocks_of_every_structure(interpreted: Callable[..., GraphBackend]) -> None:
    """A parallel block with two norms, one with norms after its layers, scales, biases, learned positions, a soft cap:
    as in `models.reference`."""
    make = Maker()
    parallel = make.block(
        make.attention(bias=True, heads=2, kv_heads=1, rope=None),
        make.feed_forward(gated=False, bias=True, activation=Activation.GELU_TANH),
        mixer_norm=make.layer_norm(),
        parallel=True,
        residual_scale=0.5,
    )
    after = make.block(
        make.attention(heads=2, kv_heads=1),
        make.feed_forward(activation=Activation.RELU2),
        mixer_norm=None,
        feed_forward_norm=None,
        mixer_out_norm=make.norm(offset=1.0),
        feed_forward_out_norm=make.norm(rounds_first=False),
        output_scale=make.random(1, size=1.0),
    )
    ends = {"embedding_scale": 2.0, "position_embedding": make.random(64, HIDDEN), "logit_softcap": 3.0}
    described = make.decoder(parallel, after, head_bias=True, **ends)
    backend = interpreted(tiny("Llama", max_position_embeddings=64), description=described)
    tree, prefix = random_tree(3, 2), [4, 9]
    found = backend.step([greedy(backend.open(), prefix, tree, logits=True)])[0].logits
    assert error(found, forward_tree(described, prefix, tree.tokens, tree.parents)) < 5 * ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_states(
    name: str, interpreted: Callable[[Any], GraphBackend], plain: Callable[[Any, Sequence[int], int], list[int]]
) -> None:
    """Nodes that are accepted never stand next to their root, and are replayed by the next step."""
    kind, changes = RECURRENT[name]
    expected = plain(tiny(kind, **changes), PROMPT[:5], 6)
    assert told(interpreted(tiny(kind, **changes)), PROMPT[:5], expected) == (expected, 2)


@pytest.mark.parametrize("name", slow_but([*RECURRENT], "lfm2-moe"))
def test_states_of_steps_ahead(
    name: str,
    interpreted: Callable[[Any], GraphBackend],
    plain: Callable[[Any, Sequence[int], int], list[int]],
    ran: list[str],
) -> None:
    """Steps ahead replay the roots of the steps before them: of two sequences, the first of which begins its text."""
    kind, changes = RECURRENT[name]
    prompts = [PROMPT[:1], PROMPT[:3]]
    expected = [plain(tiny(kind, **changes), prompt, 5) for prompt in prompts]
    assert outputs(interpreted(tiny(kind, **changes)), prompts, LookaheadConfig.autoregressive(), 5) == expected
    assert ran[-3:] == ["ahead"] * 3


@pytest.mark.slow
def test_penalties_and_a_bias(interpreted: Callable[[Any], GraphBackend]) -> None:
    """The step counts what was accepted, and adjusts logits by the tables of its lines."""
    model = tiny("Llama", num_hidden_layers=1)
    sampling = SamplingParams(repetition_penalty=1.6, frequency_penalty=0.7, logit_bias={5: 3.0, 9: -float("inf")})
    expected = outputs(EagerBackend(model), [PROMPTS[0]], LookaheadConfig.autoregressive(), 6, sampling)
    assert expected != outputs(EagerBackend(model), [PROMPTS[0]], LookaheadConfig.autoregressive(), 6)
    assert outputs(interpreted(model), [PROMPTS[0]], SETTINGS, 6, sampling) == expected


@pytest.mark.slow
def test_chunks_and_trees_in_one_pass(interpreted: Callable[[Any], GraphBackend]) -> None:
    """A piece of a prompt, a tree behind a page's border, and single tokens, against the eager backend."""
    model = tiny("Llama", num_hidden_layers=1)
    rng = random.Random(0)
    texts = [rng.choices(range(VOCABULARY), k=count) for count in (63, 4, 0)]
    chunks, trees = ([], [9, 8, 7], [5, 6]), (random_tree(6, 1), random_tree(3, 2), root(4))
    results = []
    for make in (interpreted, EagerBackend):
        backend = make(model)
        slots = [backend.open() for _ in texts]
        generator = torch.Generator().manual_seed(0)
        for slot, text in zip(slots, texts, strict=True):
            layer = tuple(torch.randn(2, len(text), 8, generator=generator) for _ in range(2))
            backend.adopt(slot, len(text), [layer])
        items = [greedy(*parts, logits=True) for parts in zip(slots, chunks, trees, strict=True)]
        first = [result.logits.clone() for result in backend.step(items)]
        backend.commit([(slots[0], [2] if trees[0].parents[2] == 0 else [1]), (slots[1], ()), (slots[2], ())])
        again = backend.step([greedy(slot, (), root(3), logits=True) for slot in slots])
        results.append([*first, *(result.logits.clone() for result in again)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_memory_of_a_captured_step_is_not_freed(interpreted: Callable[..., GraphBackend]) -> None:
    """A captured graph writes to the addresses that it was captured with. So a step that comes later, of any size, must
    find the workspace large enough, and all of them share it.
    """
    model = tiny("Llama", num_hidden_layers=1)
    backend = interpreted(model, processors=132)
    given: dict[int, list[int]] = {}

    def noting(q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = next(arg for arg in args if isinstance(arg, attention.Workspace))
        result = attention.attend(q, *args, **kwargs)
        given[len(q)] = [x.data_ptr() for x in (work.part, work.top, work.arrived, work.paths)]
        return result

    backend.runner.state.ops.attend = noting
    slot = backend.open()
    generator = torch.Generator().manual_seed(0)
    backend.adopt(slot, 70, [tuple(torch.randn(2, 70, 8, generator=generator) for _ in range(2))])
    backend.step([greedy(slot, (), root(3))])
    backend.step([greedy(slot, (), random_tree(14, 0))])
    assert {kind.rows for kind in backend.runner.steps.pairs} == set(given) == {1, 16}
    assert given[1] == given[16]


def other_heads(make: Maker) -> Decoder:
    """Layers whose heads take the paths that a plain model's do not: interleaved pairs of a part of each head, norms in
    one launch and in two, clamped values that are keys, scaled queries, a soft cap, sinks, and K/V of another layer."""
    first = make.attention(
        rope=make.rope(4, interleaved=True),
        q_norm=make.norm(DIM, offset=1.0, rounds_first=False),
        k_norm=make.norm(DIM, 0.1, rounds_first=False),
        v_norm=Norm(None, 1e-6),
        query_scale=lambda positions: 1 + positions / 16,
        softcap=1.5,
    )
    second = make.attention(
        qkv=make.matrix(HEADS * DIM, KV_HEADS * DIM, bias=True),
        head_order=(3, 2, 1, 0, 4, 5, 5, 4),
        clip=0.6,
        q_norm=make.norm(HEADS * DIM),
        k_norm=make.norm(KV_HEADS * DIM),
        whole_norms=True,
        sinks=make.random(HEADS, size=2.0),
    )
    third = make.attention(qkv=make.matrix(HEADS * DIM), kv_layer=0)
    return make.decoder(*(make.block(attention) for attention in (first, second, third)))


def test_other_heads(interpreted: Callable[..., GraphBackend]) -> None:
    """A tree behind random K/V, at shifted positions, against the kernels' twins."""
    found = []
    for make in (GraphBackend, interpreted):
        backend = make(tiny("Llama"), description=other_heads(Maker()))
        slot, generator = backend.open(), torch.Generator().manual_seed(0)
        layers = [tuple(torch.randn(KV_HEADS, 9, DIM, generator=generator) for _ in range(2)) for _ in range(2)]
        backend.adopt(slot, 9, layers, (-2,))
        found.append(backend.step([greedy(slot, (), random_tree(4, 1), logits=True)])[0].logits.clone())
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
