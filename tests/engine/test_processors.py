"""Verification token by token, on toy models: every call that one-by-one decoding would make, and no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples
from reference import Model
from toy import counting_model, decode, rows_of, settings_of_a_text, toy_model

from lookahead.algorithm.output import StepOutput
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.successors import MAX_SUCCESSORS
from lookahead.algorithm.tree import TokenTree
from lookahead.algorithm.verify import Verdict
from lookahead.backends.base import StepInput
from lookahead.backends.sampling import top_tokens
from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.engine.processors import PathVerifier, Rule, uniform_draw
from lookahead.engine.request import Request, StepResult
from lookahead.engine.step import verdicts_of

CONFIG = LookaheadConfig(window=3, ngram=4, guesses=4, budget=40)
VOCABULARY = 30
COUNTING = [*range(5, 20), 5]
"""The counting model goes on with 6, 7, 8, ...: the text has told, and guesses are right at once."""


def sequence_of(prompt: Sequence[int], count: int, eos: frozenset[int] = frozenset()) -> DecodingSequence:
    return DecodingSequence(prompt, CONFIG, rules=StopRules(count, eos))


def ran(sequence: DecodingSequence, model: Model) -> StepResult:
    """One sequence's part of a step, as the engine has it when a verifier is to verify."""
    tree = sequence.propose()
    logits = torch.tensor(rows_of(sequence, tree, model), dtype=torch.float64).log().float()
    top = top_tokens(logits, MAX_SUCCESSORS).numpy()
    item = StepInput(0, (), tree, SamplingParams(), (), MAX_SUCCESSORS, logits=True)
    return StepResult(Request(sequence), item, StepOutput(logits.argmax(dim=-1).tolist(), top, logits))


def run(
    verifier: Callable[[Sequence[StepResult]], list[Verdict]], rows: Sequence[DecodingSequence], model: Model
) -> int:
    """Step all rows until they have ended. Returns the number of steps."""
    steps = 0
    while running := [sequence for sequence in rows if sequence.finish_reason is None]:
        parts = [ran(sequence, model) for sequence in running]
        for one, verdict in zip(parts, verifier(parts), strict=True):
            assert [one.input.tree.tokens[node] for node in verdict.path] == verdict.tokens[:-1]
            one.request.sequence.accept_step(one.input.tree, one.output, verdict)
            one.request.sequence.count_step(one.input.tree, verdict)
        steps += 1
    return steps


def padded(prompts: Sequence[Sequence[int]], pad: int = 0) -> torch.Tensor:
    longest = max(map(len, prompts))
    return torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])


class Log:
    """Remembers what it was asked. As a processor it forbids the last two tokens of each row; as a criterion it ends
    a row at `ends`."""

    def __init__(self, ends: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self.ends = ends
        self.asked: list[list[list[int]]] = []
        self.scores: list[Any] = []

    def __call__(self, ids: torch.Tensor, scores: Any) -> torch.Tensor:
        self.asked.append(ids.tolist())
        self.scores.append(scores)
        if self.ends is not None:
            return self.ends(ids)
        return scores.scatter(1, ids[:, -2:], -torch.inf)


def one_by_one(
    model: Model, prompt: Sequence[int], count: int, processor: Log | None = None, criterion: Log | None = None
) -> list[int]:
    """What `PathVerifier` must give: a loop with one token per step."""
    ids = torch.tensor([list(prompt)])
    for _ in range(count):
        scores = torch.tensor([model(ids[0].tolist())], dtype=torch.float64).log().float()
        if processor is not None:
            scores = processor(ids, scores)
        ids = torch.cat([ids, scores.argmax(dim=-1, keepdim=True)], dim=1)
        if criterion is not None and bool(criterion(ids, None)[0]):
            break
    return ids[0, len(prompt) :].tolist()


def divisible(by: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda ids: ids[:, -1] % by == 0


# One row


@settings(max_examples=examples(60), deadline=None)
@given(case=settings_of_a_text())
def test_without_a_rule_it_verifies_as_a_sequence_does(case: tuple[Model, list[int], int]) -> None:
    model, prompt, count = case
    ours, own = sequence_of(prompt, count, frozenset([1])), sequence_of(prompt, count, frozenset([1]))
    run(PathVerifier([ours], torch.tensor([prompt]), Rule()), [ours], model)
    decode(own, model)
    assert (ours.output, ours.finish_reason, ours.stats.steps) == (own.output, own.finish_reason, own.stats.steps)


@settings(max_examples=examples(60), deadline=None)
@given(case=settings_of_a_text())
def test_processor_sees_the_calls_of_one_by_one(case: tuple[Model, list[int], int]) -> None:
    """In the same order, with the same scores, and nothing of guesses that were refused."""
    model, prompt, count = case
    log, wanted = Log(), Log()
    sequence = sequence_of(prompt, count)
    run(PathVerifier([sequence], torch.tensor([prompt]), Rule(processors=log)), [sequence], model)
    assert sequence.output == one_by_one(model, prompt, count, wanted)
    assert log.asked == wanted.asked
    for a, b in zip(log.scores, wanted.scores, strict=True):
        torch.testing.assert_close(a, b)


@settings(max_examples=examples(60), deadline=None)
@given(case=settings_of_a_text(), by=st.integers(2, 6))
def test_criterion_sees_the_calls_of_one_by_one(case: tuple[Model, list[int], int], by: int) -> None:
    model, prompt, count = case
    log, wanted = Log(divisible(by)), Log(divisible(by))
    sequence = sequence_of(prompt, count)
    run(PathVerifier([sequence], torch.tensor([prompt]), Rule(criteria=log)), [sequence], model)
    assert sequence.output == one_by_one(model, prompt, count, criterion=wanted)
    assert log.asked == wanted.asked
    assert sequence.finish_reason == ("length" if len(sequence.output) == count else "stop")


def test_block_is_accepted_and_asked_about_token_by_token() -> None:
    """One step, twelve tokens, twelve calls."""
    processor, criterion = Log(), Log(lambda ids: ids[:, -1] == 17)
    sequence = sequence_of(COUNTING, 20)
    rule = Rule(processors=lambda ids, scores: (processor(ids, scores), scores)[1], criteria=criterion)
    assert run(PathVerifier([sequence], torch.tensor([COUNTING]), rule), [sequence], counting_model(VOCABULARY)) == 1
    assert sequence.output == list(range(6, 18))
    assert [len(rows[0]) for rows in processor.asked] == list(range(16, 28))
    assert [len(rows[0]) for rows in criterion.asked] == list(range(17, 29))
    assert sequence.finish_reason == "stop"


@pytest.mark.parametrize("last", range(6, 20))
@pytest.mark.parametrize("how", ["eos", "length", "stop", "ends"])
def test_every_end_at_every_place_of_a_block(how: str, last: int) -> None:
    """End token, limit, criterion, and the sequence's own test: none lets a token through that comes after."""
    rules = StopRules(last - 5 if how == "length" else 40, frozenset([last] if how == "eos" else []))
    ends = (lambda token: token == last) if how == "ends" else None
    sequence = DecodingSequence(COUNTING, CONFIG, rules=rules, ends=ends)
    criterion = (lambda ids, scores: ids[:, -1] == last) if how == "stop" else None
    steps = run(
        PathVerifier([sequence], torch.tensor([COUNTING]), Rule(criteria=criterion)),
        [sequence],
        counting_model(VOCABULARY),
    )
    assert sequence.output == list(range(6, last + 1))
    assert sequence.finish_reason == {"ends": "stop"}.get(how, how)
    assert steps == 1


def test_kept_scores_and_logits() -> None:
    """One [1, V] float32 tensor each per position: the scores as processed, the logits as they came."""
    sequence = sequence_of(COUNTING, 9)
    seen: list[int | None] = []

    def criterion(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        seen.append(None if scores is None else len(scores))
        return torch.zeros(1, dtype=torch.bool)

    rule = Rule(lambda ids, scores: scores + 1, criteria=criterion, keep_scores=True, keep_logits=True)
    verifier = PathVerifier([sequence], torch.tensor([COUNTING]), rule)
    model = counting_model(VOCABULARY)
    run(verifier, [sequence], model)
    assert [tuple(part.shape) for part in verifier.scores] == [(1, VOCABULARY)] * 9
    text = list(COUNTING)
    for token, scores, logits in zip(sequence.output, verifier.scores, verifier.logits, strict=True):
        assert scores.dtype == logits.dtype == torch.float32
        torch.testing.assert_close(logits[0], torch.tensor(model(text)).log().float())
        torch.testing.assert_close(scores, logits + 1)
        text.append(token)
    assert seen == list(range(1, 10))
    assert not PathVerifier([sequence], torch.tensor([COUNTING]), Rule()).scores


def test_scores_are_float32_whatever_the_default_is() -> None:
    sequence = sequence_of(COUNTING, 3)
    verifier = PathVerifier([sequence], torch.tensor([COUNTING]), Rule(keep_logits=True))
    torch.set_default_dtype(torch.float16)
    try:
        run(verifier, [sequence], counting_model(VOCABULARY))
    finally:
        torch.set_default_dtype(torch.float32)
    assert {part.dtype for part in verifier.logits} == {torch.float32}


def test_processor_may_change_what_it_is_given() -> None:
    """The step's own logits stay: another row of the tree, or the sources, may want them."""
    sequence = sequence_of(COUNTING, 3)

    def spoil(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.fill_(0)

    part = ran(sequence, counting_model(VOCABULARY))
    before = part.output.logits.clone()
    PathVerifier([sequence], torch.tensor([COUNTING]), Rule(processors=spoil))([part])
    assert torch.equal(part.output.logits, before)


# Draws


@settings(max_examples=examples(60), deadline=None)
@given(
    case=settings_of_a_text(),
    seed=st.integers(0, 999),
    temperature=st.sampled_from([0.5, 1.0]),
    top_k=st.integers(0, 3),
)
def test_uniform_draws_are_those_of_the_sequence(
    case: tuple[Model, list[int], int], seed: int, temperature: float, top_k: int
) -> None:
    """Verified along its path or by the sequence itself, the same seed gives the same tokens."""
    model, prompt, count = case
    sampling = SamplingParams(temperature, top_k=top_k, seed=seed)
    own = DecodingSequence(prompt, CONFIG, sampling, StopRules(count))
    decode(own, model)
    verified = sequence_of(prompt, count)
    run(PathVerifier([verified], torch.tensor([prompt]), Rule(draw=uniform_draw(seed, sampling))), [verified], model)
    assert verified.output == own.output


def test_one_draw_per_position() -> None:
    """For all rows at once, also those that have ended: another row's draws must not depend on when one ends."""
    calls: list[tuple[int, ...]] = []

    def draw(scores: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(scores.shape))
        return scores.argmax(dim=-1)

    rows = [sequence_of(COUNTING, 12, frozenset([8])), sequence_of([*COUNTING, 9], 12, frozenset([8]))]
    verifier = PathVerifier(rows, padded([COUNTING, [*COUNTING, 9]]), Rule(draw=draw, pad=0))
    run(verifier, rows, counting_model(VOCABULARY))
    assert [len(row.output) for row in rows] == [3, 12]
    assert calls == [(2, VOCABULARY)] * 12


# Rows that move together


def test_rows_get_as_many_tokens_each_step() -> None:
    """The slowest sets the pace: one row's guesses are all right, the other has none."""
    model = toy_model(12, 3, order=1)
    prompts = [[1, 2, 3, 4], [5]]
    rows = [sequence_of(prompt, 20) for prompt in prompts]
    lengths = []
    verifier = PathVerifier(rows, padded(prompts), Rule(criteria=Log(lambda ids: ids[:, -1] < 0)))

    def counted(parts: Sequence[StepResult]) -> list[Verdict]:
        verdicts = verifier(parts)
        lengths.append({len(verdict.tokens) for verdict in verdicts})
        return verdicts

    assert run(counted, rows, model) < 20
    assert all(len(length) == 1 for length in lengths)
    assert [row.output for row in rows] == [one_by_one(model, prompt, 20) for prompt in prompts]
    assert verifier.ids[:, 4:].tolist() == [row.output for row in rows]


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 999), lengths=st.lists(st.integers(1, 8), min_size=2, max_size=4), by=st.integers(3, 7))
def test_row_of_a_batch_is_a_row_by_itself(seed: int, lengths: list[int], by: int) -> None:
    """With padding each row ends alone, is filled up, and is shown so as long as another goes on."""
    model = toy_model(11, seed, order=2)
    prompts = [[(seed + 3 * row + i) % 11 for i in range(length)] for row, length in enumerate(lengths)]
    rows = [sequence_of(prompt, 16) for prompt in prompts]
    log = Log(divisible(by))
    rule = Rule(processors=lambda ids, scores: scores.scatter(1, ids[:, -1:], -torch.inf), criteria=log, pad=10)
    verifier = PathVerifier(rows, padded(prompts), rule)
    run(verifier, rows, model)
    wanted = []
    for prompt in prompts:
        text = list(prompt)
        while len(text) < len(prompt) + 16 and (len(text) == len(prompt) or text[-1] % by):
            scores = torch.tensor(model(text)).log()
            scores[text[-1]] = -torch.inf
            text.append(int(scores.argmax()))
        wanted.append(text[len(prompt) :])
    assert [row.output for row in rows] == wanted
    longest = max(map(len, wanted))
    assert verifier.ids[:, -longest:].tolist() == [text + [10] * (longest - len(text)) for text in wanted]
    assert [len(asked[0]) for asked in log.asked] == [max(lengths) + n for n in range(1, longest + 1)]


def test_without_padding_rows_go_on_until_all_have_met_the_criterion() -> None:
    model = counting_model(VOCABULARY)
    prompts = [COUNTING, [*COUNTING, 11]]
    rows = [sequence_of(prompt, 20) for prompt in prompts]
    verifier = PathVerifier(rows, padded(prompts), Rule(criteria=lambda ids, scores: ids[:, -1] == 14))
    run(verifier, rows, model)
    assert [row.output for row in rows] == [list(range(6, 15)), list(range(12, 21))]
    assert [row.finish_reason for row in rows] == ["stop", "stop"]


def test_kept_scores_of_a_row_that_has_ended_are_zeros() -> None:
    prompts = [COUNTING, [*COUNTING, 11]]
    rows = [sequence_of(prompt, 6, frozenset([8])) for prompt in prompts]
    verifier = PathVerifier(rows, padded(prompts), Rule(pad=0, keep_scores=True, keep_logits=True))
    run(verifier, rows, counting_model(VOCABULARY))
    assert [len(row.output) for row in rows] == [3, 6]
    assert [bool(part[0].any()) for part in verifier.logits] == [True] * 3 + [False] * 3
    assert all(part[1].any() for part in verifier.scores)


# Several verifiers in one step


def test_each_sequence_is_verified_by_its_own_verifier() -> None:
    """Verdicts come back in the order of the step's parts, however verifiers are mixed; without one there is none."""
    model = counting_model(VOCABULARY)
    prompts = [COUNTING, [*COUNTING, 9], [*COUNTING, 12], COUNTING]
    rows = [sequence_of(prompt, 4 + row) for row, prompt in enumerate(prompts)]
    pair = PathVerifier([rows[0], rows[2]], padded([prompts[0], prompts[2]]), Rule(pad=0))
    odd = PathVerifier([rows[1]], torch.tensor([prompts[1]]), Rule(processors=lambda ids, scores: -scores))
    verifiers = dict(zip(rows, (pair, odd, pair, None), strict=True))

    def shuffled(parts: Sequence[StepResult]) -> list[Verdict | None]:
        for part in parts:
            part.request.verifier = verifiers[part.request.sequence]
        verdicts = verdicts_of(parts[::-1])[::-1]
        assert [verdict is None for verdict in verdicts] == [part.request.verifier is None for part in parts]
        return [verdict or part.request.sequence.verify(part.input.tree, part.output)
                for verdict, part in zip(verdicts, parts, strict=True)]  # fmt: skip

    run(shuffled, rows, model)
    assert rows[0].output == [6, 7, 8, 9]
    assert rows[2].output == [13, 14, 15, 16, 17, 18]
    assert rows[3].output == list(range(6, 13))
    assert rows[1].output != list(range(10, 15))
    assert pair.ids[:, -6:].tolist() == [[6, 7, 8, 9, 0, 0], [13, 14, 15, 16, 17, 18]]


def test_verification_starts_again_at_the_root_of_every_step() -> None:
    """A tree without guesses gives one token; the next call goes on from the text that the verifier itself keeps."""
    model = counting_model(VOCABULARY)
    sequence = DecodingSequence([5, 6], LookaheadConfig.autoregressive(), rules=StopRules(3))
    verifier = PathVerifier([sequence], torch.tensor([[5, 6]]), Rule())
    verdicts = []
    for _ in range(3):
        part = ran(sequence, model)
        assert isinstance(part.input.tree, TokenTree)
        (verdict,) = verifier([part])
        verdicts.append(verdict)
        sequence.accept_step(part.input.tree, part.output, verdict)
    assert [verdict.tokens for verdict in verdicts] == [[7], [8], [9]]
    assert [verdict.path for verdict in verdicts] == [[], [], []]
    assert verifier.ids.tolist() == [[5, 6, 7, 8, 9]]
