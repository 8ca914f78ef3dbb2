"""Reinforcement learning with lookahead: `python examples/rollouts.py`, about a minute on two quiet CPU cores.

A plain loop in the manner of GRPO. Each round draws a group of samples for each question, scores them, and makes the
better ones of a group likelier: the loss of a sample is its advantage (its score less the group's mean, over the
group's standard deviation) times the mean log-probability of its tokens. The weights change in place, `reload_weights`
tells the model, and the next round asks the same questions with new seeds.

Lookahead cannot change a sample: every group is drawn again token by token with the same seeds, and compared. Leave
that out (`--no-check`) to see the speed of the loop itself. What earlier rounds have taught the drafts is kept,
although the weights have changed since: it only makes them a little worse.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch

import lookahead
from lookahead import LookaheadModel
from lookahead.generate import Completion
from lookahead.stats import Stats

QUESTIONS = {
    "What is 3 + 4? Answer with the number alone.": "7",
    "What is the capital of France? Answer with its name alone.": "Paris",
}
"""Questions and the words that a good answer holds."""


@dataclass
class Round:
    """What one round gave: the mean score; of the samples their number, their S, and how many were equal token by
    token; and the seconds with lookahead, token by token, and of the update."""

    score: float
    samples: int
    compression: float
    equal: int
    lookahead_seconds: float
    plain_seconds: float
    update_seconds: float


def draw(lm: LookaheadModel, prompt: list[int], seeds: Sequence[int], tokens: int, method: str) -> list[Completion]:
    """A sample for each seed. Requests of several threads run as one batch."""
    ask = partial(lm.generate, prompt, temperature=1.0, max_tokens=tokens, method=method)
    with ThreadPoolExecutor(len(seeds)) as pool:
        found: list[Any] = list(pool.map(lambda seed: ask(seed=seed), seeds))
    return found


def score(text: str, answer: str) -> float:
    """1 for the right word, less what is said besides."""
    words = re.findall(r"\w+", text)
    return float(answer in words) - 0.02 * len(words)


def update(
    lm: LookaheadModel, optimizer: torch.optim.Optimizer, prompt: list[int], samples: Sequence[Sequence[int]],
    scores: Sequence[float],
) -> None:  # fmt: skip
    """One step of the optimizer on a group, with the model's own forward pass."""
    values = torch.tensor(scores)
    if len(samples) < 2 or values.std() == 0:
        return  # all the same: there is nothing to prefer
    advantages = (values - values.mean()) / values.std()
    longest = max(map(len, samples))
    ids = torch.tensor([[*prompt, *sample, *[0] * (longest - len(sample))] for sample in samples], device=lm.device)
    inside = torch.tensor([[1.0] * len(one) + [0.0] * (longest - len(one)) for one in samples], device=lm.device)
    logits = lm.model(ids).logits[:, len(prompt) - 1 : -1].float()
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, len(prompt) :, None])[..., 0]
    loss = -(advantages.to(lm.device) * (logprobs * inside).sum(1) / inside.sum(1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train(
    lm: LookaheadModel,
    questions: dict[str, str],
    *,
    rounds: int = 3,
    samples: int = 4,
    tokens: int = 24,
    rate: float = 1e-4,
    check: bool = True,
) -> list[Round]:
    """Change the last layer of the model so that its answers get higher scores."""
    layer: Any = lm.model.model.layers[-1]
    for parameter in lm.model.parameters():
        parameter.requires_grad_(False)
    for parameter in layer.parameters():
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=rate)
    prompts = {question: lm.encode(question) for question in questions}
    found = []
    for number in range(rounds):
        # 1. A group of samples for each question; then the same again, token by token.
        def draw_all(method: str, number: int = number) -> tuple[list[list[Completion]], float]:
            begin, groups = perf_counter(), []
            for index, prompt in enumerate(prompts.values()):
                first = (number * len(prompts) + index) * samples
                groups.append(draw(lm, prompt, range(first, first + samples), tokens, method))
            return groups, perf_counter() - begin

        groups, seconds = draw_all("lookahead")
        plain, plain_seconds = draw_all("autoregressive") if check else (groups, 0.0)
        # 2. Scores, and a step of the optimizer for each group.
        begin = perf_counter()
        scores = [
            [score(one.text, answer) for one in group] for group, answer in zip(groups, questions.values(), strict=True)
        ]
        for prompt, group, values in zip(prompts.values(), groups, scores, strict=True):
            update(lm, optimizer, prompt, [one.token_ids for one in group], values)
        # 3. The next round draws from the new weights.
        lm.reload_weights()
        drawn = [one for group in groups for one in group]
        again = [one for group in plain for one in group]
        found.append(
            Round(
                score=sum(map(sum, scores)) / len(drawn),
                samples=len(drawn),
                compression=Stats.total(one.stats for one in drawn).compression,
                equal=sum(one.token_ids == other.token_ids for one, other in zip(drawn, again, strict=True)),
                lookahead_seconds=seconds,
                plain_seconds=plain_seconds,
                update_seconds=perf_counter() - begin,
            )
        )
        print(report(number, found[-1], check), flush=True)
    return found


def report(number: int, one: Round, check: bool) -> str:
    line = f"round {number + 1}: mean score {one.score:.2f}, S {one.compression:.2f}, {one.lookahead_seconds:.1f} s"
    if check:
        line += f" ({one.plain_seconds:.1f} s token by token), {one.equal} of {one.samples} samples equal"
    return f"{line}; update {one.update_seconds:.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a folder or a name; the embedded model without it")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4, help="of each question in a round")
    parser.add_argument("--tokens", type=int, default=24, help="the most of a sample")
    parser.add_argument("--no-check", action="store_true", help="draw no sample again token by token")
    args = parser.parse_args()
    lm = lookahead.load(args.model, device=args.device, dtype="float32" if args.device == "cpu" else "auto")
    found = train(lm, QUESTIONS, rounds=args.rounds, samples=args.samples, tokens=args.tokens, check=not args.no_check)
    if args.no_check:
        return 0
    equal, total = sum(one.equal for one in found), sum(one.samples for one in found)
    print(f"the same samples with lookahead and without: {equal} of {total}")
    return 0 if equal == total else 1


if __name__ == "__main__":
    raise SystemExit(main())
