"""The Python interface on a tiny random model: every form of prompt, every ending, always the same tokens."""

from __future__ import annotations

import copy
import gc
import re
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import slow_but
from pairs import in_threads

import lookahead
from lookahead import Completion, LookaheadConfig, LookaheadModel, Piece
from lookahead.algorithm.cost import CostCurve
from lookahead.config import METHODS
from lookahead.engine.request_stream import RequestStream
from lookahead.engine.settings import RequestSettings
from lookahead.loading import fitting

Plain = Callable[[Any, list[int], int], list[int]]

PROMPTS = ("the fox", "once more", "a dog and a fox jumps over the naïve café", "end")
CHAT = [{"role": "system", "content": "be lazy"}, {"role": "user", "content": "jump"}]
TOKENS = 32
READABLE = "the fox"  # its greedy output has no broken character


@pytest.fixture
def lm(model: Any, tokenizer: Any, settings: LookaheadConfig) -> LookaheadModel:
    """Loaded afresh, so that nothing is warm."""
    return lookahead.load((model, tokenizer), config=settings)


@pytest.fixture(scope="module")
def warm_lm(model: Any, tokenizer: Any, settings: LookaheadConfig) -> LookaheadModel:
    """Shared by tests of calls that decode nothing."""
    return lookahead.load((model, tokenizer), config=settings)


def open_slots(lm: LookaheadModel) -> int:
    return len(lm.backend._index)


def soon_free(lm: LookaheadModel) -> bool:
    """Whether all slots are free, at the latest after the step that is running."""
    for _ in range(1000):
        if not open_slots(lm):
            return True
        time.sleep(0.01)
    return False


# Loading


def test_load_measures_the_cost_of_a_step_once(
    make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))
    measured = []
    measure = fitting.measure

    def counted(backend: Any, sizes: Any, quick: bool) -> CostCurve:
        assert not quick
        measured.append(backend)
        return replace(measure(backend, (1, 2, 8)), stable=True)  # whatever else runs beside the tests

    monkeypatch.setattr(fitting, "measure", counted)
    log: list[str] = []
    first = lookahead.load((make_model(), tokenizer), log=log.append)
    assert len(measured) == 1
    assert len(log) == 1
    assert len(list((tmp_path / "step-cost").iterdir())) == 1

    second = lookahead.load((make_model(), tokenizer), log=log.append)
    assert len(measured) == 1
    assert len(log) == 1
    assert second.default_config == first.default_config

    lookahead.load((make_model(hidden_size=64), tokenizer))  # another model has another cost
    assert len(measured) == 2
    assert second.generate("fox", max_tokens=9).token_ids == first.generate("fox", max_tokens=9).token_ids


def test_a_given_config_is_taken_as_it_is(
    model: Any, tokenizer: Any, settings: LookaheadConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "measure", lambda backend: pytest.fail("measured although a config was given"))
    lm = lookahead.load((model, tokenizer), config=settings)
    assert lm.generate("fox", max_tokens=1).config is settings


# Exactness and forms of the prompt


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.thinned(1, most=2)
def test_greedy_equals_transformers(lm: LookaheadModel, model: Any, plain: Plain, prompt: str) -> None:
    done = lm.generate(prompt, max_tokens=TOKENS)
    assert isinstance(done, Completion)
    assert done.token_ids == plain(model, lm.encode(prompt), TOKENS)
    assert done.text == lm.tokenizer.decode(done.token_ids, skip_special_tokens=True)
    assert done.finish_reason == "length"
    assert done.method == "lookahead"
    assert done.stats.generated_tokens == len(done.token_ids) == TOKENS
    assert done.stats.prompt_tokens == len(lm.encode(prompt))
    assert done.stats.steps < TOKENS  # blocks were accepted, so the test is about them
    assert done.stats.seconds >= done.stats.first_token_seconds > 0


def test_text_is_one_user_message_unless_raw(lm: LookaheadModel, model: Any, plain: Plain) -> None:
    bare = lm.tokenizer("the fox")["input_ids"]
    assert lm.encode("the fox") == lm.encode([{"role": "user", "content": "the fox"}])
    assert lm.encode("the fox", raw=True) == bare != lm.encode("the fox")
    assert lm.generate("the fox", raw=True, max_tokens=9).token_ids == plain(model, bare, 9)


@pytest.mark.parametrize("form", ["text", "ids", "chat"])
@pytest.mark.thinned(1, most=1)
def test_batch_equals_one_at_a_time(lm: LookaheadModel, model: Any, plain: Plain, form: str) -> None:
    forms: dict[str, list[Any]] = {
        "text": list(PROMPTS),
        "ids": [lm.encode(p) for p in PROMPTS],
        "chat": [CHAT, CHAT[1:], [*CHAT, {"role": "assistant", "content": "no"}, CHAT[1]]],
    }
    prompts = forms[form]
    assert len({len(lm.encode(p)) for p in prompts}) > 1
    batch = lm.generate(prompts, max_tokens=TOKENS)
    assert isinstance(batch, list)
    for prompt, done in zip(prompts, batch, strict=True):
        assert done.token_ids == plain(model, lm.encode(prompt), TOKENS)
        alone = lm.generate(prompt, max_tokens=TOKENS)
        assert (alone.text, alone.token_ids, alone.finish_reason) == (done.text, done.token_ids, done.finish_reason)
    assert open_slots(lm) == 0


def test_batch_of_one_is_a_list(lm: LookaheadModel) -> None:
    assert [type(c) for c in lm.generate(["fox"], max_tokens=2)] == [Completion]
    assert type(lm.generate([5, 6, 7], max_tokens=2)) is Completion
    assert type(lm.generate(CHAT, max_tokens=2)) is Completion


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.thinned(1, most=2)
def test_every_method_gives_the_greedy_tokens(lm: LookaheadModel, model: Any, plain: Plain, method: str) -> None:
    done = lm.generate(list(PROMPTS), max_tokens=TOKENS, method=method)
    assert [c.token_ids for c in done] == [plain(model, lm.encode(p), TOKENS) for p in PROMPTS]
    assert {c.method for c in done} == {method}
    if method == "autoregressive":
        assert {c.stats.steps for c in done} == {TOKENS}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"top_k": 12}, marks=pytest.mark.slow),
        {"top_p": 0.8},
        pytest.param({"min_p": 0.05}, marks=pytest.mark.slow),
    ],
)
def test_a_seed_gives_the_same_tokens_by_every_method(lm: LookaheadModel, options: dict[str, Any]) -> None:
    prompts = list(PROMPTS[:3])
    common = {"max_tokens": 24, "temperature": 0.8, "seed": 3, **options}
    expected = [lm.generate(p, method="autoregressive", **common).token_ids for p in prompts]
    for method in METHODS:
        batch = lm.generate(prompts, method=method, **common)
        assert [c.token_ids for c in batch] == expected
        assert [lm.generate(p, method=method, **common).token_ids for p in prompts] == expected
    assert [lm.generate(p, max_tokens=24).token_ids for p in prompts] != expected  # it was not greedy


def test_seeds_differ(lm: LookaheadModel) -> None:
    outputs = {tuple(lm.generate("fox", max_tokens=16, temperature=1.0, seed=s).token_ids) for s in range(5)}
    assert len(outputs) == 5


# Streams


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.thinned(1, most=2)
def test_stream_joins_to_the_completion(lm: LookaheadModel, prompt: str, method: str) -> None:
    stream = lm.stream(prompt, max_tokens=TOKENS, method=method)
    with pytest.raises(RuntimeError, match="still being generated"):
        _ = stream.completion
    pieces = list(stream)
    done = stream.completion
    assert all(type(piece) is Piece and piece for piece in pieces)
    assert "".join(pieces) == done.text
    assert [t for piece in pieces for t in piece.token_ids] == done.token_ids
    assert done.token_ids == lm.generate(prompt, max_tokens=TOKENS, method=method).token_ids
    assert len(pieces) <= done.stats.steps


def test_a_piece_is_a_whole_block(lm: LookaheadModel) -> None:
    lm.generate(READABLE, max_tokens=TOKENS)  # warm, for longer blocks
    stream = lm.stream(READABLE, max_tokens=TOKENS)
    sizes = [len(piece.token_ids) for piece in stream]
    assert len(sizes) == stream.completion.stats.steps  # every token of this answer has text, so every step has a piece
    assert max(sizes) >= 3
    assert sum(sizes) == TOKENS


@pytest.mark.parametrize("method", ["lookahead", "autoregressive"])
def test_only_tokens_without_text_are_in_no_piece(lm: LookaheadModel, method: str) -> None:
    """An EOS that is accepted by itself brings no text, hence no piece."""
    for settings in ({"max_tokens": 60}, {"stop": [" qu", "ceo"]}):
        for prompt in ("the café", READABLE):
            stream = lm.stream(prompt, method=method, **{"max_tokens": TOKENS, **settings})
            pieces = list(stream)
            done = stream.completion
            streamed = [t for piece in pieces for t in piece.token_ids]
            assert "".join(pieces) == done.text
            assert streamed == done.token_ids[: len(streamed)]
            if done.finish_reason == "eos":
                assert done.token_ids[len(streamed) :] in ([], [lm.tokenizer.eos_token_id])


def test_close_interrupts_and_frees_the_slot(lm: LookaheadModel, model: Any, plain: Plain) -> None:
    stream = lm.stream("the fox", max_tokens=TOKENS)
    first = [next(stream), next(stream)]
    stream.close()
    assert open_slots(lm) == 0
    done = stream.completion
    assert done.finish_reason == "interrupted"
    assert done.token_ids == [t for piece in first for t in piece.token_ids]
    assert done.text == "".join(first)
    assert list(stream) == []
    stream.close()
    assert stream.completion is done
    assert lm.generate("end", max_tokens=TOKENS).token_ids == plain(model, lm.encode("end"), TOKENS)


def test_close_before_the_first_piece(lm: LookaheadModel) -> None:
    stream = lm.stream("the fox")
    stream.close()
    assert (stream.completion.text, stream.completion.token_ids) == ("", [])
    assert stream.completion.finish_reason == "interrupted"
    assert list(stream) == []
    assert open_slots(lm) == 0


def test_close_after_the_end_changes_nothing(lm: LookaheadModel) -> None:
    stream = lm.stream("the fox", max_tokens=4)
    list(stream)
    stream.close()
    assert stream.completion.finish_reason == "length"


def test_an_abandoned_stream_frees_its_slot(lm: LookaheadModel, model: Any, plain: Plain) -> None:
    stream = lm.stream("the fox", max_tokens=TOKENS)
    next(stream)
    del stream
    gc.collect()
    assert soon_free(lm)
    assert lm.generate("end", max_tokens=TOKENS).token_ids == plain(model, lm.encode("end"), TOKENS)


def test_an_error_in_the_model_frees_every_slot(lm: LookaheadModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(inputs: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(lm.backend, "launch", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        lm.generate(list(PROMPTS))
    with pytest.raises(RuntimeError, match="out of memory"):
        next(lm.stream("fox"))
    assert open_slots(lm) == 0


def test_interleaved_streams_are_exact(lm: LookaheadModel, model: Any, plain: Plain) -> None:
    streams = [lm.stream(p, max_tokens=8 + 12 * i) for i, p in enumerate(PROMPTS[:3])]
    for third in (0, 1, 2, 2, 1):
        next(streams[third])
    assert lm.generate("end", max_tokens=9).token_ids == plain(model, lm.encode("end"), 9)
    live = list(streams)
    while live:
        live = [stream for stream in live if next(stream, None) is not None]
    for i, (stream, prompt) in enumerate(zip(streams, PROMPTS, strict=False)):
        assert stream.completion.token_ids == plain(model, lm.encode(prompt), 8 + 12 * i)
    assert open_slots(lm) == 0


# Threads


def test_threads_use_one_model_at_once(lm: LookaheadModel, model: Any, plain: Plain) -> None:
    def job(number: int) -> Callable[[], list[list[int]]]:
        prompt, tokens = PROMPTS[number % 4], 8 + 3 * number
        if number % 3 == 0:
            return lambda: [lm.generate(prompt, max_tokens=tokens).token_ids]
        if number % 3 == 1:
            return lambda: [done.token_ids for done in lm.generate([prompt, "end"], max_tokens=tokens)]
        return lambda: [[token for piece in lm.stream(prompt, max_tokens=tokens) for token in piece.token_ids]]

    def expected(number: int) -> list[list[int]]:
        prompts = [PROMPTS[number % 4], *(["end"] if number % 3 == 1 else [])]
        return [plain(model, lm.encode(prompt), 8 + 3 * number) for prompt in prompts]

    found = in_threads([job(number) for number in range(9)])
    assert found == [expected(number) for number in range(9)]
    assert open_slots(lm) == 0


def test_an_interrupted_caller_cancels_its_requests(lm: LookaheadModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(stream: RequestStream) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RequestStream, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lm.generate(list(PROMPTS), max_tokens=500)
    assert open_slots(lm) == 0
    assert lm.engine.running == []


def test_a_dropped_model_is_freed(make_model: Callable[..., Any], tokenizer: Any, settings: LookaheadConfig) -> None:
    def used() -> list[weakref.ref[Any]]:
        lm = lookahead.load((make_model(), tokenizer), config=settings)
        lm.generate("the fox", max_tokens=4)
        next(lm.stream("the fox", max_tokens=100))
        return [weakref.ref(one) for one in (lm, lm.client, lm.backend, lm.model)]

    gone = used()
    for _ in range(100):
        gc.collect()
        if not any(one() for one in gone):
            return
        time.sleep(0.05)
    pytest.fail(f"still alive: {[one() for one in gone]}")


def test_the_former_name_of_the_client(lm: LookaheadModel) -> None:
    with pytest.warns(DeprecationWarning, match="use client"):
        assert lm.front is lm.client


def test_steps_are_those_of_one_answer(lm: LookaheadModel) -> None:
    """Each waits for its reader, and others who use the model come between."""
    steps = lm.steps("the fox", RequestSettings(max_tokens=TOKENS))
    seen = []
    for stats in steps:
        seen.append(stats.steps)
        if stats.steps == 2:
            lm.generate("end", max_tokens=3)
    assert seen == list(range(1, len(seen) + 1))
    assert stats.generated_tokens == TOKENS
    cut = lm.steps("the fox", RequestSettings(max_tokens=TOKENS))
    next(cut)
    cut.close()
    assert soon_free(lm)


# Endings


@pytest.mark.parametrize("size", slow_but([1, 2, 3, 8], 2))
@pytest.mark.slow
def test_stop_string_at_every_position(lm: LookaheadModel, size: int) -> None:
    """The expected ending comes from the whole output alone: the first token after which the text has the stop."""
    whole = lm.generate(READABLE, max_tokens=TOKENS)
    text, tokens = whole.text, whole.token_ids
    assert "\ufffd" not in text
    growing = [lm.tokenizer.decode(tokens[:n], skip_special_tokens=True) for n in range(1, len(tokens) + 1)]
    inside = 0
    for start in range(len(text) - size + 1):
        stop = text[start : start + size]
        count = next(n for n, part in enumerate(growing, start=1) if stop in part)
        stream = lm.stream(READABLE, max_tokens=TOKENS, stop=[stop])
        pieces = list(stream)
        done = stream.completion
        assert done.token_ids == tokens[:count]
        assert done.text == "".join(pieces) == text[: text.index(stop)]
        assert done.finish_reason == "stop"
        inside += done.stats.steps < count
    assert inside > len(text) // 4  # many of them ended inside, or after, an accepted block


@pytest.mark.parametrize("prompt", slow_but(PROMPTS[:3], PROMPTS[0]))
@pytest.mark.parametrize("step", slow_but([4, 15], 15))
def test_stop_strings_equal_autoregressive(lm: LookaheadModel, prompt: str, step: int) -> None:
    text = lm.generate(prompt, max_tokens=TOKENS).text
    sweep = [[text[i : i + 1 + i % 5]] for i in range(0, len(text), step)]
    several = [[text[i + 3 : i + 9], text[i : i + 4], "never"] for i in range(0, len(text) - 9, 2 * step + 1)]
    for stop in [*sweep, *several, ["never"]]:
        ours = lm.generate(prompt, max_tokens=TOKENS, stop=stop)
        other = lm.generate(prompt, max_tokens=TOKENS, stop=stop, method="autoregressive")
        assert (ours.text, ours.token_ids, ours.finish_reason) == (other.text, other.token_ids, other.finish_reason)
        assert not any(s in ours.text for s in stop)


def test_a_single_stop_string_needs_no_list(lm: LookaheadModel) -> None:
    stop = lm.generate(READABLE, max_tokens=TOKENS).text[5:7]
    alone, listed = (lm.generate(READABLE, max_tokens=TOKENS, stop=s) for s in (stop, [stop]))
    assert (alone.text, alone.token_ids, alone.finish_reason) == (listed.text, listed.token_ids, "stop")


def test_the_prompt_does_not_match_a_stop_string(lm: LookaheadModel) -> None:
    assert lm.generate("the fox", max_tokens=4, stop=["the fox", "x"]).finish_reason == "length"


@pytest.mark.slow
def test_eos_at_every_offset_of_a_block(
    make_model: Callable[..., Any], tokenizer: Any, settings: LookaheadConfig, plain: Plain
) -> None:
    model = make_model()
    lm = lookahead.load((model, tokenizer), config=settings)
    own = tokenizer.eos_token_id
    offsets = set()
    for prompt in PROMPTS[:2]:
        ids = lm.encode(prompt)
        whole = lm.generate(prompt, max_tokens=TOKENS).token_ids
        for place, token in enumerate(whole):
            if token in whole[:place]:
                continue
            model.generation_config.eos_token_id = [own, token]
            ended = lookahead.load((model, tokenizer), config=settings)
            ended.memory = lm.memory  # for longer blocks
            stream = ended.stream(prompt, max_tokens=TOKENS)
            pieces = list(stream)
            done = stream.completion
            other = ended.generate(prompt, max_tokens=TOKENS, method="autoregressive")
            assert done.token_ids == other.token_ids == plain(model, ids, TOKENS) == whole[: place + 1]
            assert done.finish_reason == other.finish_reason == "eos"
            assert done.text == other.text
            streamed = [t for piece in pieces for t in piece.token_ids]
            offsets.add(len(pieces[-1].token_ids) if streamed == done.token_ids else 1)
    assert offsets >= {1, 2, 3}  # EOS came first, second and third in its block


def test_several_eos_ids_in_a_batch(
    make_model: Callable[..., Any], tokenizer: Any, settings: LookaheadConfig, plain: Plain
) -> None:
    model = make_model()
    lm = lookahead.load((model, tokenizer), config=settings)
    picked = [
        done.token_ids[i] for i, done in zip((3, 11, 17), lm.generate(list(PROMPTS[:3]), max_tokens=18), strict=True)
    ]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *picked]
    lm = lookahead.load((model, tokenizer), config=settings)
    batch = lm.generate(list(PROMPTS), max_tokens=TOKENS)
    assert [c.token_ids for c in batch] == [plain(model, lm.encode(p), TOKENS) for p in PROMPTS]
    assert len({len(c.token_ids) for c in batch}) > 1  # they left at different times


@pytest.mark.parametrize("method", slow_but(METHODS, "lookahead"))
@pytest.mark.parametrize("step", slow_but([1, 3], 3))
def test_max_tokens_is_a_prefix(lm: LookaheadModel, method: str, step: int) -> None:
    whole = lm.generate(READABLE, max_tokens=TOKENS).token_ids
    for count in range(1, TOKENS, step):
        done = lm.generate(READABLE, max_tokens=count, method=method)
        assert done.token_ids == whole[:count]
        assert done.finish_reason == "length"


@pytest.mark.parametrize("context", slow_but([24, 25, 31], 24, 31))
@pytest.mark.thinned(1, most=1)
def test_context_full(
    make_model: Callable[..., Any], tokenizer: Any, settings: LookaheadConfig, plain: Plain, context: int
) -> None:
    model = make_model(max_position_embeddings=context)
    lm = lookahead.load((model, tokenizer), config=settings)
    ids = lm.encode("the fox", raw=True)
    for method in METHODS:
        done = lm.generate(ids, max_tokens=256, method=method)
        assert done.token_ids == plain(model, ids, context - len(ids))
        assert len(done.token_ids) == context - len(ids)
        assert done.finish_reason == "length"
    almost = (ids * context)[: context - 1]
    assert lm.generate(almost).token_ids == plain(model, almost, 1)
    for size in (context, context + 1):
        with pytest.raises(ValueError, match=rf"prompt has {size} tokens .* context holds {context}; shorten"):
            lm.generate((ids * context)[:size])


# Mistakes


@pytest.mark.parametrize("call", ["generate", "stream"])
@pytest.mark.parametrize(
    ("prompt", "given", "message"),
    [
        ([3, 9999], {}, "token id 9999 .* 0 to 119"),
        ([3, -1], {}, "token id -1"),
        ([3, "fox"], {}, "a prompt is text, chat messages or token ids"),
        ([3, 4.0], {}, "a prompt is text, chat messages or token ids"),
        ([], {}, "no tokens"),
        ("", {"raw": True}, "no tokens"),
        ("fox", {"method": "guess"}, "unknown method 'guess'; choose from lookahead, autoregressive"),
        ("fox", {"method": "jacobi", "config": LookaheadConfig()}, "belongs to method 'lookahead', not 'jacobi'"),
        ("fox", {"max_tokens": 0}, "max_tokens=0"),
        ("fox", {"temperature": -1.0}, r"temperature=-1\.0"),
        ("fox", {"top_p": 0.0}, r"top_p=0\.0"),
        ("fox", {"seed": -3}, "seed=-3"),
        ("fox", {"stop": [""]}, "non-empty str, got ''"),
        ("fox", {"stop": 5}, "must come as a sequence: pass \\['5'\\], not 5"),
        ("fox", {"config": {"window": 3}}, "must be a LookaheadConfig"),
    ],
)
def test_mistakes_are_named(
    warm_lm: LookaheadModel, call: str, prompt: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(warm_lm, call)(prompt, **given)
    assert open_slots(warm_lm) == 0


@pytest.mark.parametrize("prompt", [42, None, {"role": "user", "content": "fox"}, {3, 4}])
def test_wrong_type_of_prompt(warm_lm: LookaheadModel, prompt: Any) -> None:
    with pytest.raises(ValueError, match=rf"text, chat messages or token ids, not {re.escape(repr(prompt))}"):
        warm_lm.generate(prompt)


@pytest.mark.parametrize(
    ("call", "prompt"),
    [("stream", 42), ("stream", None), ("stream", {"role": "user", "content": "fox"}), ("generate", [4.0, 5.0])],
)
def test_wrong_type_of_prompt_elsewhere(lm: LookaheadModel, call: str, prompt: Any) -> None:
    with pytest.raises(ValueError, match="text, chat messages or token ids"):
        getattr(lm, call)(prompt)


def test_a_batch_is_not_streamed(lm: LookaheadModel) -> None:
    with pytest.raises(ValueError, match="one prompt"):
        lm.stream(["the fox", "end"])


def test_one_bad_prompt_of_a_batch(lm: LookaheadModel) -> None:
    with pytest.raises(ValueError, match="token id 9999"):
        lm.generate([[3, 4], [5, 9999]])
    assert open_slots(lm) == 0


def test_chat_needs_a_template(model: Any, tokenizer: Any, settings: LookaheadConfig) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    lm = lookahead.load((model, bare), config=settings)
    with pytest.raises(ValueError, match=r"model 'LlamaForCausalLM' has no chat template"):
        lm.generate(CHAT)
    assert lm.encode("the fox") == bare("the fox")["input_ids"]


# What a loaded model remembers


def test_recycle_scope_model_learns_between_requests(model: Any, tokenizer: Any, settings: LookaheadConfig) -> None:
    lm = lookahead.load((model, tokenizer), config=replace(settings, sources=("recycle",), budget=64))
    first, second = (lm.generate("once more", max_tokens=TOKENS) for _ in range(2))
    assert second.token_ids == first.token_ids
    assert second.stats.steps < first.stats.steps


@pytest.mark.parametrize("scope", ["request", "off"])
@pytest.mark.thinned(1, most=1)
def test_other_recycle_scopes_start_cold(model: Any, tokenizer: Any, settings: LookaheadConfig, scope: str) -> None:
    lm = lookahead.load((model, tokenizer), config=replace(settings, recycle_scope=scope))
    runs = [lm.generate("once more", max_tokens=TOKENS) for _ in range(3)]
    assert len({tuple(run.token_ids) for run in runs}) == 1
    assert len({run.stats.steps for run in runs}) == 1
    assert ("recycle" in runs[0].stats.accepted_by_source) == (scope == "request")


def test_tensors_and_arrays_of_ids(lm: LookaheadModel) -> None:
    ids = lm.encode("the fox")
    expected = lm.generate(ids, max_tokens=8).token_ids
    assert lm.generate(torch.tensor(ids), max_tokens=8).token_ids == expected
    assert [done.token_ids for done in lm.generate(torch.tensor([ids, ids]), max_tokens=8)] == [expected] * 2
    assert list(lm.stream(torch.tensor(ids), max_tokens=8))


def test_without_a_seed_every_answer_is_its_own(lm: LookaheadModel) -> None:
    done = lm.generate(["the fox"] * 3, temperature=2.0, max_tokens=16)
    assert len({tuple(one.token_ids) for one in done}) == 3
    again = lm.generate("the fox", temperature=2.0, max_tokens=16, seed=done[0].seed)
    assert again.token_ids == done[0].token_ids


def test_an_unknown_setting_names_the_near_one(lm: LookaheadModel) -> None:
    for call in (lm.generate, lm.stream):
        with pytest.raises(TypeError, match="unknown setting 'max_new_tokens'; did you mean 'max_tokens'"):
            call("the fox", max_new_tokens=3)


def test_messages_that_the_template_refuses(model: Any, tokenizer: Any, settings: LookaheadConfig) -> None:
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ValueError, match="refuses these messages: no system role"):
        lookahead.load((model, strict), config=settings).encode("the fox")


def test_text_is_a_message_that_goes_with_tools(model: Any, tokenizer: Any, settings: LookaheadConfig) -> None:
    named = copy.deepcopy(tokenizer)
    named.chat_template = "{% for tool in tools or [] %}{{ tool['name'] }}{% endfor %}{{ messages[0]['content'] }}"
    lm = lookahead.load((model, named), config=settings)
    tools = [{"name": "fox"}]
    assert lm.encode("the dog", tools=tools) == lm.encode([{"role": "user", "content": "the dog"}], tools=tools)
    assert len(lm.encode("the dog", tools=tools)) > len(lm.encode("the dog"))


ASKED = {
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[25], [103, 29]],
    "suppress_tokens": [25, 29],
    "begin_suppress_tokens": [103],
    "forced_eos_token_id": 2,
    "sequence_bias": [[[12], 50.0]],
}


@pytest.mark.parametrize("name", slow_but(ASKED, "repetition_penalty", "sequence_bias"))
@pytest.mark.thinned(1, most=1)
def test_the_generation_config_of_a_model_is_heeded(
    name: str, make_model: Any, tokenizer: Any, settings: LookaheadConfig, plain: Any
) -> None:
    """Greedy output is `model.generate`'s, so what the model's own generation config asks for applies."""
    model = make_model()
    ids = tokenizer("the quick brown fox and the lazy dog")["input_ids"]
    before = plain(model, ids, 40)
    setattr(model.generation_config, name, ASKED[name])
    lm = lookahead.load((model, tokenizer), config=settings)
    assert plain(model, ids, 40) != before
    assert lm.generate(ids, max_tokens=40).token_ids == plain(model, ids, 40)
    assert [token for piece in lm.stream(ids, max_tokens=40) for token in piece.token_ids] == plain(model, ids, 40)
    sampled = {
        method: [
            c.token_ids for c in lm.generate([ids, ids[:3]], max_tokens=40, temperature=0.8, seed=3, method=method)
        ]
        for method in ("lookahead", "autoregressive")
    }
    assert sampled["lookahead"] == sampled["autoregressive"]


@pytest.mark.slow
def test_a_penalty_of_the_caller_replaces_the_models_own(
    make_model: Any, tokenizer: Any, settings: LookaheadConfig, plain: Plain
) -> None:
    """Beside another processor, too, which needs verification token by token."""
    ids = tokenizer("the quick brown fox and the lazy dog")["input_ids"]
    for other in ({}, {"no_repeat_ngram_size": 2}):
        model = make_model()
        expected = {}
        for penalty in (1.0, 1.2, 1.7):
            model.generation_config.update(repetition_penalty=penalty, **other)
            expected[penalty] = plain(model, ids, 30)
        assert len({tuple(tokens) for tokens in expected.values()}) > 1
        lm = lookahead.load((model, tokenizer), config=settings)
        assert lm.generate(ids, max_tokens=30).token_ids == expected[1.7]
        assert lm.generate(ids, max_tokens=30, repetition_penalty=1.2).token_ids == expected[1.2]
        assert lm.generate(ids, max_tokens=30, repetition_penalty=1.0).token_ids == expected[1.0]


ADJUSTING: list[dict[str, Any]] = [
    {"presence_penalty": 1.2, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.4, "logit_bias": {5: 2.0, 9: -float("inf")}, "min_tokens": 9, "stop": "e"},
    {"temperature": 0.9, "frequency_penalty": 0.5, "min_tokens": 30, "seed": 3},
]


@pytest.mark.parametrize("options", ADJUSTING)
@pytest.mark.parametrize("verified", [False, True])
@pytest.mark.thinned(1, most=1)
def test_penalties_and_log_probabilities_by_every_way(
    options: dict[str, Any], verified: bool, make_model: Any, tokenizer: Any, settings: LookaheadConfig
) -> None:
    """generate, a batch and stream; also for a model whose generation config needs verification token by token."""
    model = make_model()
    if verified:
        model.generation_config.suppress_tokens = [25, 29]
    lm = lookahead.load((model, tokenizer), config=settings)
    options = {**options, "max_tokens": 30, "logprobs": 2}
    expected = lm.generate("the fox", method="autoregressive", **options)
    found = lm.generate(["the fox", "a dog"], **options)[0]
    stream = lm.stream("the fox", **options)
    pieces = list(stream)
    assert found.token_ids == stream.completion.token_ids == expected.token_ids
    assert (found.text, found.finish_reason) == (expected.text, expected.finish_reason)
    assert len(expected.token_ids) >= options.get("min_tokens", 1)
    ids = lm.encode("the fox")
    with torch.no_grad():
        rows = model(torch.tensor([[*ids, *expected.token_ids]])).logits[0, len(ids) - 1 : -1].log_softmax(dim=-1)
    for told in (expected.logprobs, found.logprobs, [item for piece in pieces for item in piece.logprobs or ()]):
        assert told is not None
        assert [t.logprob for t in told] == pytest.approx(
            [float(row[token]) for row, token in zip(rows, expected.token_ids, strict=True)], abs=1e-4
        )
        assert [[token for token, _ in t.top] for t in told] == rows.topk(2).indices.tolist()
    assert lm.generate("the fox", max_tokens=3).logprobs is None


def test_mistakes_in_new_settings_are_named(lm: LookaheadModel) -> None:
    for settings, message in (
        ({"logit_bias": {10**6: 1.0}}, "logit_bias has token 1000000; the vocabulary is 0 to"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 must be at most max_tokens=8"),
        ({"logprobs": 21}, "logprobs=21 must be at most 20"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            lm.generate("the fox", **settings)


@pytest.mark.slow
def test_a_penalty_of_one_draws_as_no_penalty(make_model: Any, tokenizer: Any, settings: LookaheadConfig) -> None:
    """The token-by-token walk and the backend's own draws use the same uniforms."""
    ids = tokenizer("the quick brown fox")["input_ids"]
    plain_lm = lookahead.load((make_model(), tokenizer), config=settings)
    walked = make_model()
    walked.generation_config.sequence_bias = [[[3], 0.0]]
    lm = lookahead.load((walked, tokenizer), config=settings)
    for seed in range(3):
        options = {"max_tokens": 40, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": seed}
        assert lm.generate(ids, **options).token_ids == plain_lm.generate(ids, **options).token_ids


def test_load_tells_what_the_generation_config_asks_for(
    make_model: Any, tokenizer: Any, settings: LookaheadConfig
) -> None:
    model = make_model()
    model.generation_config.repetition_penalty = 1.2
    lines: list[str] = []
    lookahead.load((model, tokenizer), config=settings, log=lines.append)
    assert lines == ["note: the model's generation config asks for repetition_penalty=1.2, which is applied"]
