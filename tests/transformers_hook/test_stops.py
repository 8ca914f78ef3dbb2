"""What ends a row: end tokens, stop strings, time, and criteria of the user's, asked once per accepted token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from marks import slow_but
from pairs import Pair, blocks, decoding, inside, output_of
from transformers import MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria

MANY = 30


def first(row: list[int], at: int) -> int:
    """The token at `at` or after it that comes there for the first time."""
    return next(token for place, token in enumerate(row) if place >= at and token not in row[:place])


# End tokens


@pytest.mark.parametrize(
    ("at", "pad"), [(0, {}), (1, {"pad_token_id": 5}), (6, {"pad_token_id": 0}), (6, {}), (20, {})]
)
@pytest.mark.thinned(1, most=3)
def test_end_token(both: Any, llama: Any, prompt: Any, text: Any, at: int, pad: dict[str, int]) -> None:
    eos = first(text[0], at)
    pair = both(llama, prompt, max_new_tokens=MANY, eos_token_id=eos, **pad).same()
    assert output_of(prompt, pair.ours)[0] == text[0][: text[0].index(eos) + 1]


@pytest.mark.parametrize("pad", [{}, {"pad_token_id": 0}, {"pad_token_id": 5}])
@pytest.mark.thinned(1, most=1)
def test_end_tokens_of_rows_at_different_lengths(both: Any, llama: Any, batch: Any, text: Any, pad: Any) -> None:
    """Rows go on at their own pace; shorter ones are filled up with the padding, or with the first end token."""
    ends = [first(text[0], 3), first(text[1], 17), first(text[2], 9)]
    pair = both(llama, batch, max_new_tokens=MANY, eos_token_id=ends, **pad).same()
    assert len({stats.generated_tokens for stats in pair.hook.stats}) > 1
    assert pair.compression > 1


@pytest.mark.parametrize("ends", slow_but([(11, 16, 26, 29), tuple(range(11, 30, 2))], (11, 16, 26, 29)))
def test_end_token_inside_a_block(both: Any, counting: Any, count_up: dict[str, Any], ends: tuple[int, ...]) -> None:
    """The guesses behind it were right, too, and yet are not taken."""
    for eos in ends:
        pair = both(counting, count_up, max_new_tokens=MANY, eos_token_id=eos).same()
        assert output_of(count_up, pair.ours) == [list(range(11, eos + 1))]
        assert pair.hook.stats[0].steps <= 2 + (eos - 10) // 17


def test_end_token_inside_a_block_of_a_random_model(both: Any, llama: Any, prompt: Any) -> None:
    accepted = blocks(llama, prompt, max_new_tokens=60)
    place = inside(accepted) - 1
    both(llama, prompt, max_new_tokens=60, eos_token_id=[token for block in accepted for token in block][place]).same()


def test_end_tokens_of_the_model(both: Any, make_model: Any, prompt: Any, text: Any) -> None:
    model = make_model(eos_token_id=[first(text[0], 12), first(text[0], 8)])
    pair = both(model, prompt, max_new_tokens=MANY).same()
    assert len(output_of(prompt, pair.ours)[0]) < MANY
    assert pair.compression > 1


def test_padding_without_an_end_token(both: Any, llama: Any, batch: Any) -> None:
    both(llama, batch, max_new_tokens=12, pad_token_id=3).same()


def test_end_token_criterion_of_the_user(both: Any, llama: Any, batch: Any, text: Any) -> None:
    rule = EosTokenCriteria(eos_token_id=torch.tensor([first(text[1], 6)]))
    both(llama, batch, max_new_tokens=MANY, pad_token_id=2, stopping_criteria=StoppingCriteriaList([rule])).same()


class SecondEnd(EosTokenCriteria):
    """An end token counts only where the row has said one before."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        said = torch.isin(input_ids, self.eos_token_id)
        return said[:, -1] & (said.sum(dim=-1) > 1)


@pytest.mark.thinned(1, most=1)
def test_end_token_criterion_of_another_kind(both: Any, llama: Any, inputs: dict[str, Any], text: Any) -> None:
    """What a criterion says counts, not the class that it was made from."""
    rule = SecondEnd(torch.tensor([next(token for token in text[0] if text[0].count(token) > 1)]))
    pair = both(llama, inputs, max_new_tokens=40, pad_token_id=2, stopping_criteria=StoppingCriteriaList([rule]))
    assert pair.same().hook.stats[0].generated_tokens < 40


# Stop strings


def decoded(tokenizer: Any, row: list[int]) -> str:
    return tokenizer.decode(row)


@pytest.mark.parametrize("many", [False, True])
def test_stop_string_that_spans_tokens(
    both: Any, llama: Any, tokenizer: Any, prompt: Any, text: Any, many: bool
) -> None:
    """Three characters from the middle of one token to the middle of the next but one, first seen there."""
    whole = decoded(tokenizer, text[0])
    start = next(
        i for i in range(8, len(whole) - 4) if whole.index(whole[i : i + 4]) == i and "\ufffd" not in whole[i : i + 4]
    )
    stop = whole[start : start + 4]
    stops = ["never said", stop] if many else stop
    pair = both(llama, prompt, max_new_tokens=MANY, stop_strings=stops, tokenizer=tokenizer).same()
    assert stop in decoded(tokenizer, output_of(prompt, pair.ours)[0])
    assert len(output_of(prompt, pair.ours)[0]) < MANY
    assert stop not in tokenizer.get_vocab()


@pytest.mark.parametrize("ends", slow_but([(13, 18, 25), tuple(range(13, 26, 3))], (13, 18, 25)))
def test_stop_string_inside_a_block(
    both: Any, counting: Any, tokenizer: Any, count_up: dict[str, Any], ends: tuple[int, ...]
) -> None:
    """Wherever it ends in a block of 17, nothing comes after it."""
    for last in ends:
        stop = decoded(tokenizer, [last - 1, last])
        pair = both(counting, count_up, max_new_tokens=MANY, stop_strings=[stop], tokenizer=tokenizer).same()
        assert output_of(count_up, pair.ours)[0][-1] <= last
        assert pair.hook.stats[0].steps == 2  # one of them is the prompt's own


@pytest.mark.parametrize("end", [{}, {"eos_token_id": 119, "pad_token_id": 1}])
@pytest.mark.thinned(1, most=1)
def test_stop_strings_in_a_batch(both: Any, llama: Any, tokenizer: Any, batch: Any, text: Any, end: Any) -> None:
    """With padding a row ends alone; without, it goes on until every row has said one."""
    stops = [decoded(tokenizer, [first(row, at)]) for row, at in zip(text, (4, 9, 14), strict=True)]
    pair = both(llama, batch, max_new_tokens=MANY, stop_strings=stops, tokenizer=tokenizer, **end).same()
    assert len(output_of(batch, pair.ours)[0]) < MANY


def test_stop_strings_need_the_tokenizer(llama: Any, prompt: Any) -> None:
    for hook in ({}, {"custom_generate": decoding()}):
        with pytest.raises(ValueError, match="tokenizer"):
            llama.generate(**prompt, stop_strings=["x"], **hook)


# Time


def test_no_time_is_one_token(both: Any, llama: Any, batch: Any, prompt: Any) -> None:
    for inputs in (prompt, batch):
        pair = both(llama, inputs, max_new_tokens=MANY, max_time=1e-9).same()
        assert len(output_of(inputs, pair.ours)[0]) == 1


def test_some_time(llama: Any, batch: Any) -> None:
    """When it is over, what is there is the beginning of what would have come."""
    whole = llama.generate(**batch, max_new_tokens=120, do_sample=False)
    part = llama.generate(**batch, max_new_tokens=120, do_sample=False, max_time=0.02, custom_generate=decoding())
    assert part.shape[1] < whole.shape[1]
    assert torch.equal(part, whole[:, : part.shape[1]])


# Criteria of the user's


class Seventh(StoppingCriteria):
    """Remembers nothing: a row ends at a token that can be divided by 7."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % 7 == 0


class Log(StoppingCriteria):
    """Remembers every call, and ends after `calls` of them, or never."""

    def __init__(self, calls: int = 10**6) -> None:
        self.calls = calls
        self.seen: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append((input_ids.tolist(), None if scores is None else len(scores)))
        done = len(self.seen) >= self.calls
        return torch.full((len(input_ids),), done, device=input_ids.device)


class Sure(StoppingCriteria):
    """Looks at the scores: a row ends when its best token has at least this probability."""

    def __init__(self, least: float) -> None:
        self.least = least

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return scores[-1].softmax(dim=-1).amax(dim=-1) > self.least


def rules(*criteria: StoppingCriteria) -> StoppingCriteriaList:
    return StoppingCriteriaList(criteria)


@pytest.mark.parametrize("end", [{}, {"eos_token_id": 119, "pad_token_id": 1}], ids=["no eos", "eos"])
@pytest.mark.thinned(1, most=2)
def test_criterion_without_a_memory(both: Any, llama: Any, inputs: dict[str, Any], end: Any) -> None:
    """Without an end token there is no padding: stock lets rows that have met it go on until all have."""
    pair = both(llama, inputs, max_new_tokens=MANY, stopping_criteria=rules(Seventh()), **end).same()
    assert len(output_of(inputs, pair.ours)[0]) < MANY


def check_log(pair: Pair, inputs: dict[str, Any]) -> None:
    stock, ours = (made["stopping_criteria"][0].seen for made in (pair.made_stock, pair.made_ours))
    assert ours == stock
    lengths = [len(rows[0]) for rows, _ in ours]
    length = inputs["input_ids"].shape[1]
    assert lengths == list(range(length + 1, pair.tokens.shape[1] + 1))


@pytest.mark.parametrize("calls", [1, 13, 10**6])
@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.thinned(1, most=2)
def test_criterion_is_called_once_per_token(
    both: Any, llama: Any, inputs: dict[str, Any], calls: int, scores: bool
) -> None:
    pair = both(
        llama,
        inputs,
        max_new_tokens=28,
        fresh=lambda: {"stopping_criteria": rules(Log(calls))},
        return_dict_in_generate=scores,
        output_scores=scores,
    ).same()
    check_log(pair, inputs)
    if calls > 28 and len(inputs["input_ids"]) == 1:
        assert pair.compression > 1


def test_calls_while_rows_end_one_by_one(both: Any, llama: Any, batch: Any, text: Any) -> None:
    """A row that has ended is still shown, with its padding, as long as another one goes on."""
    ends = {"eos_token_id": [first(text[0], 3), first(text[1], 17)], "pad_token_id": 2}
    pair = both(llama, batch, max_new_tokens=30, fresh=lambda: {"stopping_criteria": rules(Log())}, **ends).same()
    check_log(pair, batch)


def test_no_call_behind_the_end(both: Any, counting: Any, count_up: Any) -> None:
    """A block is accepted at once, and yet asked about token by token, up to the one that ends it."""
    fresh = lambda: {"stopping_criteria": rules(Log())}  # noqa: E731
    pair = both(counting, count_up, max_new_tokens=MANY, eos_token_id=17, fresh=fresh).same()
    check_log(pair, count_up)
    assert pair.hook.stats[0].steps == 2  # one of them is the prompt's own


@pytest.mark.parametrize("end", [{}, {"eos_token_id": 119, "pad_token_id": 1}], ids=["no eos", "eos"])
@pytest.mark.thinned(1, most=1)
def test_criterion_that_looks_at_scores(both: Any, llama: Any, inputs: dict[str, Any], end: Any) -> None:
    wants = {"return_dict_in_generate": True, "output_scores": True}
    pair = both(llama, inputs, max_new_tokens=MANY, stopping_criteria=rules(Sure(0.25)), **wants, **end).same()
    assert len(output_of(inputs, pair.ours)[0]) < MANY


@pytest.mark.parametrize("least", [0.1, 0.15])
@pytest.mark.thinned(1, most=1)
def test_criterion_of_an_assistant(both: Any, llama: Any, prompt: Any, least: float) -> None:
    """A draft model of assisted generation ends where it is not sure enough; it may be ours that is asked."""
    wants = {"return_dict_in_generate": True, "output_scores": True}
    assists = {"is_assistant": True, "assistant_confidence_threshold": least}
    pair = both(llama, prompt, max_new_tokens=MANY, **assists, **wants).same()
    assert len(output_of(prompt, pair.ours)[0]) < MANY


@pytest.mark.parametrize("more", [(), (5,), (25,)], ids=str)
@pytest.mark.thinned(1, most=2)
def test_length_criterion_of_the_user(both: Any, llama: Any, inputs: dict[str, Any], more: tuple[int, ...]) -> None:
    """It takes the place of the limit; of several the shortest counts."""
    length = inputs["input_ids"].shape[1]
    limits = rules(*(MaxLengthCriteria(length + n) for n in (15, *more)))
    pair = both(llama, inputs, max_new_tokens=MANY, stopping_criteria=limits).same()
    assert len(output_of(inputs, pair.ours)[0]) == min((15, *more))


def test_criteria_and_sampling(both: Any, llama: Any, batch: Any) -> None:
    pair = both(
        llama,
        batch,
        max_new_tokens=24,
        do_sample=True,
        temperature=0.5,
        eos_token_id=[20, 21, 22, 23, 24],
        pad_token_id=1,
        fresh=lambda: {"stopping_criteria": rules(Log())},
    ).same()
    check_log(pair, batch)
