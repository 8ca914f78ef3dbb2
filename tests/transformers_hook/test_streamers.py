"""Streamers: the prompt, then the tokens as they are accepted, then the end, once, whatever happens."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from pairs import Recorder, decoding
from transformers import LogitsProcessorList, TextIteratorStreamer, TextStreamer

MANY = 16


def test_one_row(both: Any, llama: Any, prompt: dict[str, Any]) -> None:
    """The prompt as given, then one token at a time, as stock does it."""
    pair = both(llama, prompt, max_new_tokens=MANY, fresh=lambda: {"streamer": Recorder()}).same()
    stock, ours = pair.made_stock["streamer"], pair.made_ours["streamer"]
    assert [put.tolist() for put in ours.puts] == [put.tolist() for put in stock.puts]
    assert [put.dtype for put in ours.puts] == [put.dtype for put in stock.puts]
    assert pair.hook.stats[0].steps < MANY
    assert (ours.ends, stock.ends) == (1, 1)


def test_a_streamer_that_takes_blocks(llama: Any, prompt: dict[str, Any], text: list[list[int]]) -> None:
    streamer, hook = Recorder(takes_blocks=True), decoding()
    llama.generate(**prompt, max_new_tokens=MANY, do_sample=False, streamer=streamer, custom_generate=hook)
    assert torch.cat(streamer.puts[1:]).tolist() == text[0][:MANY]
    assert len(streamer.puts) - 1 == hook.stats[0].steps < MANY


def test_the_first_row_ends_inside_a_block(both: Any, counting: Any, count_up: dict[str, Any]) -> None:
    """The other row goes on, and every position is put."""
    ids = count_up["input_ids"]
    inputs = {"input_ids": torch.cat([ids, ids.roll(1)]), "attention_mask": torch.ones(2, ids.shape[1]).long()}
    inputs["input_ids"][1, -1] = 25
    options = {"eos_token_id": 17, "pad_token_id": 1, "fresh": lambda: {"streamer": Recorder()}}
    pair = both(counting, inputs, max_new_tokens=MANY, **options).same()
    stock, ours = pair.made_stock["streamer"], pair.made_ours["streamer"]
    assert [put.tolist() for put in ours.puts] == [put.tolist() for put in stock.puts]
    assert pair.hook.stats[0].generated_tokens < pair.hook.stats[1].generated_tokens
    assert pair.compression > 1.5


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("ends", [{}, {"eos_token_id": list(range(20, 30)), "pad_token_id": 1}], ids=["no eos", "eos"])
@pytest.mark.thinned(1, most=1)
def test_several_rows(both: Any, llama: Any, batch: dict[str, Any], sample: bool, ends: dict[str, Any]) -> None:
    """One tensor [B] per position, just as stock gives them, padding of rows that have ended included."""
    pair = both(
        llama, batch, max_new_tokens=MANY, do_sample=sample, fresh=lambda: {"streamer": Recorder()}, **ends
    ).same()
    stock, ours = pair.made_stock["streamer"], pair.made_ours["streamer"]
    assert [put.tolist() for put in ours.puts] == [put.tolist() for put in stock.puts]
    assert [put.dtype for put in ours.puts] == [put.dtype for put in stock.puts]
    assert ours.ends == 1


def test_several_rows_in_few_steps(both: Any, counting: Any, count_up: dict[str, Any]) -> None:
    inputs = {name: value.repeat(2, 1) for name, value in count_up.items()}
    pair = both(counting, inputs, max_new_tokens=MANY, fresh=lambda: {"streamer": Recorder()}).same()
    assert pair.compression > 4
    assert len(pair.made_ours["streamer"].puts) == 1 + MANY


def test_end_token_inside_a_block(both: Any, counting: Any, count_up: dict[str, Any]) -> None:
    pair = both(counting, count_up, max_new_tokens=MANY, eos_token_id=17, fresh=lambda: {"streamer": Recorder()}).same()
    assert [put.tolist() for put in pair.made_ours["streamer"].puts[1:]] == [[token] for token in range(11, 18)]


@pytest.mark.parametrize("options", [{}, {"skip_prompt": True}, {"skip_special_tokens": True}], ids=str)
@pytest.mark.thinned(1, most=2)
def test_text_streamer(
    both: Any, llama: Any, tokenizer: Any, prompt: dict[str, Any], options: dict[str, bool], capsys: Any
) -> None:
    """What is printed in the end is the same, also where a character takes several tokens."""
    printed = []
    for hook in ({}, {"custom_generate": decoding()}):
        streamer = TextStreamer(tokenizer, **options)
        llama.generate(**prompt, max_new_tokens=MANY, do_sample=False, streamer=streamer, **hook)
        printed.append(capsys.readouterr().out)
    assert printed[1] == printed[0]
    assert len(printed[1]) > 20


def test_text_streamer_takes_one_row(llama: Any, tokenizer: Any, batch: dict[str, Any]) -> None:
    for hook in ({}, {"custom_generate": decoding()}):
        with pytest.raises(ValueError, match="batch size 1"):
            llama.generate(**batch, max_new_tokens=MANY, streamer=TextStreamer(tokenizer), **hook)


def test_iterator_in_a_thread(llama: Any, tokenizer: Any, prompt: dict[str, Any], text: list[list[int]]) -> None:
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    arguments = {"max_new_tokens": MANY, "do_sample": False, "streamer": streamer, "custom_generate": decoding()}
    thread = threading.Thread(target=llama.generate, kwargs={**prompt, **arguments})
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == tokenizer.decode(text[0][:MANY])
    assert len([piece for piece in pieces if piece]) > 1


def test_tokens_come_while_it_runs(llama: Any, prompt: dict[str, Any]) -> None:
    """A streamer that has seen enough stops the run by raising: nothing is held back until the end."""

    class Enough(Recorder):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if sum(len(put) for put in self.puts[1:]) >= 5:
                raise InterruptedError

    streamer, hook = Enough(), decoding()
    with pytest.raises(InterruptedError):
        llama.generate(**prompt, max_new_tokens=200, do_sample=False, streamer=streamer, custom_generate=hook)
    assert 5 <= sum(len(put) for put in streamer.puts[1:]) < 30
    assert streamer.ends == 1


def test_end_is_told_when_generation_raises(llama: Any, inputs: dict[str, Any]) -> None:
    """Stock forgets it, and who reads from another thread waits for ever."""
    calls: list[int] = []

    def fail(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise KeyError("mine")
        return scores

    streamer = Recorder()
    with pytest.raises(KeyError, match="mine"):
        llama.generate(
            **inputs, max_new_tokens=MANY, logits_processor=LogitsProcessorList([fail]), streamer=streamer,
            custom_generate=decoding(),
        )  # fmt: skip
    assert streamer.ends == 1
    assert len(calls) == 4


def test_end_is_told_when_the_call_is_refused(llama: Any, prompt: dict[str, Any]) -> None:
    streamer = Recorder()
    with pytest.raises(ValueError, match="use_cache"):
        llama.generate(**prompt, max_new_tokens=4, use_cache=False, streamer=streamer, custom_generate=decoding())
    assert streamer.ends == 1
    assert len(streamer.puts) == 1
