"""Draws, penalties and log-probabilities of the kernels, against `sampling.pick`, transformers and the twins."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from flat import Part, rows_of, tables_of
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples, slow_but, slow_interpreted
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lookahead.backends import sampling
from lookahead.backends.graph.kernels import adjust, draw, filters, reference_draw, top
from lookahead.backends.graph.kernels.rows import Rows
from lookahead.backends.graph.ops import Drawing
from lookahead.config import SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAST = 1 - 2**-53
"""The largest uniform."""
Settings = Sequence[Sequence[float]]


def drawn(logits: torch.Tensor, rows: Settings) -> list[int]:
    """The kernels' targets of logits [R, V], with one line of settings per row."""
    logits = logits.to(DEVICE)
    count, vocabulary = logits.shape
    tops = top.TopWork(count, vocabulary, 8, DEVICE)
    out = torch.full((count, 17), -1, dtype=torch.int32, device=DEVICE)
    top.top_tokens(logits, out, tops)
    before = out.clone()
    work = filters.DrawWork(count, vocabulary, DEVICE, logits.dtype)
    draw.draw_targets(logits, torch.tensor(rows, dtype=torch.float64, device=DEVICE), out, tops, work)
    assert torch.equal(out[:, 1:], before[:, 1:])
    return out[:, 0].tolist()


def picked(logits: torch.Tensor, rows: Settings) -> list[int]:
    """The same by `sampling.pick`."""
    found = []
    for line, (temperature, top_k, top_p, min_p, uniform) in zip(logits, rows, strict=True):
        params = SamplingParams(temperature, int(top_k), top_p, min_p)
        found.append(int(sampling.pick(line[None], params, [uniform])[0]))
    return found


def some_logits(vocabulary: int, rows: int, kind: str, seed: int = 0) -> torch.Tensor:
    """[rows, V]. In `ties` there are only eight different values, in `holes` most tokens are impossible."""
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(rows, vocabulary, generator=generator)
    if kind == "ties":
        return (x / 3).round().to(torch.bfloat16)
    if kind == "holes":
        return x.masked_fill(torch.rand(x.shape, generator=generator) < 0.9, -torch.inf)
    return x.to(getattr(torch, kind))


KINDS = ["float32", "float16", "bfloat16", "ties", "holes"]
ROWS: Settings = [
    (1.0, 0, 1.0, 0.0, 0.37),
    (0.7, 0, 1.0, 0.07, 0.93),
    (0.0, 0, 1.0, 0.0, 0.5),
    (1.3, 1, 1.0, 0.0, 0.61),
    (1.0, 40, 1.0, 0.0, 0.29),
    (1.0, 0, 0.8713, 0.0, 0.55),
    (1.0, 0, 0.8713, 0.0, -1.0),
    (1.0, 0, 1e-9, 0.0, 0.55),
    (1.0, 31, 0.7171, 0.011, 0.83),
    (0.001, 5, 0.4567, 0.0, 0.7),
    (100.0, 0, 0.6123, 0.0, 0.48),
    (100.0, 200, 1.0, 0.0, LAST),
    (2.0, 250, 0.9871, 0.0, LAST),
    (2.0, 250, 0.9871, 0.0, 0.0),
    (1.0, 0, 1.0, 0.0, 0.0),
    (1.0, 0, 1.0, 0.0, LAST),
    (1.0, 100000, 0.95123, 1.0, 0.4),
]
"""Every setting alone and with others, with its largest and smallest values. None puts a mass near a limit."""


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("ties", ROWS[::2]),
        *(slow_interpreted(kind, ROWS) for kind in ("ties", "float32", "bfloat16", "float16", "holes")),
    ],
)
def test_draws_are_those_of_pick(kind: str, rows: Settings) -> None:
    logits = some_logits(1301, len(rows), kind)
    assert drawn(logits, rows) == picked(logits, rows)


@settings(max_examples=examples(6), deadline=None)
@given(st.data())
def test_draws_with_any_settings(data: st.DataObject) -> None:
    """Without coincidences: no mass is within rounding of a limit."""
    vocabulary = data.draw(st.sampled_from([8, 129, 333]))
    logits = some_logits(vocabulary, 3, data.draw(st.sampled_from(KINDS)), data.draw(st.integers(0, 99)))
    logits[:, 0] = 1.0
    share = st.floats(0.001, 0.999).map(lambda x: x * 0.99971)
    rows = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from([0.001, 0.3, 1.0, 1.7, 100.0]),
                st.integers(0, vocabulary + 1),
                st.just(1.0) | share,
                st.just(0.0) | share,
                st.floats(0, LAST),
            ),
            min_size=3,
            max_size=3,
        )
    )
    assert drawn(logits, rows) == picked(logits, rows)


@pytest.mark.parametrize("kind", slow_but(["float32", "ties"], "ties"))
@pytest.mark.slow
def test_more_candidates_than_fit_in_a_tile(kind: str) -> None:
    """At a high temperature nearly all tokens are candidates, and tied ones stand in several tiles."""
    rows = [(100.0, 0, 0.6123, 0.0, 0.97), (100.0, 4400, 0.9321, 0.0, 0.51), (100.0, 4400, 1.0, 0.0, LAST)]
    logits = some_logits(5000, 3, kind)
    assert drawn(logits, rows) == picked(logits, rows)
    noise = torch.empty(3, 5000).exponential_(generator=torch.Generator().manual_seed(0))
    assert multinomial(logits, rows, noise, range(3)) == multinomial(logits, rows, noise, range(3), reference_draw)


@pytest.mark.slow
def test_of_tied_tokens_top_p_keeps_the_lower_ids() -> None:
    """Half of 12 equal tokens stay, wherever they stand; the uniforms visit all of them."""
    logits = torch.full((12, 3000), -20.0)
    logits[:, torch.arange(12) * 250 + 3] = 10.0
    rows = [(1.0, 0, 0.4999, 0.0, (i + 0.5) / 12) for i in range(12)]
    assert drawn(logits, rows) == [250 * (i // 2) + 3 for i in range(12)]


def test_zeros_of_both_signs_are_tied() -> None:
    logits = torch.full((6, 40), -1.0)
    logits[:, [4, 9, 17]] = torch.tensor([-0.0, 0.0, -0.0])
    rows = [(1.0, 2, 1.0, 0.0, (i + 0.5) / 6) for i in range(6)]
    assert drawn(logits, rows) == [4, 4, 9, 9, 17, 17]


def test_a_row_does_not_depend_on_its_place() -> None:
    logits = some_logits(1301, len(ROWS), "bfloat16")
    whole = picked(logits, ROWS)
    for order in ([8], random.Random(0).sample(range(len(ROWS)), 7)):
        assert drawn(logits[order], [ROWS[i] for i in order]) == [whole[i] for i in order]


@pytest.mark.slow
def test_scratch_may_be_larger_and_used_before() -> None:
    """What an earlier call left there does not matter."""
    work = filters.DrawWork(5, 333, DEVICE)
    tops = top.TopWork(5, 333, 8, DEVICE)
    for seed, count in ((0, 5), (1, 2)):
        logits = some_logits(333, count, "float32", seed)
        rows = ROWS[5 - count + 4 : 9]
        out = torch.zeros(count, 17, dtype=torch.int32, device=DEVICE)
        top.top_tokens(logits.to(DEVICE), out, tops)
        line = torch.tensor(rows, dtype=torch.float64, device=DEVICE)
        draw.draw_targets(logits.to(DEVICE), line, out, tops, work)
        assert out[:, 0].tolist() == picked(logits, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.thinned(1, most=2)
def test_top_tokens_are_the_best_and_of_equal_ones_the_lowest(dtype: torch.dtype, strided: bool) -> None:
    """Also of both signs, of zeros of both signs, and in rows that do not follow one another."""
    generator = torch.Generator().manual_seed(0)
    memory = torch.full((6, 2176 if strided else 2111), 99.0, dtype=dtype)
    logits = memory[:, :2111]
    logits.copy_(torch.randn(6, 2111, generator=generator))
    logits[1] = logits[1].mul(4).round()  # many are equal
    logits[2] = -logits[2].abs() - 0.5
    logits[3] = torch.where(torch.arange(2111) % 3 == 0, -0.0, torch.where(torch.arange(2111) % 3 == 1, 0.0, -1.0))
    logits[4, 5:] = -torch.inf
    logits[5] *= 1e-30
    tops = top.TopWork(6, 2111, 8, DEVICE)
    out = torch.full((6, 17), -1, dtype=torch.int32, device=DEVICE)
    moved = memory.to(DEVICE)[:, :2111]
    assert moved.stride(0) == memory.shape[1]
    top.top_tokens(moved, out, tops)
    best = logits.float().sort(dim=1, descending=True, stable=True).indices[:, :8].to(torch.int32)
    found = out.cpu()
    assert found[:, 0].tolist() == best[:, 0].tolist()
    finite = torch.arange(8) < torch.tensor([8, 8, 8, 8, 5, 8])[:, None]
    assert torch.equal(found[:, 1:9].where(finite, -1), best.where(finite, -1))
    assert found[:, :9].min() >= 0
    assert found[:, :9].max() < 2111


@pytest.mark.filterwarnings("ignore:invalid value")
def test_rows_of_nan_end_and_stay_in_the_vocabulary() -> None:
    """A batch's padding may have such logits."""
    logits = torch.full((3, 120), float("nan"))
    logits[1] = -torch.inf
    logits[2, ::2] = 1.0
    found = drawn(logits, [(1.0, 5, 0.9, 0.0, 0.5)] * 3)
    assert all(0 <= token < 120 for token in found)


def multinomial(
    logits: torch.Tensor, rows: Settings, noise: torch.Tensor, depths: Sequence[int], module: Any = draw
) -> list[int]:
    """The targets of `multinomial_targets`."""
    logits = logits.to(DEVICE)
    count, vocabulary = logits.shape
    tops = top.TopWork(count, vocabulary, 8, DEVICE)
    out = torch.full((count, 17), -1, dtype=torch.int32, device=DEVICE)
    top.top_tokens(logits, out, tops)
    work = filters.DrawWork(count, vocabulary, DEVICE, logits.dtype)
    line = torch.tensor(rows, dtype=torch.float64, device=DEVICE)
    which = torch.tensor(depths, dtype=torch.int32, device=DEVICE)
    module.multinomial_targets(logits, line, noise.to(DEVICE), which, out, tops, work)
    return out[:, 0].tolist()


def warped(scores: torch.Tensor, line: Sequence[float]) -> torch.Tensor:
    """transformers' own processors on scores [1, V], with a stable sort, as CUDA's is."""
    temperature, top_k, top_p, min_p, _ = line
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        chain.append(TopKLogitsWarper(int(top_k)))
    if top_p < 1:
        chain.append(TopPLogitsWarper(top_p))
    if min_p:
        chain.append(MinPLogitsWarper(min_p))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "sort", partial(torch.sort, stable=True))
        return chain(torch.zeros(1, 0, dtype=torch.long), scores)


@pytest.mark.parametrize("kind", ["ties", *map(slow_interpreted, ["float32", "bfloat16", "float16", "holes"])])
@pytest.mark.slow
def test_draws_with_noise_are_those_of_multinomial(kind: str) -> None:
    """`torch.multinomial` with the same noise, after transformers' warpers, and the slow twin."""
    logits = some_logits(1301, len(ROWS), kind)
    noise = torch.empty(4, 1301)
    for depth in range(4):
        noise[depth].exponential_(generator=torch.Generator().manual_seed(depth))
    depths = [i % 5 - 1 for i in range(len(ROWS))]
    expected = logits.float().argmax(dim=-1).tolist()
    for row, (line, depth) in enumerate(zip(ROWS, depths, strict=True)):
        if depth >= 0 and line[0] > 0:
            probs = warped(logits[row : row + 1].float(), line).softmax(dim=-1)
            generator = torch.Generator().manual_seed(depth)
            expected[row] = int(torch.multinomial(probs, 1, generator=generator))
    assert multinomial(logits, ROWS, noise, depths) == expected
    assert multinomial(logits, ROWS, noise, depths, reference_draw) == expected


@pytest.mark.slow
def test_of_tied_tokens_transformers_keeps_the_higher_ids() -> None:
    logits = torch.full((12, 3000), -20.0)
    places = torch.arange(12) * 250 + 3
    logits[:, places] = 10.0
    line = (1.0, 0, 0.4999, 0.0, 0.0)
    noise = torch.ones(12, 3000)
    noise[torch.arange(12), places] = 0.01
    expected = [int((warped(x[None], line).softmax(dim=-1) / q).argmax()) for x, q in zip(logits, noise, strict=True)]
    assert multinomial(logits, [line] * 12, noise, range(12)) == expected
    assert expected[:6] == [int(places[6])] * 6
    assert expected[6:] == places[6:].tolist()


@pytest.mark.slow
def test_draws_where_few_tokens_are_allowed() -> None:
    """Rows of -inf but for one, two or five tokens; top-k and top-p then keep what there is."""
    for count in (1, 2, 5):
        allowed = torch.tensor([3, 1024, 1300, 77, 2900])[:count]
        logits = torch.full((len(ROWS), 3000), -torch.inf)
        logits[:, allowed] = some_logits(count, len(ROWS), "float32")
        found = drawn(logits, ROWS)
        assert found == picked(logits, ROWS)
        assert set(found) <= set(allowed.tolist())


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.thinned(1, most=1)
def test_log_probs(kind: str) -> None:
    logits = some_logits(1301, 5, kind).to(DEVICE)
    tops = top.TopWork(5, 1301, 8, DEVICE)
    out = torch.zeros(5, 17, dtype=torch.int32, device=DEVICE)
    top.top_tokens(logits, out, tops)
    out[:, 0] = torch.tensor([0, 1300, 77, 1024, 5])
    found = [module.log_probs(logits, out, tops, torch.zeros(5, 9, device=DEVICE)) for module in (draw, reference_draw)]
    assert torch.allclose(found[0], found[1], rtol=1e-6, atol=2e-6)
    assert torch.equal(found[0][:, 1:].argsort(dim=1, descending=True, stable=True)[:, 0].cpu(), torch.zeros(5).long())


def adjust_inputs(vocabulary: int = 1301) -> dict[str, Any]:
    """The rows of three trees: of 5 nodes, of 4 behind a chunk of one token, and a root whose logits stay as they are.

    Seven rows have logits.
    """
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 3, (4, vocabulary), generator=generator)
    counts += torch.randint(0, 2, counts.shape, generator=generator) << 30
    bias = torch.zeros(4, vocabulary)
    bias[2, 5], bias[2, 900] = 3.0, -100.0
    inputs = {
        "logits": some_logits(vocabulary, 7, "float32"),
        "needed": torch.tensor([0, 2, 4, 6, 9, 8, 10]),
        "tokens": torch.tensor([7, 8, 9, 9, 8, 4, 1200, 3, 1300, 3, 3]),
        "table_slot_of": torch.tensor([2, 0, -1]),
        "rules": torch.tensor([[1.3, 0.5, 0.25, 1.0], [1.0, 0.0, 0.3, 0.0], [1.5, 1.0, 1.0, 1.0]]),
        "counts": counts,
        "bias": bias,
        "masks": torch.randint(-(2**31), 2**31, (3, (vocabulary + 31) // 32), generator=generator),
        "mask_of": torch.tensor([-1, 2, -1, 0, 1, -1, 0]),
    }
    whole = {name: x if x.is_floating_point() else x.to(torch.int32) for name, x in inputs.items()}
    trees = [(0, 0, [-1, 0, 1, 1, 2]), (0, 1, [-1, 0, 1, 1]), (0, 0, [-1])]
    return {name: x.to(DEVICE) for name, x in whole.items()} | {"rows": rows_below(trees)}


def rows_below(trees: Sequence[tuple[int, int, Sequence[int]]]) -> Rows:
    """The rows of trees, each given as its cached tokens, its chunk's length and its parents."""
    parts = [Part(length, chunk, parents) for length, chunk, parents in trees]
    return rows_of(parts, tables_of(parts, DEVICE)[0], (1, 16))


def test_adjust_is_its_twin() -> None:
    inputs = adjust_inputs()
    shape = inputs["logits"].shape
    found = [m.adjust(out=torch.zeros(shape, device=DEVICE), **inputs) for m in (adjust, reference_draw)]
    assert torch.allclose(found[0], found[1], rtol=1e-6, atol=1e-6)
    whole = found[0]
    half = inputs | {"logits": inputs["logits"].half()}
    found = [m.adjust(out=torch.zeros(shape, device=DEVICE), **half) for m in (adjust, reference_draw)]
    assert torch.allclose(found[0], found[1], rtol=1e-6, atol=1e-6)
    adjust.adjust(out=inputs["logits"], **inputs)
    assert torch.equal(inputs["logits"], whole)


@pytest.mark.parametrize("module", [adjust, reference_draw])
def test_adjust_as_transformers_and_a_plain_count_have_it(module: Any) -> None:
    """From texts, so that the bits of `counts` and the way up the tree are checked, too."""
    vocabulary, prompt, output = 60, [3, 4, 4, 50], [7, 7, 3, 9]
    tokens = [1, 2, 9, 11, 7, 12]  # a chunk of two, and the root, which repeats the output's last token
    below = {2: [], 4: [11, 7], 5: [12]}
    logits = some_logits(vocabulary, 3, "float32")
    counts = torch.zeros(1, vocabulary, dtype=torch.int32)
    counts[0, prompt] = reference_draw.IN_PROMPT
    counts = counts.to(DEVICE)
    pairs = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0] * 4 + [-1], [*output, -1])]
    module.count_tokens(counts, *pairs)
    bias = torch.zeros(1, vocabulary, device=DEVICE)
    bias[0, 11] = 2.5
    masks = torch.full((1, 2), -1, dtype=torch.int32, device=DEVICE)
    masks[0, 1] ^= 1 << 5

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    found = module.adjust(
        logits.to(DEVICE), torch.zeros(3, vocabulary, device=DEVICE), ints(list(below)),
        rows_below([(0, 2, [-1, 0, 1, 0])]), ints(tokens), ints([0]),
        torch.tensor([[1.7, 0.6, 0.2, 1.0]], device=DEVICE), counts, bias, masks, ints([-1, -1, 0]),
    ).cpu()  # fmt: skip
    for row, branch in enumerate(below.values()):
        text = torch.tensor([prompt + output + branch])
        expected = RepetitionPenaltyLogitsProcessor(1.7)(text, logits[row : row + 1].clone())[0]
        for token, count in Counter(output + branch).items():
            expected[token] -= 0.2 * count + 0.6
        expected[11] += 2.5
        if row == 2:
            expected[37] = -torch.inf
        assert torch.allclose(found[row], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("module", [adjust, reference_draw])
def test_count_tokens_counts_repeated_pairs(module: Any) -> None:
    counts = torch.zeros(3, 40, dtype=torch.int32, device=DEVICE)
    counts[1, 5] = reference_draw.IN_PROMPT + 2
    slots, tokens = [1, 1, -1, 2, 1, 0], [5, 5, 5, 39, 6, -1]
    module.count_tokens(counts, *(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (slots, tokens)))
    assert counts[1, 5] == reference_draw.IN_PROMPT + 4
    assert counts[2, 39] == 1
    assert counts[1, 6] == 1
    assert int((counts != 0).sum()) == 3


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.thinned(1, most=1)
def test_drawing_chooses_kernels_or_twins(compiled: bool) -> None:
    drawing = Drawing(4, 333, DEVICE, compiled=compiled)
    logits = some_logits(333, 4, "float32")
    rows, there = ROWS[4:8], logits.to(DEVICE)
    tops = top.TopWork(4, 333, 8, DEVICE)
    out = torch.zeros(4, 17, dtype=torch.int32, device=DEVICE)
    top.top_tokens(there, out, tops)
    drawing.draw(there, torch.tensor(rows, dtype=torch.float64, device=DEVICE), out, tops)
    assert out[:, 0].tolist() == picked(logits, rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("vocabulary", [49152, 151936])
@pytest.mark.parametrize("kind", KINDS)
def test_large_vocabularies_and_a_captured_graph(vocabulary: int, kind: str) -> None:
    """Replays give the targets of the uncaptured run, and those of `sampling.pick` for what the settings then are."""
    logits = some_logits(vocabulary, len(ROWS), kind).to(DEVICE)
    count = len(ROWS)
    tops = top.TopWork(count, vocabulary, 8, DEVICE)
    work = filters.DrawWork(count, vocabulary, DEVICE, logits.dtype)
    out = torch.zeros(count, 17, dtype=torch.int32, device=DEVICE)
    lines = torch.tensor(ROWS, dtype=torch.float64, device=DEVICE)

    def step() -> None:
        top.top_tokens(logits, out, tops)
        draw.draw_targets(logits, lines, out, tops, work)

    step()
    assert out[:, 0].tolist() == picked(logits, ROWS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    turned = [*ROWS[1:], ROWS[0]]
    lines.copy_(torch.tensor(turned, dtype=torch.float64))
    graph.replay()
    assert out[:, 0].tolist() == picked(logits, turned)
