"""The graph backend: described models, with K/V in pages, fused layers, and each step as two CUDA graphs.

A step is a flat list of rows: the tokens of all its sequences, one sequence after the other, without padding between
them. The host half (`planner`) writes one packet of numbers into pinned memory: tokens, trees, pages, accepted K/V that
move, how targets are drawn. The device half (`runner`) replays the graphs that were captured for the number of rows,
and one array of results comes back. The first graph (`forward.CapturedForward`) copies the packet to the device, moves
the K/V of the tokens accepted last, and runs the layers. The second (`targets.CapturedTargets`) computes targets and
top tokens, and copies them to the host. They read lengths, pages and positions on the device, so that they serve every
context length and every division of the rows among sequences. A plain one-token step can even start before the host
asks for it: see `ahead`.

On a CPU the same steps run uncaptured, on the kernels' slow twins. That is for tests, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from lookahead.algorithm.output import StepOutput
from lookahead.backends.base import CacheUse, Capabilities, Layers, StepInput
from lookahead.backends.graph.ahead import LaunchedStep, StepAhead
from lookahead.backends.graph.kernels.tiles import REACH
from lookahead.backends.graph.kinds import Targets
from lookahead.backends.graph.kv import PagedKV, new_pools
from lookahead.backends.graph.model import GraphModel
from lookahead.backends.graph.packet import MOST_ENTRIES
from lookahead.backends.graph.planner import Planner
from lookahead.backends.graph.rules import Rules
from lookahead.backends.graph.runner import Runner
from lookahead.backends.graph.sizes import INVARIANT_ROWS, MOST_NEEDED, PAGE, ROW_SIZES, bucket
from lookahead.backends.support import check_supported
from lookahead.kv.pages import PagePools
from lookahead.kv.slots import Slots
from lookahead.models.facts import UnsupportedModelError, context_length
from lookahead.models.read import read
from lookahead.models.spec import Decoder

P = ParamSpec("P")
R = TypeVar("R")


def on_its_device(call: Callable[Concatenate[GraphBackend, P], R]) -> Callable[Concatenate[GraphBackend, P], R]:
    """Decorate a method that launches GPU work: it runs with the model's GPU as the current device."""

    @wraps(call)
    def run(self: GraphBackend, /, *args: P.args, **options: P.kwargs) -> R:
        if self.device.type != "cuda" or torch.cuda.current_device() == self.device.index:
            return call(self, *args, **options)
        with torch.cuda.device(self.device):
            return call(self, *args, **options)

    return run


class GraphBackend:
    """A `Backend` for the models that have a reader (`models.read`).

    With `invariant`, a row's result in half precision does not depend on the other rows of its step, bit for bit:
    attention adds up each row in the order of its positions (see `kernels.attention`), and the matrix products add in
    one order, too (see `products`). So it does not matter either whether K/V came from a prompt's pass or from steps.
    `kv_tokens` is how many tokens the pages hold. `most_rows` is the most rows of a pass. `capture=False` runs the
    steps uncaptured. `patient`: an invariant step of a new kind is captured only when it has been asked for a number of
    times. Until then a larger one stands in for it. That is for callers who come once and do not want to wait.
    `drop_pages=False`: layers with a window keep the pages behind it, so that `cached` can return all K/V.
    `description` is used in place of the one that the model's reader gives.
    """

    def __init__(
        self,
        model: Any,
        *,
        invariant: bool = True,
        capture: bool | None = None,
        kv_tokens: int | None = None,
        most_rows: int = ROW_SIZES[-1],
        patient: bool = False,
        drop_pages: bool = True,
        description: Decoder | None = None,
    ) -> None:
        check_supported(model)
        decoder = read(model, "graph") if description is None else description
        self.model = model
        self.device, self.dtype = decoder.embedding.device, decoder.embedding.dtype
        self.invariant = invariant and self.dtype in (torch.float16, torch.bfloat16)
        self.max_length = context_length(model.config)
        self.most_rows = bucket(most_rows)
        self.most_nodes: int | None = min(self.most_rows, MOST_NEEDED)
        self.capabilities = Capabilities(
            "graph",
            exact_nodes=INVARIANT_ROWS if self.invariant else None,
            exact_depth=REACH if self.invariant else None,
            row_sizes=tuple(size for size in ROW_SIZES if size <= self.most_rows),
            overlaps=self.device.type == "cuda",
            draws_noise=True,
        )
        self.vocab_size: int = len(decoder.embedding)
        self.capture = self.device.type == "cuda" if capture is None else capture
        self.runner = Runner(
            decoder,
            context=self.max_length,
            invariant=invariant,
            capture=self.capture,
            kv_tokens=kv_tokens,
            most_rows=self.most_rows,
            drop_pages=drop_pages,
        )
        self.slots = Slots(new_pools(self.kv, self.most_rows), self.kv.longest, MOST_ENTRIES)
        rules = Rules(self.vocab_size, self.runner.reserve_lines, pinned=self.device.type == "cuda")
        self.planner = Planner(
            self.slots, rules, self.runner, self.runner.kinds, most_rows=self.most_rows, patient=patient
        )
        self._ahead = StepAhead(self.runner.follow)

    @property
    def kv(self) -> PagedKV:
        return self.runner.kv

    @property
    def layers(self) -> GraphModel:
        """The model's layers, with their matrices."""
        return self.runner.state.model

    @property
    def pool(self) -> PagePools:
        """The pages, and which of them are in use or kept for later sequences."""
        return self.slots.pool

    @property
    def captures(self) -> int:
        """How many forward passes and ends of steps were compiled and captured so far."""
        return self.runner.state.captures

    @property
    def noise(self) -> torch.Tensor:
        """Exponential noise [32, V] fp32, for inputs that name lines of it. Whoever draws fills these lines before."""
        return self.runner.state.buffers.noise

    def follows(self, model: Any) -> bool:
        """Whether captured steps read the weights that the model has now. Its matrices are fused again where they were
        replaced."""
        return self.runner.reads_weights_of(read(model, "graph"))

    # Slots.

    def open(self, tokens: Sequence[int] = (), salt: str = "") -> int:
        """A slot for a new sequence, with the cached pages of an earlier one that began the same."""
        return self.slots.open(tokens, salt)

    def close(self, slot: int) -> None:
        """Give the slot and its pages back. What was given to `remember` stays until its pages are needed."""
        self.slots.close(slot)
        self.planner.rules.close(slot)

    def length(self, slot: int) -> int:
        """How many tokens of the sequence are cached."""
        return self.slots.by_number[slot].length

    def reserve(self, slot: int, tokens: int) -> bool:
        """Take pages for `tokens` tokens of the sequence. False if there are too few."""
        return self.slots.has_pages(self.slots.by_number[slot], tokens)

    def holds(self) -> int | None:
        """All positions that a sequence's table has room for: no more than its pages hold."""
        return self.slots.most_tokens

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Let later sequences share the full pages of these tokens, which are the slot's cached ones."""
        state = self.slots[slot]
        self.pool.remember(state.tables, tokens[: state.length])

    def cache_use(self) -> CacheUse:
        """How full the pages are, and what the prefix cache was good for."""
        pool = self.pool
        return CacheUse(pool.usage, pool.query_tokens, pool.hit_tokens)

    @on_its_device
    def check_room(self, sequences: int, tokens: int) -> None:
        """Make sure that `sequences` sequences of `tokens` tokens each fit into the pages at once.

        If they do not, and no slot is open, larger pages replace these. UnsupportedModelError if that cannot be.
        """
        needs = self.runner.lacks_room(sequences, tokens)
        if not needs:
            return
        if self.slots:
            held = max(self.kv.pages) * PAGE
            raise UnsupportedModelError(f"the graph backend's pages hold {held} tokens and are in use")
        self._ahead.forget()
        try:
            self.runner.enlarge(needs, sequences, tokens)
        finally:
            self.slots.replace_pages(new_pools(self.kv, self.most_rows), self.kv.longest)

    # What is captured in advance.

    @on_its_device
    def prepare(self, tokens: int, budget: int, sequences: int = 1) -> None:
        """Capture in advance all steps that up to `sequences` sequences of up to `tokens` tokens and this budget need.

        Otherwise the first prompt of some length, or the first step of some size, has to wait while it is captured.
        """
        self._ahead.forget()
        sequences = min(sequences, MOST_ENTRIES, self.runner.most_prepared)
        self.planner.rules.reserve(sequences)
        self.runner.prepare(tokens, budget, sequences)

    @on_its_device
    def prepare_stand_ins(self, noise: bool = False) -> None:
        """Capture the steps that stand in for others, those that one sequence of a usual prompt needs; with `noise`
        those that draw from it. The first call then takes a moment longer, and the next ones wait for nothing."""
        if self.capture and self.planner.patient and self.invariant:
            self.runner.prepare_stand_ins(Targets.MULTINOMIAL if noise else Targets.GREEDY)

    # A step.

    @on_its_device
    def launch(self, inputs: Sequence[StepInput]) -> LaunchedStep:
        """Start a step, unless it runs ahead already; then start the next one ahead, if it is known."""
        launched = None
        if self._ahead.watches:
            launched = self._ahead.take(inputs, [self.slots[item.slot].length for item in inputs], self.slots)
        if launched is None:
            kind, packet, starts, lengths = self.planner.plan(inputs)
            launched = LaunchedStep(list(inputs), starts, lengths, self.runner.run(kind, packet))
        if self._ahead.may_follow(launched) and self.planner.take_pages_ahead(launched.inputs):
            self._ahead.start(launched, self.runner.run_ahead(launched.running, self.slots.take_changes()))
        launched.get_ready()
        return launched

    @on_its_device
    def collect(self, launched: LaunchedStep) -> list[StepOutput]:
        """Wait for a step, and read the targets and top tokens of its needed rows."""
        launched.running.wait()
        outputs = launched.read()
        self._ahead.collected(launched, outputs)
        return outputs

    def step(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        """Launch and collect."""
        return self.collect(self.launch(inputs))

    def commit(self, accepted: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Keep the root and these nodes. The root's K/V stands where it belongs; that of the nodes is moved by the next
        step."""
        self.slots.commit(accepted)

    # K/V from and for elsewhere.

    @on_its_device
    @torch.inference_mode()
    def adopt(self, slot: int, length: int, layers: Layers, offset: Sequence[int] = ()) -> None:
        """Take over a sequence's K/V: per layer, keys and values [Hkv, n, D] of the last n of `length` tokens."""
        if any(offset):
            raise ValueError(f"the graph backend counts positions from 0, and cannot move them by {tuple(offset)}")
        self._move_pending()  # a pending move might write to the pages that are taken now
        state = self.slots[slot]
        self.slots.forget_pages(state, length)
        before, state.length = state.length, length
        try:
            self.slots.need_pages([state], [length])
        except MemoryError:
            state.length = before
            raise
        self.runner.write_kv(self.slots.device_pages(state), length, layers)

    @on_its_device
    @torch.inference_mode()
    def cached(self, slot: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of a sequence's K/V: per layer, keys and values [Hkv, length, D]. Of a layer with a window these may
        be only the tokens that it still reads."""
        self._move_pending()
        state = self.slots[slot]
        return self.runner.read_kv(self.slots.device_pages(state), state.length)

    def _move_pending(self) -> None:
        """Move the accepted K/V of all pending commits now, without a step."""
        self._ahead.forget()
        if self.slots.pending:
            self.runner.move(*self.slots.take_pending())
