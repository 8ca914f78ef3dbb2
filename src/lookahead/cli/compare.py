"""Compare tokens and speed of a method with plain autoregressive decoding and with transformers' own `generate`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from lookahead.cli.answer import answer, interrupted
from lookahead.cli.common import Completion, Host, Model
from lookahead.stats import Stats

BASELINE, STOCK = "autoregressive", "transformers' generate"
WARM_UP_TOKENS = 8
EVEN = 0.02  # a ratio this close to 1 is called even, neither a win nor a loss


@dataclass(frozen=True)
class StockAnswer:
    """The tokens and the time of transformers' own `generate`."""

    token_ids: list[int]
    stats: Stats


@dataclass(frozen=True)
class Comparison:
    """A method's completion and the baseline's. `equal_tokens` counts the tokens before the first that differs.

    `stock` is transformers' answer for `--compare-stock`. The table's ratios are then relative to its speed.
    """

    completion: Completion
    baseline: Completion
    stock: StockAnswer | None = None

    @property
    def equal_tokens(self) -> int:
        ours, theirs = self.completion.token_ids, self.baseline.token_ids
        shorter = min(len(ours), len(theirs))
        return next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)

    @property
    def identical(self) -> bool:
        return list(self.completion.token_ids) == list(self.baseline.token_ids)

    @property
    def ratio(self) -> float:
        """Tokens per second divided by the baseline's; 0 if the baseline generated none."""
        baseline = self.baseline.stats.tokens_per_second
        return self.completion.stats.tokens_per_second / baseline if baseline else 0.0

    def speed(self) -> str:
        word = "even" if abs(self.ratio - 1) <= EVEN else "faster" if self.ratio > 1 else "slower"
        text = f"{self.completion.method} is {self.ratio:.2f}x: {word} here"
        if self.stock is None:
            return text
        times = self.completion.stats.tokens_per_second / max(1e-9, self.stock.stats.tokens_per_second)
        return f"{text}, and {times:.2f}x {STOCK}"

    def stock_difference(self) -> str | None:
        """A note if transformers' tokens differ from the baseline's, because its kernels round differently."""
        if self.stock is None or self.stock.token_ids == list(self.baseline.token_ids):
            return None
        pairs = zip(self.stock.token_ids, self.baseline.token_ids, strict=False)
        equal = next((i for i, (theirs, ours) in enumerate(pairs) if theirs != ours), len(self.stock.token_ids))
        return f"note: {STOCK} has other tokens after {equal} equal ones: its kernels round a near tie differently"

    def difference(self) -> str:
        """A sentence that names the first token that differs."""
        at = self.equal_tokens
        ours, theirs = (_token(c, at) for c in (self.completion, self.baseline))
        return (
            f"{self.completion.method} and {BASELINE} first differ at token {at + 1}, after {at} equal: "
            f"{ours} against {theirs}"
        )

    def table(self) -> Table:
        table = Table("method")
        for name in ("tokens", "steps", "S", "seconds", "tok/s", "ratio"):
            table.add_column(name, justify="right")
        rows = [(one.method, one.stats) for one in (self.baseline, self.completion)]
        if self.stock is not None:
            rows.insert(0, (STOCK, self.stock.stats))
        base = rows[0][1].tokens_per_second
        for name, stats in rows:
            ratio = stats.tokens_per_second / base if base else 0.0
            table.add_row(
                name,
                str(stats.generated_tokens),
                str(stats.steps),
                f"{stats.compression:.2f}",
                f"{stats.seconds:.2f}",
                f"{stats.tokens_per_second:.1f}",
                f"{ratio:.2f}x",
            )
        return table

    def record(self) -> dict[str, Any]:
        """The `compare` object of `--json`."""
        stats = self.baseline.stats
        stock = {} if self.stock is None else {"stock": {"tokens_per_second": self.stock.stats.tokens_per_second}}
        return {
            **stock,
            "method": self.baseline.method,
            "generated_tokens": stats.generated_tokens,
            "steps": stats.steps,
            "compression": stats.compression,
            "seconds": stats.seconds,
            "tokens_per_second": stats.tokens_per_second,
            "ratio": self.ratio,
            "identical": self.identical,
            "equal_tokens": self.equal_tokens,
        }


def warm_up(host: Host, model: Model, prompt: str | None, request: dict[str, Any]) -> bool:
    """Run both methods briefly, to exclude one-time costs from the timings. Returns False if interrupted.

    `recycle_scope="request"` hides the warm-up's tokens from the timed run, which would otherwise draft from them.
    """
    config = request["config"]
    ours = {**request, "config": config and replace(config, recycle_scope="request")}
    for settings in (ours, baseline_request(request)):
        short = {**settings, "max_tokens": min(WARM_UP_TOKENS, request["max_tokens"])}
        if interrupted(answer(host, model.stream(prompt, **short), show=False)):
            return False
    return True


def stock_answer(model: Any, prompt: str | None, request: dict[str, Any]) -> StockAnswer:
    """The greedy answer of transformers' own `generate` to the same prompt, timed after a short warm-up."""
    from lookahead.bench.run.stock import Stock  # it needs torch, which `--help` does not

    stock, ids = Stock(model), model.encode(prompt, raw=request["raw"])
    longest = len(ids) + request["max_tokens"]
    stock.run("hf-greedy", ids, min(WARM_UP_TOKENS, request["max_tokens"]), longest)
    return StockAnswer(*stock.run("hf-greedy", ids, request["max_tokens"], longest))


def baseline_request(request: dict[str, Any]) -> dict[str, Any]:
    """The same request for the baseline method."""
    return {**request, "method": BASELINE, "config": None}


def _token(completion: Completion, index: int) -> str:
    ids = completion.token_ids
    return f"id {ids[index]}" if index < len(ids) else f"the end ({completion.finish_reason})"
