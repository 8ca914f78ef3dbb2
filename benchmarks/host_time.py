"""Host time per step (propose + absorb) at K = 128, without a model: `python benchmarks/host_time.py`.

A text with Zipf-like tokens and many repeats is replayed; every row's top-8 is drawn at random around the true next
token, so that pools, suffix index and recycled rows are as full as in real use. Prints the median and the 90th
percentile over the steps of several sequences.
"""

from __future__ import annotations

import random
import statistics
import time

from lookahead.config import LookaheadConfig, StopRules
from lookahead.sequence import DecodingSequence
from lookahead.tree import Targets

VOCABULARY = 49152


def text(rng: random.Random, length: int) -> list[int]:
    """Tokens with a long-tailed distribution, a third of them in repeated phrases."""
    tokens: list[int] = []
    while len(tokens) < length:
        if tokens and rng.random() < 0.35:
            start = rng.randrange(len(tokens))
            tokens += tokens[start : start + rng.randrange(2, 12)]
        else:
            tokens.append(int(VOCABULARY * rng.random() ** 6))
    return tokens[:length]


def measure(config: LookaheadConfig, sequences: int = 8, prompt: int = 200, output: int = 192) -> list[float]:
    """Milliseconds of propose + absorb, per step."""
    rng = random.Random(0)
    times = []
    for _ in range(sequences):
        tokens = text(rng, prompt + output + 64)
        likely: dict[int, list[int]] = {}
        sequence = DecodingSequence(tokens[:prompt], config, rules=StopRules(max_tokens=output))
        while sequence.finish_reason is None:
            begin = time.perf_counter()
            tree = sequence.propose()
            proposed = time.perf_counter()
            at = len(sequence.tokens)
            result = Targets([])
            for node in tree.rows:
                ids = likely.setdefault(tree.tokens[node], [rng.randrange(VOCABULARY) for _ in range(8)])
                target = tokens[min(at + tree.depths[node], len(tokens) - 1)]
                if target not in ids and rng.random() < 0.5:
                    ids[rng.randrange(8)] = target
                result.targets.append(target)
                result.top.append((*ids, 0, 3, 5, 7, 8, 10, 12, 15))
            ran = time.perf_counter()
            sequence.absorb(tree, result)
            times.append(1e3 * (proposed - begin + time.perf_counter() - ran))
    return times


if __name__ == "__main__":
    for name, config in {
        "default": LookaheadConfig(),
        "paper (5,15,15), prompt": LookaheadConfig.paper(15, 5, 15, prompt=True),
        "autoregressive": LookaheadConfig.autoregressive(),
    }.items():
        times = sorted(measure(config))
        print(f"{name:24s} median {statistics.median(times):.3f} ms, p90 {times[len(times) * 9 // 10]:.3f} ms")
