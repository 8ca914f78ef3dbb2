"""What `model.generate(custom_generate=lookahead.decoding())` costs per step: `python benchmarks/contract.py`.

The same steps, once by the engine alone (`LookaheadModel.generate`) and once inside transformers' `generate`, in turns
on the same prompts; every pair takes the same number of steps and gives the same tokens. Prints the median time per
step of each and of their ratios. The further rows show what a processor, a criterion and kept scores add.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import lookahead
from lookahead.config import LookaheadConfig
from lookahead.generate import LookaheadModel
from lookahead.loading.step_cost import processor

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number, with a docstring and three tests.",
    "Explain to a child why the sky is blue.",
    "List the planets of the solar system with one sentence about each.",
)


def engine(lm: LookaheadModel, ids: list[int], tokens: int, config: LookaheadConfig) -> tuple[float, int, list[int]]:
    """Seconds, steps and output of the engine alone."""
    begin = time.perf_counter()
    out = lm.generate(ids, max_tokens=tokens, config=config)
    return time.perf_counter() - begin, out.stats.steps, out.token_ids


def hooked(
    lm: LookaheadModel, ids: list[int], tokens: int, config: LookaheadConfig, **options: Any
) -> tuple[float, int, list[int]]:
    """The same inside `generate`, from its call to its return."""
    prompt = torch.tensor([ids], device=lm.device)
    decoding = lookahead.decoding(config)
    begin = time.perf_counter()
    out = lm.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=tokens,
        custom_generate=decoding,
        **options,
    )
    taken = time.perf_counter() - begin
    sequences = out if torch.is_tensor(out) else out.sequences
    return taken, decoding.stats[0].steps, sequences[0, len(ids) :].tolist()


class Never(transformers.StoppingCriteria):
    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    lm = lookahead.load(log=print)
    configs = {
        "one token per step": LookaheadConfig.autoregressive(),
        "default": lm.default_config.adapted(recycle_scope="request"),
    }
    extras: dict[str, dict[str, Any]] = {
        "nothing": {},
        "a repetition penalty of 1 + 1e-9": {"repetition_penalty": 1 + 1e-9},
        "a custom criterion": {"stopping_criteria": [Never()]},
        "scores and cache returned": {"return_dict_in_generate": True, "output_scores": True},
    }
    rows = []
    for name, config in configs.items():
        for extra, options in extras.items():
            if name != "default" and options:
                continue
            alone, inside, ratios = [], [], []
            for number in range(args.rounds + 1):
                for prompt in PROMPTS:
                    ids = lm.encode(prompt)
                    calls = [partial(engine, lm, ids, args.tokens, config)]
                    calls.append(partial(hooked, lm, ids, args.tokens, config, **options))
                    order = (0, 1) if number % 2 else (1, 0)
                    results = {i: calls[i]() for i in order}
                    if results[0][1:] != results[1][1:]:
                        raise SystemExit(f"the two differ: {results[0][1:]} and {results[1][1:]}")
                    if number:  # the first round warms up
                        steps = results[0][1]
                        alone.append(1e3 * results[0][0] / steps)
                        inside.append(1e3 * results[1][0] / steps)
                        ratios.append(results[1][0] / results[0][0])
            figures = [statistics.median(x) for x in (alone, inside, ratios)]
            spread = statistics.quantiles(ratios, n=4)
            rows.append({"config": name, "extra": extra, "engine_ms": figures[0], "generate_ms": figures[1]})
            rows[-1] |= {"ratio": figures[2], "ratio_quartiles": [spread[0], spread[2]]}
            print(
                f"{name:20s} {extra:34s} engine {figures[0]:7.2f} ms/step, generate {figures[1]:7.2f} ms/step, "
                f"ratio {figures[2]:.3f} ({spread[0]:.3f} to {spread[2]:.3f})",
                flush=True,
            )
    if args.out:
        about = {
            "command": f"benchmarks/contract.py --rounds {args.rounds} --tokens {args.tokens}",
            "cpu": processor(),
            "threads": torch.get_num_threads(),
            "device": str(lm.device),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }
        args.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
