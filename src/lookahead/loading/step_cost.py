"""What a step costs: t(K), the time of a forward pass over K tokens, and the config that suits it.

On a GPU a step of 100 tokens costs about what one token does; on a CPU 8 tokens may cost twice as much. The curve
decides how many guesses a step should carry (`draft.Drafter.grow`), down to none. `timing` measures it, and `fitting`
keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lookahead.config import FREE, LookaheadConfig

FLAT = 1.4
"""If a step of the whole budget costs at most this many times a step of one token, every step takes the whole budget.
In simulations that was best at a ratio of 1.3, and weighing each guess against its cost best at 1.6."""


@dataclass(frozen=True)
class StepCost:
    """The measured curve: a step of `sizes[i]` tokens takes `seconds[i]` seconds.

    `calm` is False if the machine was busy with something else meanwhile.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    calm: bool = field(default=True, compare=False)

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise ValueError(f"a step cost needs one time per size, not {len(self.seconds)} for {len(self.sizes)}")
        if not all(0 < taken < float("inf") for taken in self.seconds):
            raise ValueError(f"a step cost needs positive times, not {self.seconds}")

    def table(self, budget: int) -> tuple[float, ...]:
        """The times of steps of 1 to `budget` tokens, by straight lines between the measured sizes.

        The times never fall. If a small step was measured slower than a larger one, something else disturbed it, and
        it gets the larger step's time.
        """
        seconds = [min(self.seconds[i:]) for i in range(len(self.seconds))]
        times = []
        for size in range(1, budget + 1):
            i = next((i for i, s in enumerate(self.sizes) if s >= size), len(self.sizes) - 1)
            if i == 0:
                times.append(seconds[0] * max(1.0, size / self.sizes[0]))
                continue
            slope = (seconds[i] - seconds[i - 1]) / (self.sizes[i] - self.sizes[i - 1])
            times.append(seconds[i] + slope * (size - self.sizes[i]))
        return tuple(times)

    @property
    def reach(self) -> int:
        """The largest step whose time is known well enough: half as large again as the largest that was measured, which
        is no more than the next size would be."""
        return self.sizes[-1] + self.sizes[-1] // 2 if self.sizes[-1] > 1 else 2

    def with_faster(self, other: StepCost) -> StepCost:
        """This curve with the other's times where those are faster."""
        known = dict(zip(other.sizes, other.seconds, strict=True))
        best = [min(taken, known.get(size, taken)) for size, taken in zip(self.sizes, self.seconds, strict=True)]
        return StepCost(self.sizes, tuple(best), self.calm)

    def shared(self, ranks: int) -> StepCost:
        """The curve of a step that `ranks` ranks share, where each runs the root and its part of the other tokens."""
        return StepCost(tuple(1 + (size - 1) * ranks for size in self.sizes), self.seconds)


def stairs(table: Sequence[float], sizes: Sequence[int]) -> tuple[float, ...]:
    """The table of a backend that pads a pass to the next of these sizes: tokens up to that size are free."""
    ends = [next((size for size in sizes if size >= tokens), tokens) for tokens in range(1, len(table) + 1)]
    return tuple(table[min(end, len(table)) - 1] for end in ends)


def suited(config: LookaheadConfig, cost: StepCost) -> LookaheadConfig:
    """The config for a machine with this cost curve.

    If a step of the whole budget costs little more than a step of one token, every step takes the whole budget.
    Otherwise the curve goes into the config, so that a step takes only the guesses that are worth their time, and the
    window stays only if its tokens are nearly free. Sequences of one batch share the budget, because tokens that are
    free in a step of one sequence are not free in a step of eight. A step is never larger than times are known for.
    """
    if cost.reach < config.budget:
        window = config.window if config.window_tokens <= cost.reach else 0
        config = replace(config, budget=cost.reach, window=window)
    table = cost.table(config.budget)
    config = replace(config, shared=config.budget > 1)
    if table[-1] <= FLAT * table[0]:
        return config
    window = config.window if table[config.window_tokens - 1] <= FREE * table[0] else 0
    return replace(config, window=window, step_cost=table)
