"""`models.reference` runs mixers with a recurrent state as transformers does: prompts, and trees of generated text."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from marks import slow_but
from model_table import build, error, stock_logits
from model_table_recurrent import QUICK_RECURRENT_ROWS, RECURRENT_ROWS
from tiny import VOCABULARY, random_tree

from lookahead.models import reference, reference_recurrent
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.feed_forward import Activation
from lookahead.models.read import read
from lookahead.models.recurrent import Convolution, Mamba2
from lookahead.models.spec import Block, Decoder, SideBySide, check_plain

NAMES = [name for name, _, _ in RECURRENT_ROWS]
DENSE = ["qwen3.5", "olmo-hybrid", "granite-mamba", "bamba", "falcon-h1", "mamba2", "lfm2"]
"""Without routers, whose close choices turn with rounding."""
ROUNDING = 1e-4
"""`error` of two ways to compute the same logits. Transformers' own two, a prompt in chunks and token by token, differ
by 4.6e-5 in qwen3.5-moe, where rounding grows from layer to layer; in most rows by 2e-6."""
TOKENS = torch.randint(VOCABULARY, (40,), generator=torch.Generator().manual_seed(5)).tolist()
PREFIX = TOKENS[:20]


@cache
def model_of(name: str) -> Any:
    """A row's model. Tests share it and do not change it."""
    return build(name)


@torch.no_grad()
def decoded(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """The logits [tokens, vocabulary] of transformers where these tokens are generated one by one after a prompt."""
    output, logits = model(torch.tensor([prompt]), use_cache=True), []
    name = "cache_params" if "cache_params" in output else "past_key_values"
    for index, token in enumerate(tokens, len(prompt)):
        given = {name: output[name]}
        if name != "cache_params":  # a model of Mamba-2 alone counts no positions
            given["position_ids"] = torch.tensor([[index]])
        output = model(torch.tensor([[token]]), use_cache=True, **given)
        logits.append(output.logits[0, -1])
    return torch.stack(logits)


@pytest.mark.parametrize("name", slow_but(NAMES, *QUICK_RECURRENT_ROWS))
@pytest.mark.thinned(1, most=6)
def test_a_prompt(name: str) -> None:
    """Of more tokens than a chunk of transformers has, and of fewer than a convolution."""
    model = model_of(name)
    description = read(model, "reference")
    for tokens in (TOKENS, TOKENS[:2]):
        assert error(reference.forward(description, tokens), stock_logits(model, tokens)) < ROUNDING


@pytest.mark.parametrize("name", slow_but(NAMES, "qwen3.5", "nemotron-h-limit", "falcon-h1", "lfm2"))
@pytest.mark.thinned(1, most=2)
def test_every_path_of_a_tree_is_generated_text(name: str) -> None:
    """Each path is decoded by transformers token by token, from the states of the prompt."""
    model, tree = model_of(name), random_tree(12, seed=3)
    description, parents = read(model, "reference"), list(tree.parents)
    paths = [[leaf] for leaf in set(range(tree.size)) - set(parents)]
    for path in paths:
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
    assert len(paths) > 3
    for prefix in (PREFIX, PREFIX[:1]):
        found = reference.forward_tree(description, prefix, tree.tokens, parents, generated=0)
        for path in paths:
            assert error(found[path], decoded(model, prefix, [tree.tokens[node] for node in path])) < ROUNDING


@pytest.mark.parametrize("name", ["qwen3.5", "granite-mamba-limit", "lfm2"])
def test_generated_tokens_of_the_prefix(name: str) -> None:
    """Those that a tree hangs from have the time steps of generated tokens, too."""
    model = model_of(name)
    description = read(model, "reference")
    chain = reference.forward_tree(description, PREFIX, TOKENS[20:30], range(-1, 9), generated=0)
    found = reference.forward_tree(description, TOKENS[:26], TOKENS[26:30], range(-1, 3), generated=6)
    assert error(found, chain[6:]) < 1e-6
    assert (error(reference.forward(description, TOKENS[:30])[26:], found) > 1e-2) is (name == "granite-mamba-limit")


@pytest.mark.parametrize("name", ["qwen3.5", "mamba2", "lfm2"])
def test_a_node_reads_the_states_of_its_parent(name: str) -> None:
    """What hangs beside a node changes no bit of it; what it hangs from does, and so does the first token of all."""
    description = read(model_of(name), "reference")
    found = reference.forward_tree(description, PREFIX, [3, 4, 5, 6], [-1, 0, 0, 2])
    other = reference.forward_tree(description, PREFIX, [3, 7, 5, 6], [-1, 0, 0, 2])
    assert torch.equal(found[2:], other[2:])
    for changed in (
        reference.forward_tree(description, PREFIX, [8, 4, 5, 6], [-1, 0, 0, 2]),
        reference.forward_tree(description, [9, *PREFIX[1:]], [3, 4, 5, 6], [-1, 0, 0, 2]),
    ):
        assert error(changed[3:], found[3:]) > 1e-3


def test_the_update_of_a_gated_delta_net() -> None:
    """That of transformers decodes one token, of q and k before their lengths are divided out."""
    made = torch.Generator().manual_seed(1)
    heads, keys, values = 3, 8, 5
    q, k, v = (torch.randn(heads, width, generator=made) for width in (keys, keys, values))
    state = torch.randn(heads, keys, values, generator=made)
    beta, decay = (torch.rand(heads, generator=made) for _ in range(2))
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    expected, after = module.torch_recurrent_gated_delta_rule(
        *(each[None, None] for each in (q, k, v)),
        g=decay.log()[None, None],
        beta=beta[None, None],
        initial_state=state[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    q, k = (each / (each.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    y, new = reference_recurrent.delta_update(state, q / keys**0.5, k, v, decay, beta)
    assert error(y, expected[0, 0]) < 1e-6
    assert error(new, after[0]) < 1e-6


def test_the_update_of_mamba2() -> None:
    made = torch.Generator().manual_seed(1)
    heads, width, size = 3, 4, 7
    x, b, c = (torch.randn(heads, each, generator=made) for each in (width, size, size))
    state = torch.randn(heads, width, size, generator=made)
    dt, a = torch.rand(heads, generator=made), -torch.rand(heads, generator=made)
    module = importlib.import_module("transformers.models.mamba2.modeling_mamba2")
    after = state[None].clone()
    wide = a[:, None, None].expand(heads, width, size)
    expected = module.mamba2_selective_state_update(
        after, x[None], dt[None, :, None].expand(1, heads, width), wide, b[None], c[None]
    )
    y, new = reference_recurrent.mamba_update(state, x, b, c, dt, a)
    assert error(y, expected[0]) < 1e-6
    assert error(new, after[0]) < 1e-6


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("name", slow_but(DENSE, "qwen3.5", "granite-mamba"))
def test_half_precision_is_about_as_exact_as_transformers(name: str) -> None:
    """Its prompts keep more of Mamba-2 in fp32 than its single tokens do, which the description follows."""
    exact = stock_logits(model_of(name), TOKENS)
    model = build(name, attn_implementation="eager").to(torch.bfloat16)
    found = reference.forward(read(model, "reference"), TOKENS)
    assert error(found, exact) < 2 * error(stock_logits(model, TOKENS), exact)


# Planted mistakes


def in_recurrent(**changes: Any) -> Callable[[Block], Block]:
    """Changes fields of the mixer; a function is called with it."""

    def change(block: Block) -> Block:
        spec = block.recurrent
        changed = replace(spec, **{key: each(spec) if callable(each) else each for key, each in changes.items()})
        if isinstance(block.mixer, SideBySide):
            branch = replace(block.mixer.recurrent, mixer=changed)
            return replace(block, mixer=replace(block.mixer, recurrent=branch))
        return replace(block, mixer=changed)

    return change


def in_convolution(**changes: Any) -> Callable[[Block], Block]:
    def changed(spec: Any) -> Convolution:
        own = spec.convolution
        return replace(own, **{key: each(own) if callable(each) else each for key, each in changes.items()})

    return in_recurrent(convolution=changed)


def in_branches(**changes: dict[str, float]) -> Callable[[Block], Block]:
    def change(block: Block) -> Block:
        branches = {name: replace(getattr(block.mixer, name), **fields) for name, fields in changes.items()}
        return replace(block, mixer=replace(block.mixer, **branches))

    return change


def in_feed_forward(**changes: Any) -> Callable[[Block], Block]:
    return lambda block: replace(block, feed_forward=replace(block.feed_forward, **changes))


def other_sum_eps(block: Block) -> Block:
    router = replace(block.feed_forward.router, sum_eps=0.1)
    return replace(block, feed_forward=replace(block.feed_forward, router=router))


def repeated_norm(spec: Mamba2) -> Any:
    """One norm of all heads, with the same weights."""
    assert spec.norm is not None
    assert spec.norm.weight is not None
    return replace(spec.norm, weight=spec.norm.weight.reshape(1, -1))


MISTAKES: list[tuple[str, str, int, Callable[[Block], Block]]] = [
    ("columns as they are", "qwen3-next", 0, in_recurrent(order=None)),
    ("another decay", "qwen3.5", 0, in_recurrent(a_log=lambda spec: spec.a_log + 0.05)),
    ("another time step", "qwen3.5", 2, in_recurrent(dt_bias=lambda spec: spec.dt_bias + 0.05)),
    ("other heads", "qwen3.5", 0, in_recurrent(a_log=lambda spec: spec.a_log.flip(0))),
    ("twice the beta", "qwen3.5", 0, in_recurrent(beta_scale=2.0)),
    ("half the beta", "olmo-hybrid", 0, in_recurrent(beta_scale=1.0)),
    ("no activation of the convolution", "qwen3.5", 0, in_convolution(activation=None)),
    ("taps in the other order", "qwen3.5", 0, in_convolution(weight=lambda own: own.weight.flip(1))),
    ("another eps of the norm", "qwen3.5", 0, in_recurrent(norm=lambda spec: replace(spec.norm, eps=1e-2))),
    ("norms of 1 + w", "qwen3.5", 0, in_recurrent(norm=lambda spec: replace(spec.norm, offset=1.0))),
    ("no gate of attention", "qwen3.5", 1, lambda block: block.with_attention(gate_heads=None)),
    ("gates of other heads", "qwen3.5", 1, lambda block: block.with_attention(gate_heads=(7, 5, 3, 1))),
    ("no biases of the convolution", "granite-mamba", 0, in_convolution(bias=None)),
    ("no skip", "granite-mamba", 2, in_recurrent(skip=lambda spec: torch.zeros_like(spec.skip))),
    ("norm before the gate", "granite-mamba", 0, in_recurrent(norm_first=True)),
    ("no limit", "granite-mamba-limit", 0, in_recurrent(prompt_time_steps=(0.0, float("inf")))),
    ("one norm", "nemotron-h", 0, in_recurrent(norm=repeated_norm)),
    ("no shared expert", "nemotron-h", 1, in_feed_forward(shared=None)),
    ("gate before the norm", "falcon-h1-norm-first", 0, in_recurrent(norm_first=False)),
    ("no norm", "falcon-h1", 0, in_recurrent(norm=None)),
    ("no column scales", "falcon-h1", 1, in_recurrent(column_scales=None)),
    ("no scale of Mamba's input", "falcon-h1", 0, in_branches(recurrent={"input_scale": 1.0})),
    ("no scale of Mamba's output", "falcon-h1", 0, in_branches(recurrent={"output_scale": 1.0})),
    ("no scale of attention's input", "falcon-h1", 0, in_branches(attention={"input_scale": 1.0})),
    ("no scale of attention's output", "falcon-h1", 0, in_branches(attention={"output_scale": 1.0})),
    ("no scale of the gate", "falcon-h1", 0, in_feed_forward(gate_scale=1.0)),
    ("no scale of the feed-forward", "falcon-h1", 0, in_feed_forward(out_scale=1.0)),
    ("an activation of the convolution", "lfm2", 0, in_convolution(activation=Activation.SILU)),
    ("no biases of the convolution", "lfm2-biases", 0, in_convolution(bias=None)),
    ("another eps of the router", "lfm2-moe", 1, other_sum_eps),
]


@pytest.mark.parametrize(
    ("row", "layer", "change"), [pytest.param(row, layer, change, id=name) for name, row, layer, change in MISTAKES]
)
@pytest.mark.thinned(1, most=15)
def test_a_mistake_is_seen(row: str, layer: int, change: Callable[[Block], Block]) -> None:
    model = model_of(row)
    description = read(model, "reference")
    blocks = list(description.blocks)
    blocks[layer] = change(blocks[layer])
    wrong = replace(description, blocks=blocks)
    assert error(reference.forward(wrong, TOKENS), stock_logits(model, TOKENS)) > 10 * ROUNDING


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("qwen3.5", "it keeps a recurrent state"),
        ("falcon-h1", "it keeps a recurrent state"),
        ("nemotron-h", "it keeps a recurrent state"),
        ("lfm2", "it keeps a recurrent state"),
    ],
)
def test_backends_without_states_refuse(row: str, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        check_plain(read(model_of(row), "some"))


def attentive(row: str, **changes: Any) -> Decoder:
    """The blocks of this row that a backend without states could run but for one of their fields."""
    description = read(model_of(row), "some")
    blocks = [block for block in description.blocks if block.recurrent is None]
    return replace(description, blocks=blocks, **changes)


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        ("qwen3.5", {}, "the gates of its attention are in the matrix of the queries"),
        ("nemotron-h", {}, "a layer of it has no attention, or no feed-forward"),
        ("lfm2", {"residual_fp32": True}, "its residual stream is in fp32"),
        ("lfm2-moe", {}, "its routers add a number to a sum"),
    ],
)
def test_backends_refuse_what_only_hybrids_have(row: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        check_plain(attentive(row, **changes))


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        ("qwen3.5", {"key_heads": 3}, "4 heads cannot share 3 key heads evenly"),
        ("qwen3.5", {"value_dim": 8}, "projection is a matrix"),
        ("qwen3.5", {"a_log": torch.zeros(2)}, r"\[2\] numbers for 4 heads"),
        ("qwen3-next", {"order": torch.zeros(5, dtype=torch.long)}, "an order of 5 columns for"),
        ("granite-mamba", {"groups": 3}, "4 heads cannot share 3 groups evenly"),
        ("granite-mamba", {"skip": torch.zeros(1)}, r"\[1\] numbers for 4 heads"),
        ("falcon-h1", {"column_scales": torch.ones(3)}, "3 scales of"),
    ],
)
def test_parts_that_do_not_fit_are_refused(row: str, changes: dict[str, Any], message: str) -> None:
    block = read(model_of(row), "some").blocks[0]
    with pytest.raises(ValueError, match=message):
        in_recurrent(**changes)(block)


def test_decays_may_stay_in_fp32() -> None:
    """As a user may leave them: they are used in fp32. No other weight may."""
    model = build("granite-mamba").to(torch.bfloat16)
    for layer in model.model.layers:
        if layer.mamba is not None:
            for name in ("A_log", "dt_bias", "D"):
                getattr(layer.mamba, name).data = getattr(layer.mamba, name).data.float()
    assert read(model, "some").blocks[0].recurrent.a_log.dtype is torch.float32
    model.model.layers[0].mamba.conv1d.float()
    with pytest.raises(UnsupportedModelError, match="its weights have several dtypes or devices"):
        read(model, "some")
