"""One request on toy models: whatever the config, the tokens of one-by-one decoding, and counters that add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from marks import examples
from reference import Model
from toy import counting_model, decode, settings_of_a_text, steps, toy_model

from lookahead.algorithm.budget import without_cost
from lookahead.algorithm.sampling import NO_DRAW
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory
from lookahead.algorithm.sources.calibration import Calibration
from lookahead.algorithm.verify import Verdict, cut_at_stop
from lookahead.config import SOURCES, LookaheadConfig, SamplingParams, StopRules

PLAIN = LookaheadConfig.autoregressive()
EVERYTHING = LookaheadConfig(window=4, ngram=4, guesses=4, budget=48)


@st.composite
def configs(draw: st.DrawFn) -> LookaheadConfig:
    """Any sources, any size, with and without a cost curve; and the presets."""
    if draw(st.integers(0, 9)) == 0:
        size = draw(st.integers(1, 8))
        return draw(st.sampled_from([LookaheadConfig.jacobi(size), LookaheadConfig.prompt_lookup(size)]))
    config = LookaheadConfig(
        window=draw(st.integers(0, 6)),
        ngram=draw(st.integers(2, 5)),
        guesses=draw(st.integers(0, 4)),
        sources=tuple(draw(st.lists(st.sampled_from(SOURCES), unique=True))),
        recycle_scope=draw(st.sampled_from(["off", "request", "model"])),
        suffix_key=draw(st.integers(1, 4)),
        suffix_branches=draw(st.integers(1, 3)),
        suffix_length=draw(st.integers(1, 6)),
        suffix_oldest=draw(st.booleans()),
    )
    budget = config.window_tokens + draw(st.integers(0, 24))
    slope = draw(st.sampled_from([None, 0.0, 0.02, 0.2, 2.0]))
    cost = None if slope is None else tuple(1 + slope * k for k in range(budget))
    return replace(config, budget=budget, step_cost=cost)


def run(
    model: Model,
    prompt: list[int],
    config: LookaheadConfig = PLAIN,
    rules: StopRules | None = None,
    sampling: SamplingParams | None = None,
    **more: object,
) -> DecodingSequence:
    """A finished sequence."""
    sequence = DecodingSequence(prompt, config, sampling, rules, **more)
    decode(sequence, model)
    return sequence


def ending(sequence: DecodingSequence) -> tuple[list[int], str | None]:
    return sequence.output, sequence.finish_reason


@settings(max_examples=examples(200), deadline=None)
@given(settings_of_a_text(), configs(), st.frozensets(st.integers(0, 4), max_size=2), st.integers(1, 40), st.data())
@example((toy_model(6, 3, order=1), [1], 24), EVERYTHING, frozenset(), 40, None)
@example((toy_model(6, 3, order=1), [1], 24), replace(EVERYTHING, ngram=2), frozenset(), 40, None)
@example((toy_model(6, 3, order=1), [1], 24), replace(EVERYTHING, window=0), frozenset(), 25, None)
@example((toy_model(6, 3, order=1), [1], 24), replace(EVERYTHING, guesses=0), frozenset(), 25, None)
def test_any_config_is_autoregressive_and_its_counters_add_up(text, config, eos, context, data) -> None:
    model, prompt, m = text
    rules = StopRules(max_tokens=m, eos_ids=eos, max_length=len(prompt) + context)
    sampling = SamplingParams()
    if data is not None and data.draw(st.booleans()):
        sampling = SamplingParams(temperature=0.9, top_k=5, top_p=0.95, seed=data.draw(st.integers(0, 99)))
    sequence = DecodingSequence(prompt, config, sampling, rules)
    trees, blocks = [], []
    for tree, tokens in steps(sequence, model):
        root = len(sequence.tokens) - len(tokens) - 1
        assert root + max(tree.depths) < rules.max_length
        assert all(parent < node for node, parent in enumerate(tree.parents))
        assert [tree.depths[parent] + 1 for parent in tree.parents[1:]] == list(tree.depths[1:])
        assert len(tree.needed) == 1 + (tree.width if config.ngram > 2 else max(0, tree.width - 1)) + len(tree.origins)
        trees.append(tree)
        blocks.append(tokens)
    assert ending(sequence) == ending(run(model, prompt, PLAIN, rules, sampling))

    stats = sequence.stats
    assert (stats.prompt_tokens, stats.generated_tokens) == (len(prompt), len(sequence.output))
    assert (stats.steps, stats.step_tokens) == (len(blocks), sum(map(len, trees)))
    assert stats.generated_tokens == stats.steps + sum(stats.accepted_by_source.values())
    assert set(stats.accepted_by_source) <= set(config.active_sources)
    deepest = max(map(len, blocks)) - 1
    assert stats.accepted_by_depth == [sum(len(b) > d + 1 for b in blocks) for d in range(deepest)]
    if config.budget == 1 or not config.active_sources:
        assert stats.steps == stats.generated_tokens


# Ends inside a block. The model counts and the prompt has counted before: blocks of 17 tokens, none of them twice.

COUNT = counting_model(100)
COUNTED = [*range(60), 99]
LONG = LookaheadConfig(window=3, ngram=4, guesses=4, budget=64, suffix_length=16)
SHORT = LookaheadConfig(window=3, ngram=3, guesses=4, budget=32, suffix_length=3, recycle_scope="request")


def blocks_of(config: LookaheadConfig, m: int) -> list[int]:
    return decode(DecodingSequence(COUNTED, config, rules=StopRules(max_tokens=m)), COUNT)


def test_the_blocks_below_are_long() -> None:
    assert max(blocks_of(LONG, 50)) == 17
    assert set(blocks_of(SHORT, 50)) >= {1, 4}


@pytest.mark.parametrize("config", [LONG, SHORT, LookaheadConfig.paper(3, 4, 4, prompt=True)])
@pytest.mark.parametrize("end", range(1, 40))
@pytest.mark.thinned(1, most=30)
def test_every_way_to_end_at_every_offset(end: int, config: LookaheadConfig) -> None:
    """The output counts from 0, so token end - 1 is the one at which the sequence ends."""
    stops: list[int] = []

    def stop(token: int) -> bool:
        stops.append(token)
        return token == end - 1

    for rules, ends, reason in [
        (StopRules(max_tokens=end), None, "length"),
        (StopRules(max_length=len(COUNTED) + end), None, "length"),
        (StopRules(eos_ids=frozenset({end - 1, 98})), None, "eos"),
        (StopRules(), stop, "stop"),
    ]:
        sequence = run(COUNT, COUNTED, config, rules, ends=ends)
        assert ending(sequence) == (list(range(end)), reason)
        assert sequence.stats.generated_tokens == end
        if ends is None:
            assert ending(run(COUNT, COUNTED, PLAIN, rules)) == ending(sequence)
    assert stops == list(range(end))  # asked once per token that stands, in order


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=8),
    st.integers(1, 12),
    st.frozensets(st.integers(0, 5), max_size=2),
    st.sampled_from([None, 3]),
)
@example([1, 2], 2, frozenset(), None)
@example([1, 2], 3, frozenset(), None)
def test_the_fast_path_of_the_stop_rules_agrees_with_cut_at_stop(
    tokens: list[int], room: int, eos: frozenset[int], stop: int | None
) -> None:
    ends = None if stop is None else lambda token: token == stop
    sequence = DecodingSequence([7], PLAIN, rules=StopRules(max_tokens=room, eos_ids=eos), ends=ends)
    found = sequence.apply_stop_rules(Verdict(list(range(1, len(tokens))), tokens))
    count, reason = cut_at_stop(tokens, 0, room, sequence.rules, ends)
    assert (found.tokens, found.path) == (tokens[:count], list(range(1, count)))
    assert found.finish_reason == reason


def test_the_last_step_drafts_nothing_that_cannot_count() -> None:
    """With one token left there is nothing to draft, and no window to feed."""
    sequence = DecodingSequence(COUNTED, LONG, rules=StopRules(max_tokens=1))
    tree = sequence.propose()
    assert (len(tree), tree.width, list(tree.needed)) == (1, 0, [0])
    sequence = DecodingSequence([*COUNTED, 0], LONG, rules=StopRules(max_tokens=3))
    tree = sequence.propose()
    assert tree.width == 3
    assert max(tree.depths[tree.branch :]) == 2


@pytest.mark.parametrize("config", [EVERYTHING, replace(EVERYTHING, ngram=2), replace(EVERYTHING, window=1)])
def test_no_node_stands_outside_the_context(config: LookaheadConfig) -> None:
    """The window takes part exactly as long as its last column does not reach past the context."""
    model, prompt = toy_model(8, seed=1, order=2), [3, 1, 4, 1, 5]
    widths = set()
    for limit in range(len(prompt) + 1, len(prompt) + 20):
        sequence = DecodingSequence(prompt, config, rules=StopRules(max_length=limit))
        for tree, tokens in steps(sequence, model):
            root = len(sequence.tokens) - len(tokens) - 1
            assert root + max(tree.depths) < limit
            last = root + config.window + config.ngram - 3
            widths.add(tree.width)
            assert tree.width == (config.window if last < limit and root + 2 < limit else 0)
        assert len(sequence.tokens) == limit
    assert widths == {0, config.window}


def test_a_prompt_has_to_leave_room() -> None:
    with pytest.raises(ValueError, match="the prompt has no tokens; give at least one"):
        DecodingSequence([])
    for length in (8, 9):
        with pytest.raises(
            ValueError, match=f"the prompt has {length} tokens and the model's context holds 8; shorten"
        ):
            DecodingSequence([1] * length, rules=StopRules(max_length=8))
    assert ending(run(COUNT, [1] * 7, EVERYTHING, StopRules(max_length=8))) == ([2], "length")


def test_the_prompt_is_copied() -> None:
    prompt = [1, 2]
    assert run(COUNT, prompt, EVERYTHING, StopRules(max_tokens=5)).output == [3, 4, 5, 6, 7]
    assert prompt == [1, 2]


# A source at a time, on a text that repeats itself.

CYCLE = toy_model(6, seed=3, order=1)


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_alone_saves_steps_and_is_credited(source: str) -> None:
    config = LookaheadConfig(window=4, ngram=4, guesses=4, budget=48, sources=(source,))
    sequence = run(CYCLE, [1, 2], config, StopRules(max_tokens=60))
    assert sequence.stats.steps < 40
    assert set(sequence.stats.accepted_by_source) == {source}
    assert sequence.output == run(CYCLE, [1, 2], PLAIN, StopRules(max_tokens=60)).output


@pytest.mark.parametrize(
    "config",
    [
        PLAIN,
        replace(EVERYTHING, sources=("jacobi", "prompt"), guesses=0),
        replace(EVERYTHING, sources=("jacobi",), window=0),
        replace(EVERYTHING, window=0, sources=("jacobi", "recycle"), guesses=0, recycle_scope="off"),
        replace(EVERYTHING, window=0, step_cost=tuple(range(1, 49))),
        LookaheadConfig(window=0, budget=1),
    ],
)
def test_no_draft_tokens_is_one_token_a_step(config: LookaheadConfig) -> None:
    sequence = run(CYCLE, [1, 2], config, StopRules(max_tokens=20))
    assert sequence.stats.steps == sequence.stats.generated_tokens == 20
    assert sequence.stats.accepted_by_source == {}


# Sampling.


def test_another_seed_gives_another_text() -> None:
    model, rules = toy_model(8, seed=2, order=2, sharpness=0.5), StopRules(max_tokens=30)
    outputs = {
        tuple(run(model, [1, 2], config, rules, SamplingParams(temperature=1.0, seed=seed)).output)
        for seed in range(6)
        for config in (PLAIN, EVERYTHING, replace(EVERYTHING, window=0))
    }
    assert len(outputs) == 6


def test_uniforms_belong_to_output_positions() -> None:
    """The root predicts the next position, a draft token at depth d the d-th after that; the window draws nothing."""
    sequence = DecodingSequence([*COUNTED, 0], LONG, SamplingParams(temperature=0.1), StopRules(max_tokens=40))
    tree = sequence.propose()
    uniforms = dict(zip(tree.needed, sequence.uniforms(tree), strict=True))
    window = [node for node in tree.needed if 0 < node < tree.branch]
    assert len(window) == 3
    assert all(uniforms.pop(node) == NO_DRAW for node in window)
    by_depth = {tree.depths[node]: u for node, u in uniforms.items()}
    assert all(uniforms[node] == by_depth[tree.depths[node]] for node in uniforms)
    assert len(set(by_depth.values())) == len(by_depth) == max(tree.depths[tree.branch :]) + 1
    assert all(0 <= u < 1 for u in by_depth.values())
    assert DecodingSequence(COUNTED, LONG).uniforms(tree) == []


# A step that several take part in.


@settings(max_examples=examples(60), deadline=None)
@given(config=configs(), together=st.integers(1, 40), prompt=st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_a_share_of_the_budget_is_not_exceeded(config: LookaheadConfig, together: int, prompt: list[int]) -> None:
    weighed = config if config.step_cost is not None else without_cost(config)
    for pads in (False, True):
        assert DecodingSequence(prompt, weighed).share(together, pads) <= max(1, config.budget // together)
        assert DecodingSequence(prompt, replace(config, step_cost=None)).share(together, pads) == config.budget
    if config.step_cost is None:
        assert DecodingSequence(prompt, weighed).propose() == DecodingSequence(prompt, config).propose()


def test_a_share_has_a_window_where_there_is_room_for_both() -> None:
    sequence = DecodingSequence(COUNTED * 2, without_cost(LookaheadConfig(suffix_length=128)))
    shares = [sequence.share(together, False) for together in (2, 4, 8, 32, 128, 500)]
    assert shares == [64, 32, 16, 4, 1, 1]
    assert [sequence.layout(share).width for share in shares] == [5, 0, 0, 0, 0, 0]


# Shared state.


@pytest.mark.parametrize("sources", [("recycle",), SOURCES])
def test_a_warm_model_takes_fewer_steps_to_the_same_tokens(sources: tuple[str, ...]) -> None:
    """A text without a pattern: only what the first request left behind can speed up the second."""
    model, prompt, rules = toy_model(40, seed=7, order=3), [1, 2, 3], StopRules(max_tokens=40)
    config, memory = replace(EVERYTHING, sources=sources), SharedMemory()
    cold = run(model, prompt, config, rules, memory=memory)
    warm = run(model, prompt, config, rules, memory=memory)
    assert cold.output == warm.output == run(model, prompt, PLAIN, rules).output
    assert warm.stats.compression > 1.5 * cold.stats.compression
    assert len(memory.successors)


def test_scope_request_stays_cold() -> None:
    model, prompt, rules = toy_model(40, seed=7, order=3), [1, 2, 3], StopRules(max_tokens=40)
    config, memory = replace(EVERYTHING, recycle_scope="request"), SharedMemory()
    first, second = (run(model, prompt, config, rules, memory=memory) for _ in range(2))
    assert first.stats == second.stats
    assert (len(memory.successors), memory.calibration.rates) == (0, Calibration().rates)


def test_without_a_memory_every_request_is_cold() -> None:
    first, second = (run(CYCLE, [1, 2], EVERYTHING, StopRules(max_tokens=40)) for _ in range(2))
    assert first.stats == second.stats


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(settings_of_a_text(), configs(), st.sampled_from([0.0, 1.0])), min_size=2, max_size=4))
def test_shared_warmth_never_changes_tokens(requests) -> None:
    """Requests of different models and configs leave all kinds of wrong rows and rates to each other."""
    memory = SharedMemory()
    for (model, prompt, m), config, temperature in requests:
        sampling, rules = SamplingParams(temperature=temperature, seed=1), StopRules(max_tokens=m)
        sequence = run(model, prompt, config, rules, sampling, memory=memory)
        assert sequence.output == run(model, prompt, PLAIN, rules, sampling).output
        assert all(0 <= rate <= 1 for rate in memory.calibration.rates)


# How rates are learned.


@given(st.floats(0.001, 1.0), st.lists(st.booleans(), max_size=60), st.integers(1, 60))
def test_rates_stay_probabilities(prior: float, trials: list[bool], repeats: int) -> None:
    calibration = Calibration()
    origin = calibration.set_prior("jacobi", [prior])
    for right in trials * repeats:
        calibration.record_trial(origin, right)
        assert 0 <= calibration.rates[origin] <= 1


def test_rates_follow_what_is_seen() -> None:
    calibration = Calibration()
    first, second = (calibration.set_prior(source, [0.5, 0.5]) for source in ("prompt", "suffix"))
    for trial in range(2000):
        calibration.record_trial(first, trial % 4 == 0)
        calibration.record_trial(second + 1, True)
    assert calibration.rates[first] == pytest.approx(0.25, abs=0.02)
    assert calibration.rates[second + 1] > 0.99
    assert (calibration.rates[first + 1], calibration.rates[second]) == (0.5, 0.5)


def test_a_prior_counts_as_eight_trials() -> None:
    calibration = Calibration()
    origin = calibration.set_prior("prompt", [0.5])
    calibration.record_trial(origin, True)
    assert calibration.rates[origin] == pytest.approx((8 * 0.5 + 1) / 9)


def test_a_prior_is_set_once() -> None:
    """The next request finds what the last one learned."""
    calibration = Calibration()
    origin = calibration.set_prior("recycle", [0.5, 0.2])
    calibration.record_trial(origin, True)
    learned = list(calibration.rates)
    assert calibration.set_prior("recycle", [0.5, 0.2]) == origin
    assert list(calibration.rates) == learned


def test_a_draft_token_is_learned_from_only_if_its_parent_was_accepted() -> None:
    """The prompt counts 0 1 2 3, the model goes 0 1 9: right, wrong, and of the third draft token nothing is known."""
    after = {5: 0, 0: 1, 1: 9, 9: 9}
    model: Model = lambda tokens: [float(t == after.get(tokens[-1], 7)) for t in range(10)]  # noqa: E731
    memory = SharedMemory()
    config = LookaheadConfig(window=0, ngram=4, guesses=2, budget=8, sources=("prompt",))
    sequence = DecodingSequence([0, 1, 2, 3, 5], config, rules=StopRules(max_tokens=9), memory=memory)
    stepping = steps(sequence, model)
    next(stepping)
    before = list(memory.calibration.rates)
    tree, tokens = next(stepping)
    assert (list(tree.tokens), tokens) == ([0, 1, 2, 3], [1, 9])
    sequence.learn_while_running()
    moved = [memory.calibration.rates[origin] - before[origin] for origin in tree.origins]
    assert moved[0] > 0 > moved[1]
    assert moved[2] == 0


def test_it_goes_on_where_nothing_drafts() -> None:
    drawn = DecodingSequence([1, 2], PLAIN, SamplingParams(temperature=0.5))
    assert drawn.never_drafts
    ahead = drawn.next_uniforms(3)
    assert [drawn.uniforms(drawn.propose())[0], *ahead] == [*drawn._uniforms.between(0, 4)]
    assert DecodingSequence([1, 2], PLAIN).next_uniforms(3) == []
    for config in (EVERYTHING, LookaheadConfig.paper(3, 3, 3), LookaheadConfig.jacobi(4), LookaheadConfig(window=0)):
        assert not DecodingSequence([1, 2], config).never_drafts
