"""`models.reference` gives the logits of transformers for every class with a reader, on plain text and on trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from marks import slow_but
from model_table import FIRST_ROWS, ROUNDING, ROWS, build, error, stock_logits, stock_logits_of_each
from model_table_recurrent import RECURRENT_ROWS
from tiny import VOCABULARY, random_tree
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lookahead.models import reference
from lookahead.models.families import multimodal
from lookahead.models.feed_forward import Activation, Scoring
from lookahead.models.matrix import Matrix
from lookahead.models.norm import Norm
from lookahead.models.read import read, readers
from lookahead.models.spec import Attention, Block, Decoder, Rope

NAMES = [name for name, _, _ in ROWS]
TOKENS = torch.randint(VOCABULARY, (40,), generator=torch.Generator().manual_seed(5)).tolist()
PREFIX = TOKENS[:20]


@cache
def model_of(name: str) -> Any:
    """A row's model. Tests share it and do not change it."""
    return build(name)


def class_name(kind: str) -> str:
    """Of the model that this kind of config makes, which takes long to make."""
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[getattr(transformers, f"{kind}Config").model_type]


@pytest.mark.parametrize("name", sorted(readers().keys() - multimodal.READERS.keys()))  # they have a test of their own
def test_every_class_with_a_reader_has_a_row(name: str) -> None:
    tested = {class_name(kind) for _, kind, _ in (*ROWS, *RECURRENT_ROWS)}
    assert name in tested, f"add rows for {name} to ROWS in tests/helpers/model_table.py"


@pytest.mark.parametrize("name", slow_but(NAMES, *FIRST_ROWS, *NAMES[::3]))
def test_plain_text(name: str) -> None:
    model = model_of(name)
    assert error(reference.forward(read(model, "reference"), TOKENS), stock_logits(model, TOKENS)) < ROUNDING


@pytest.mark.parametrize("name", slow_but(NAMES, *FIRST_ROWS))
@pytest.mark.thinned(1, most=10)
def test_every_path_of_a_tree_is_plain_text(name: str) -> None:
    """Prefixes longer and shorter than the windows, and none at all."""
    model, tree = model_of(name), random_tree(24, seed=3)
    description, parents = read(model, "reference"), list(tree.parents)
    for prefix in (PREFIX, PREFIX[:2], []):
        found = reference.forward_tree(description, prefix, tree.tokens, parents)
        paths = [[leaf] for leaf in set(range(tree.size)) - set(parents)]
        for path in paths:
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
        expected = stock_logits_of_each(model, [[*prefix, *(tree.tokens[node] for node in path)] for path in paths])
        for path, logits in zip(paths, expected, strict=True):
            assert error(found[path], logits[len(prefix) :]) < ROUNDING


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("llama-large-eps", "llama"),
        ("llama-theta", "llama"),
        ("llama-linear", "llama"),
        ("llama-llama3", "llama"),
        ("llama-yarn", "llama"),
        ("llama-longrope", "llama"),
        ("qwen2-hybrid", "qwen2"),
        ("gemma2", "gemma2-uncapped"),
        ("gemma3-capped", "gemma3"),
        ("gemma3-linear", "gemma3"),
        ("olmo-clipped", "olmo"),
        ("olmo3-yarn", "olmo3"),
        ("exaone4", "exaone4-no-windows"),
        ("granite-swa-thetas", "granite-swa"),
        ("granite-hybrid", "granite-hybrid-no-positions"),
        ("glm", "glm-whole-heads"),
        ("hunyuan-alpha", "hunyuan"),
        ("ministral3-window", "ministral3"),
        ("gpt-oss-yarn", "gpt-oss"),
        ("qwen2-moe-normalised", "qwen2-moe"),
        ("glm4-moe-plain-weights", "glm4-moe"),
        ("phimoe-longrope", "phimoe"),
    ],
)
def test_what_a_row_changes_matters(name: str, plain: str) -> None:
    """With the same weights and another config the logits are others: a forgotten field would be noticed above."""
    assert error(stock_logits(model_of(name), TOKENS), stock_logits(model_of(plain), TOKENS)) > 1e-2


def test_a_node_sees_no_other_branch() -> None:
    """Two chains from one root, of the same tokens at the same positions as one chain: other parents, other logits."""
    description = read(model_of("llama"), "reference")
    found = reference.forward_tree(description, PREFIX, [3, 4, 5, 6], [-1, 0, 0, 2])
    chain = reference.forward_tree(description, PREFIX, [3, 4, 5, 6], [-1, 0, 1, 2])
    assert error(found[:2], chain[:2]) < ROUNDING
    assert error(found[2:], chain[2:]) > 0.1
    without = reference.forward_tree(description, PREFIX, [3, 5, 6], [-1, 0, 1])
    assert error(found[2:], without[1:]) < ROUNDING


def test_a_rotary_module_that_has_seen_a_long_text() -> None:
    """It keeps the factors of a long text until it sees a short one."""
    model = build("llama-dynamic")
    expected = stock_logits(model, TOKENS)
    long = stock_logits(model, TOKENS * 8)
    assert error(long[: len(TOKENS)], expected) > 1e-3  # so the factors did change
    assert error(reference.forward(read(model, "reference"), TOKENS), expected) < ROUNDING


@pytest.mark.parametrize("limit", [0.7, 7.0])
def test_gates_are_clamped_where_the_module_clamps(limit: float) -> None:
    """Few numbers of a tiny model are beyond the limit of gpt-oss; older configs have no field for it."""
    model = build("gpt-oss")
    before = stock_logits(model, TOKENS)
    for layer in model.model.layers:
        layer.mlp.experts.limit = limit
    after = stock_logits(model, TOKENS)
    assert (error(after, before) > 1e-2) is (limit < 1)
    assert error(reference.forward(read(model, "reference"), TOKENS), after) < ROUNDING


# Layers that differ


class NoRope(torch.nn.Module):
    """Cosines and sines that turn nothing, for transformers' attention."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*positions.shape, 8)
        return torch.ones(shape), torch.zeros(shape)


def test_layers_may_differ_in_everything() -> None:
    """Blocks of three models in one: other heads, K/V heads, head_dim, windows, norms and biases, one without rope."""
    models = [model_of(name) for name in ("llama", "qwen3-hybrid", "qwen2")]
    parts = [read(model, "reference") for model in models]
    unturned = parts[2].blocks[0].with_attention(rope=None)
    mixed = Decoder(
        parts[0].embedding, [parts[0].blocks[0], parts[1].blocks[1], unturned], parts[1].norm, parts[1].head
    )
    assert mixed.windows == [None, 5]
    shapes = [(block.attention.kv_heads, block.attention.head_dim) for block in mixed.blocks]
    assert len(set(shapes)) > 1

    layers = [models[0].model.layers[0], models[1].model.layers[1], models[2].model.layers[0]]
    ropes = [models[0].model.rotary_emb, models[1].model.rotary_emb, NoRope()]
    positions = torch.arange(len(TOKENS))[None]
    distance = positions.T - positions
    with torch.no_grad():
        x = models[0].model.embed_tokens(torch.tensor([TOKENS]))
        for layer, rope, window in zip(layers, ropes, (None, 5, None), strict=True):
            hidden = (distance < 0) | (distance >= (window or len(TOKENS)))
            mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))[None, None]
            x = layer(x, attention_mask=mask, position_embeddings=rope(x, positions))
        expected = models[1].lm_head(models[1].model.norm(x))[0]
    assert error(reference.forward(mixed, TOKENS), expected) < ROUNDING


# Planted mistakes


def in_attention(**changes: Any) -> Callable[[Block], Block]:
    return lambda block: block.with_attention(**changes)


def in_rope(**changes: Any) -> Callable[[Block], Block]:
    def change(block: Block) -> Block:
        assert block.attention.rope is not None
        return in_attention(rope=replace(block.attention.rope, **changes))(block)

    return change


def in_feed_forward(**changes: Any) -> Callable[[Block], Block]:
    return lambda block: replace(block, feed_forward=replace(block.feed_forward, **changes))


def in_router(**changes: Any) -> Callable[[Block], Block]:
    return lambda block: in_feed_forward(router=replace(block.feed_forward.router, **changes))(block)


def rescaled(block: Block) -> Block:
    return in_attention(scale=block.attention.scale * 1.01)(block)


def other_window(step: int) -> Callable[[Block], Block]:
    def change(block: Block) -> Block:
        assert block.attention.window is not None
        return in_attention(window=block.attention.window + step)(block)

    return change


def swapped_norms(block: Block) -> Block:
    return in_attention(q_norm=block.attention.k_norm, k_norm=block.attention.q_norm)(block)


def swapped_keys_and_values(block: Block) -> Block:
    q, k, v = block.attention.qkv.parts
    return in_attention(qkv=Matrix((q, v, k)))(block)


def swapped_gate_and_up(block: Block) -> Block:
    gate, up = block.feed_forward.gate_up.parts
    return replace(block, feed_forward=replace(block.feed_forward, gate_up=Matrix((up, gate))))


def without_bias(matrix: Matrix) -> Matrix:
    parts = []
    for part in matrix.parts:
        parts.append(torch.nn.Linear(part.in_features, part.out_features, bias=False))
        parts[-1].weight = part.weight
    return Matrix(tuple(parts))


def swapped_block_norms(block: Block) -> Block:
    return replace(block, mixer_norm=block.feed_forward_norm, feed_forward_norm=block.mixer_norm)


def other_eps(block: Block) -> Block:
    return replace(block, mixer_norm=Norm(block.mixer_norm.weight, block.mixer_norm.eps + 1e-3))


def turned_back(block: Block) -> Block:
    rope = block.attention.rope
    assert rope is not None

    class Backwards(Rope):
        def tables(self, positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
            cosine, sine = super().tables(positions, device)
            return cosine, -sine

    return in_attention(rope=Backwards(rope.module, rope.dim, rope.limit))(block)


MISTAKES: list[tuple[str, str, Callable[[Block], Block]]] = [
    ("scale", "llama", rescaled),
    ("no rope", "llama", in_attention(rope=None)),
    ("turned backwards", "llama", turned_back),
    ("keys and values swapped", "llama", swapped_keys_and_values),
    ("gate and up swapped", "llama", swapped_gate_and_up),
    ("block norms swapped", "llama", swapped_block_norms),
    ("eps", "llama", other_eps),
    ("window of one more", "mistral", other_window(1)),
    ("window of one less", "mistral", other_window(-1)),
    ("no window", "mistral", in_attention(window=None)),
    ("no q norm", "qwen3", in_attention(q_norm=None)),
    ("no k norm", "qwen3", in_attention(k_norm=None)),
    ("q and k norms swapped", "qwen3", swapped_norms),
    ("no bias of q, k, v", "qwen2", lambda b: in_attention(qkv=without_bias(b.attention.qkv))(b)),
    ("no bias of out", "llama-attention-biases", lambda b: in_attention(out=without_bias(b.attention.out))(b)),
    (
        "no bias of down",
        "llama-mlp-biases",
        lambda b: in_feed_forward(down=without_bias(b.feed_forward.down))(b),
    ),
    ("no softcap", "gemma2", in_attention(softcap=None)),
    ("no norm of values", "gemma4", in_attention(v_norm=None)),
    ("no output scale", "gemma4", lambda b: replace(b, output_scale=None)),
    ("no norm of what attention adds", "gemma3", lambda b: replace(b, mixer_out_norm=None)),
    ("no norm of what the feed-forward adds", "olmo2", lambda b: replace(b, feed_forward_out_norm=None)),
    ("no residual scale", "granite", lambda b: replace(b, residual_scale=1.0)),
    ("no sinks", "granite-swa", in_attention(sinks=None)),
    ("no clip", "olmo-clipped", in_attention(clip=None)),
    ("pairs half a head apart", "glm", in_rope(interleaved=False)),
    ("neighbouring pairs", "llama", in_rope(interleaved=True)),
    ("half of the rotation", "glm", in_rope(dim=4)),
    ("not parallel", "cohere", lambda b: replace(b, parallel=False)),
    ("no query scale", "ministral3", in_attention(query_scale=None)),
    ("norms before the rotation", "hunyuan", in_attention(norms_after_rope=False)),
    ("another activation", "arcee", in_feed_forward(activation=Activation.RELU)),
    ("no output gate", "afmoe", in_attention(output_gate=None)),
    ("fewer experts", "mixtral", in_router(top_k=1)),
    ("weights as they are", "qwen3-moe", in_router(normalised=False)),
    ("weights with sum 1", "qwen2-moe", in_router(normalised=True)),
    ("sum 1 over all experts", "gpt-oss", in_router(scoring=Scoring.SOFTMAX)),
    ("softmax, not sigmoids", "minimax-m2", in_router(scoring=Scoring.SOFTMAX)),
    ("no bias of the choice", "minimax-m2", in_router(choice_bias=None)),
    ("no groups", "glm4-moe-groups", in_router(groups=1, kept_groups=1)),
    ("more groups", "glm4-moe-groups", in_router(kept_groups=3)),
    ("groups by their best", "glm4-moe-groups", in_router(group_best=1)),
    ("no scale", "glm4-moe-groups", in_router(scale=1.0)),
    ("other noise", "phimoe-jitter", in_router(jitter=0.01)),
    ("no mixer", "phimoe-jitter", in_router(scoring=Scoring.CHOSEN)),
    ("gate and up one after another", "gpt-oss", in_feed_forward(alternate=False)),
    ("no biases of experts", "gpt-oss", lambda b: in_feed_forward(down=replace(b.feed_forward.down, bias=None))(b)),
    ("another factor", "gpt-oss", in_feed_forward(constants=(7.0, 1.6))),
    ("no shared expert", "glm4-moe-groups", in_feed_forward(shared=None)),
    ("no gate of the shared expert", "qwen2-moe", in_feed_forward(shared_gate=None)),
    ("another constant", "apertus", lambda b: in_feed_forward(constants=(0.9, *b.feed_forward.constants[1:]))(b)),
]


@pytest.mark.parametrize(("row", "change"), [pytest.param(row, change, id=name) for name, row, change in MISTAKES])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.thinned(1, most=25)
def test_a_mistake_is_seen(row: str, change: Callable[[Block], Block], layer: int) -> None:
    """One block read wrongly changes logits far more than rounding does."""
    model = model_of(row)
    description = read(model, "reference")
    blocks = list(description.blocks)
    if row == "gemma2" and blocks[layer].attention.softcap is None:
        pytest.skip("this transformers leaves the softcap out")
    blocks[layer] = change(blocks[layer])
    wrong = replace(description, blocks=blocks)
    assert error(reference.forward(wrong, TOKENS), stock_logits(model, TOKENS)) > 10 * ROUNDING


def test_heads_that_do_not_fit_are_refused() -> None:
    attention: Attention = read(model_of("llama"), "reference").blocks[0].attention
    with pytest.raises(ValueError, match="4 query heads cannot share 3 K/V heads evenly"):
        replace(attention, kv_heads=3)
    with pytest.raises(ValueError, match=r"qkv is a matrix \(64, 32\), where \(out, in\) must be \(96, None\)"):
        replace(attention, kv_heads=4)
