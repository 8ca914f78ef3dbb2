"""The same call of `generate` twice, stock and with the hook, and what must be equal of the two."""

from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

import lookahead

SETTINGS = {"window": 3, "ngram": 4, "guesses": 4, "budget": 40, "recycle_scope": "request"}
"""Small enough for a CPU, every source at work; nothing is kept from one test for the next."""

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
"""fp32 rounding of logits of about 30: a step of many tokens adds up in another order than a step of one."""

Fresh = Callable[[], Mapping[str, Any]]
"""Makes the arguments that remember something (a processor, a streamer, a cache): each run needs its own."""


def decoding(**changes: Any) -> lookahead.Decoding:
    """The hook with the contract's settings."""
    seed = changes.pop("seed", None)
    return lookahead.decoding(seed=seed, **{**SETTINGS, **changes})


@dataclass
class Pair:
    """Two runs. `made_stock` and `made_ours` are the fresh arguments that each of them was given."""

    stock: Any
    ours: Any
    hook: lookahead.Decoding
    made_stock: Mapping[str, Any]
    made_ours: Mapping[str, Any]

    @property
    def tokens(self) -> torch.Tensor:
        """[B, L + output] of the hooked run."""
        return tokens_of(self.ours)

    @property
    def compression(self) -> float:
        """Generated tokens per step of all rows: above 1 some guess was accepted."""
        return sum(s.generated_tokens for s in self.hook.stats) / sum(s.steps for s in self.hook.stats)

    def same(self) -> Pair:
        """Type, tokens, and whatever came with them, are those of the stock run."""
        assert type(self.ours) is type(self.stock)
        stock, ours = tokens_of(self.stock), tokens_of(self.ours)
        assert ours.tolist() == stock.tolist()
        assert (ours.dtype, ours.device) == (stock.dtype, stock.device)
        if not isinstance(self.ours, torch.Tensor):
            assert list(self.ours.keys()) == list(self.stock.keys())
            for name in ("scores", "logits"):
                self._close(name)
        return self

    def _close(self, name: str) -> None:
        """One [B, V] float32 tensor per position. Rows that have ended hold nothing of meaning: stock runs padding
        through the model for them, and neither token nor score of theirs is anybody's."""
        stock, ours = getattr(self.stock, name), getattr(self.ours, name)
        assert (stock is None) == (ours is None), name
        if stock is None:
            return
        assert isinstance(ours, tuple)
        assert len(ours) == len(stock)
        for position, (a, b) in enumerate(zip(stock, ours, strict=True)):
            assert (b.shape, b.dtype, b.device) == (a.shape, a.dtype, a.device)
            live = [row for row, stats in enumerate(self.hook.stats) if stats.generated_tokens > position]
            torch.testing.assert_close(b[live], a[live], **CLOSE, msg=lambda text, p=position: f"{name}[{p}]: {text}")


def run_both(
    model: Any,
    inputs: Mapping[str, Any],
    *,
    fresh: Fresh = dict,
    seed: int = 0,
    hook: lookahead.Decoding | None = None,
    **kwargs: Any,
) -> Pair:
    """`model.generate(**inputs, **kwargs)` stock and hooked, each after the same `torch.manual_seed`.

    Greedy unless asked otherwise; both runs leave the generator of torch in the same state.
    """
    hook = hook or decoding()
    kwargs = {"do_sample": False, **kwargs} if "generation_config" not in kwargs else kwargs
    made = fresh(), fresh()
    torch.manual_seed(seed)
    stock = model.generate(**inputs, **kwargs, **made[0])
    after = torch.get_rng_state()
    torch.manual_seed(seed)
    ours = model.generate(**inputs, **kwargs, **made[1], custom_generate=hook)
    assert torch.equal(torch.get_rng_state(), after)
    return Pair(stock, ours, hook, *made)


def same_cache(stock: Any, ours: Any, mask: torch.Tensor | None = None) -> None:
    """Equal in kind and length, and close in all slots that hold a token. `mask` [B, T] says which of all T slots do;
    what stands in the others nobody sees."""
    assert type(ours) is type(stock)
    assert ours.get_seq_length() == stock.get_seq_length()
    length = stock.get_seq_length()
    for a, b in zip(stock.layers, ours.layers, strict=True):
        assert type(a) is type(b)
        assert a.get_seq_length() == b.get_seq_length()
        for mine, theirs in ((b.keys, a.keys), (b.values, a.values)):
            assert (mine.shape, mine.dtype, mine.device) == (theirs.shape, theirs.dtype, theirs.device)
            held = min(length, mine.shape[2])
            real = torch.ones(len(mine), held).bool() if mask is None else mask[:, :length][:, -held:].bool()
            for row, slots in enumerate(real):
                torch.testing.assert_close(mine[row, :, :held][:, slots], theirs[row, :, :held][:, slots], **CLOSE)


@dataclass(frozen=True)
class Difference:
    """Where two texts part. `margin` is how far stock's scores of the two tokens are apart, `largest` any score."""

    text: str
    margin: float = math.inf
    largest: float = 1.0


def first_difference(stock: torch.Tensor, ours: torch.Tensor, scores: Sequence[torch.Tensor]) -> Difference:
    """Of two texts [B, T] that are not equal; `scores` has stock's [B, V] for every token that was generated."""
    width = min(stock.shape[1], ours.shape[1])
    if len(stock) != len(ours) or torch.equal(stock[:, :width], ours[:, :width]):
        return Difference(f"the shape is {list(ours.shape)} and not {list(stock.shape)}")
    parted = stock[:, :width] != ours[:, :width]
    place = int(parted.any(dim=0).nonzero()[0])
    row = int(parted[:, place].nonzero()[0])
    a, b, number = int(stock[row, place]), int(ours[row, place]), place - (stock.shape[1] - len(scores))
    text = f"row {row} has {b} and not {a} at {place} of {width}"
    if number < 0:
        return Difference(f"{text}, in the prompt")
    given = scores[number][row].float()
    margin = float((given[a] - given[b]).abs())
    return Difference(
        f"{text}, where their scores are {margin:.2g} apart", margin, float(given[given.isfinite()].abs().max())
    )


def one_line(error: BaseException) -> str:
    """An error's message; of an assertion without one, the line that failed."""
    text = str(error)
    if not text and (frames := traceback.extract_tb(error.__traceback__)):
        text = frames[-1].line or ""
    return " ".join(text.split())[:400]


def tokens_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.sequences


def ids(*rows: list[int], pad: int = 0, **more: Any) -> dict[str, Any]:
    """Rows of token ids as `generate` takes them, the shorter ones padded on the left."""
    longest = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[pad] * (longest - len(row)) + list(row) for row in rows]),
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
        **more,
    }


def output_of(inputs: Mapping[str, Any], output: Any) -> list[list[int]]:
    """The new tokens of every row."""
    return tokens_of(output)[:, inputs["input_ids"].shape[1] :].tolist()


class Recorder(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self, takes_blocks: bool = False) -> None:
        self.puts: list[torch.Tensor] = []
        self.ends = 0
        self.takes_blocks = takes_blocks

    def put(self, value: torch.Tensor) -> None:
        assert not self.ends
        self.puts.append(value)

    def end(self) -> None:
        self.ends += 1


def blocks(model: Any, inputs: Mapping[str, Any], **kwargs: Any) -> list[list[int]]:
    """The accepted blocks of a hooked greedy run of one row, as a streamer sees them."""
    recorder = Recorder(takes_blocks=True)
    model.generate(**inputs, **kwargs, do_sample=False, streamer=recorder, custom_generate=decoding())
    return [put.tolist() for put in recorder.puts[1:]]


def inside(accepted: list[list[int]], least: int = 3) -> int:
    """How many tokens a run has to give to end strictly inside an accepted block of this many: neither its first token
    nor its last."""
    done = 0
    for block in accepted:
        if len(block) >= least:
            return done + 2
        done += len(block)
    raise AssertionError(f"no block of {least} tokens was accepted: {accepted}")


def in_threads(jobs: list[Callable[[], Any]]) -> list[Any]:
    """What each job returned; an error in one is an error here."""
    results: list[Any] = [None] * len(jobs)
    start = threading.Barrier(len(jobs))

    def work(number: int) -> None:
        start.wait()
        try:
            results[number] = jobs[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
