"""What lookahead parallelism exchanges and computes, rank by rank: tokens per rank and step, collectives, bytes, S.

    python benchmarks/parallel.py                                      # one process
    torchrun --nproc-per-node 4 benchmarks/parallel.py                 # four, on the embedded model

Rank 0 prints one row per setting; `same` compares tokens and steps with those of this rank by itself.
"""

from __future__ import annotations

import argparse

import lookahead.parallel
from lookahead import Completion, LookaheadConfig, LookaheadModel

PROMPTS = (
    "Write a Python function that reverses a linked list.",
    "Explain in three sentences why the sky is blue.",
    "List five animals that live in the sea, one per line.",
)
SETTINGS = {
    "paper (15,5,15)": LookaheadConfig.paper(15, 5, 15, prompt=True),
    "default K=128": LookaheadConfig(recycle_scope="request"),
    "W=10 N=5 G=10 K=256": LookaheadConfig(10, 5, 10, 256, recycle_scope="request"),
}


def tokens_and_steps(done: Completion) -> tuple[list[int], int]:
    return done.token_ids, done.stats.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    model = lookahead.parallel.load(options.model, config=LookaheadConfig())
    alone = LookaheadModel(model.model, model.tokenizer, model.name, LookaheadConfig(), "eager")
    common = {"max_tokens": options.max_tokens, "temperature": options.temperature, "seed": 1}
    say = print if model.rank == 0 else lambda *_: None
    say("| setting | ranks | S | tree | tokens per rank | of them again | collectives | bytes | exchange ms | same |")
    say("|---|---|---|---|---|---|---|---|---|---|")
    for name, config in SETTINGS.items():
        model.backend.reset()
        done = [model.generate(prompt, config=config, **common) for prompt in PROMPTS]
        counters = model.backend.counters
        steps = counters.steps
        same = "-"
        if model.rank == 0:
            expected = [alone.generate(prompt, config=config, **common) for prompt in PROMPTS]
            same = str([tokens_and_steps(d) for d in done] == [tokens_and_steps(e) for e in expected])
        compression = sum(d.stats.generated_tokens for d in done) / steps
        tokens, again = (" ".join(f"{x / steps:.1f}" for x in xs) for xs in (counters.tokens, counters.caught_up))
        say(
            f"| {name} | {model.group.size} | {compression:.2f} | {counters.tree_tokens / steps:.1f} | {tokens} "
            f"| {again} | {counters.collectives / steps:.2f} | {counters.sent_bytes / steps:.0f} "
            f"| {1000 * counters.exchange_seconds / steps:.2f} | {same} |"
        )
    model.close()


if __name__ == "__main__":
    main()
