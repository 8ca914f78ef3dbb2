"""The graph backend: described models, with K/V in pages, fused layers, and each step as two CUDA graphs.

A step is a flat list of rows: the tokens of all its sequences, one sequence after the other, without padding between
them. To run a step, the host writes one packet of numbers into pinned memory, replays the graphs that were captured for
the number of rows, and reads one array of results back. The first graph (`forward.CapturedForward`) copies the packet
to the device, moves the K/V of the tokens accepted last, and runs the layers. The second (`targets.CapturedTargets`)
computes targets and top tokens, and copies them to the host. They read lengths, pages and positions on the device, so
that they serve every context length and every division of the rows among sequences. A plain one-token step can even
start before the host asks for it: see `ahead`.

On a CPU the same steps run uncaptured, on the kernels' slow twins. That is for tests, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from operator import add
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from lookahead.algorithm.output import StepOutput
from lookahead.backends.base import NO_TREE, CacheUse, Capabilities, Layers, StepInput
from lookahead.backends.failures import DeviceMemoryError
from lookahead.backends.graph.adjusting import RulesLine
from lookahead.backends.graph.ahead import RunningStep, StepAhead, stream_of
from lookahead.backends.graph.kernels.tiles import REACH
from lookahead.backends.graph.kinds import StepKind, Targets, TargetsKind
from lookahead.backends.graph.kv import PagedKV, default_tokens, group_pages, longest_text, new_kv, new_pools
from lookahead.backends.graph.matrices.products import products_of
from lookahead.backends.graph.memory import with_room
from lookahead.backends.graph.model import GraphModel
from lookahead.backends.graph.ops import Ops
from lookahead.backends.graph.packet import MOST_ENTRIES
from lookahead.backends.graph.preparing import every_end, every_forward, first_forwards, forwards_ahead
from lookahead.backends.graph.sizes import INVARIANT_ROWS, MOST_NEEDED, PAGE, ROW_SIZES, bucket
from lookahead.backends.graph.state import Buffers, DeviceState
from lookahead.backends.graph.steps import CapturedSteps
from lookahead.backends.support import check_supported
from lookahead.config import SamplingParams
from lookahead.kv.pages import PagePools
from lookahead.kv.slots import Slot, Slots
from lookahead.models.facts import UnsupportedModelError, context_length
from lookahead.models.read import read
from lookahead.models.spec import Decoder

RULES = "a table of penalties and biases"

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
        self.model, self._drop_pages = model, drop_pages
        self.device, self.dtype = decoder.embedding.device, decoder.embedding.dtype
        self.invariant = invariant and self.dtype in (torch.float16, torch.bfloat16)
        self.max_length = context_length(model.config)
        self.most_rows = self._most_rows = bucket(most_rows)
        self.most_nodes: int | None = min(self._most_rows, MOST_NEEDED)
        self.capabilities = Capabilities(
            "graph",
            exact_nodes=INVARIANT_ROWS if self.invariant else None,
            exact_depth=REACH if self.invariant else None,
            row_sizes=tuple(size for size in ROW_SIZES if size <= self._most_rows),
            overlaps=self.device.type == "cuda",
            draws_noise=True,
        )
        self.vocab_size: int = len(decoder.embedding)
        self.capture = self.device.type == "cuda" if capture is None else capture
        ops, products = Ops(self.device), products_of(self.device, self.dtype, invariant)
        self.layers = GraphModel(decoder, ops, products, drop_pages=drop_pages)
        buffers = Buffers(self.layers, ops, self._most_rows)
        self.state = DeviceState(
            model=self.layers,
            ops=ops,
            kv=self._first_kv(kv_tokens),
            buffers=buffers,
            capture=self.capture,
            pool=self._new_graph_pool(),
            stream=torch.cuda.Stream(self.device) if self.device.type == "cuda" else None,
            most_rows=self._most_rows,
        )
        self._slots = Slots(new_pools(self.kv, self._most_rows), self.kv.longest, MOST_ENTRIES)
        self._rules_lines: dict[int, RulesLine] = {}  # of the slots that have penalties or a bias
        self._steps = CapturedSteps(self.state, invariant=self.invariant, patient=patient)
        self._prepared: set[bool] = set()
        self._ahead = StepAhead(self.device)

    @property
    def kv(self) -> PagedKV:
        return self.state.kv

    @property
    def pool(self) -> PagePools:
        """The pages, and which of them are in use or kept for later sequences."""
        return self._slots.pool

    def follows(self, model: Any) -> bool:
        """Whether captured steps read the weights that the model has now. Its matrices are fused again where they were
        replaced."""
        state, products = self.state, products_of(self.device, self.dtype, self.invariant)
        now = GraphModel(read(model, "graph"), state.ops, products, drop_pages=self._drop_pages)
        return now.addresses() == self.layers.addresses()

    # Memory.

    def _new_graph_pool(self) -> Any:
        """Memory that all captured graphs share. It ends with the last graph that used it."""
        return torch.cuda.graph_pool_handle() if self.capture else None

    def _first_kv(self, tokens: int | None) -> PagedKV:
        """Pages for `tokens` tokens, by default as many as are useful and leave enough memory."""
        groups, longest = self.layers.groups, longest_text(self.max_length)
        if tokens is None:
            tokens = default_tokens(groups, longest, self._pass_rows, self.layers.like)
        return self._new_kv(group_pages(groups, tokens, self._pass_rows), tokens, longest)

    def _new_kv(self, pages: Sequence[int], tokens: int, longest: int) -> PagedKV:
        """See `kv.new_kv`."""
        return new_kv(self.layers.groups, pages, tokens, longest, self._pass_rows, self.layers.like)

    @property
    def _pass_rows(self) -> int:
        """How many rows of a pass may stand behind a sequence's cached tokens."""
        return max(self._most_rows, INVARIANT_ROWS)

    @on_its_device
    def check_room(self, sequences: int, tokens: int) -> None:
        """Make sure that `sequences` sequences of `tokens` tokens each fit into the pages at once.

        If they do not, and no slot is open, larger pages replace these. UnsupportedModelError if that cannot be.
        """
        groups, longest = self.layers.groups, tokens + INVARIANT_ROWS
        needs = [sequences * group.most_pages(longest, self._pass_rows) for group in groups]
        if all(map(int.__le__, needs, self.kv.pages)) and longest <= self.kv.longest * PAGE:
            return
        if self._slots:
            held = max(self.kv.pages) * PAGE
            raise UnsupportedModelError(f"the graph backend's pages hold {held} tokens and are in use")
        self._ahead.forget()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a forgotten step ahead may still use what is freed here
        self._steps.clear()
        self._prepared.clear()
        self.state.pool = self._new_graph_pool()
        pages, positions = self.kv.pages, self.kv.longest * PAGE
        # The old pages are freed before the new ones are made.
        self.state.kv = PagedKV(groups, [1] * len(groups), PAGE, self.layers.like)
        larger = list(map(max, needs, pages))
        what = f"room for {sequences} sequences of {tokens} tokens"
        try:
            self.state.kv = with_room(
                lambda: self._new_kv(larger, max(larger) * PAGE, max(longest_text(self.max_length), tokens)),
                self._steps.clear,
                what,
                self.device,
            )
        except (UnsupportedModelError, DeviceMemoryError):
            self.state.kv = PagedKV(groups, pages, positions, self.layers.like)
            raise
        finally:
            self._slots.replace_pages(new_pools(self.kv, self._most_rows), self.kv.longest)

    # Slots.

    def open(self, tokens: Sequence[int] = (), salt: str = "") -> int:
        """A slot for a new sequence, with the pages of an earlier one that began the same, if there is one."""
        return self._slots.open(tokens, salt)

    def close(self, slot: int) -> None:
        """Give the slot and its pages back. What was given to `remember` stays while there is room."""
        self._slots.close(slot)
        if (line := self._rules_lines.pop(slot, None)) is not None:
            self.state.buffers.adjusting.give_back(line.number)

    def length(self, slot: int) -> int:
        """How many tokens of the sequence are cached."""
        return self._slots.by_number[slot].length

    def reserve(self, slot: int, tokens: int) -> bool:
        """Take pages for `tokens` tokens of the sequence. False if there are too few."""
        return self._slots.has_pages(self._slots.by_number[slot], tokens)

    def cache_use(self) -> CacheUse:
        """How full the pages are, and what the prefix cache was good for."""
        pool = self.pool
        return CacheUse(pool.usage, pool.query_tokens, pool.hit_tokens)

    @property
    def noise(self) -> torch.Tensor:
        """Exponential noise [32, V] fp32, for inputs that name lines of it. Whoever draws fills these lines before."""
        return self.state.buffers.noise

    def holds(self) -> int | None:
        """All positions that a sequence's table has room for: no more than its pages hold."""
        return self.kv.longest * PAGE

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Let later sequences share the full pages of these tokens, which are the slot's cached ones."""
        state = self._slots[slot]
        self.pool.remember(state.tables, tokens[: state.length])

    @property
    def captures(self) -> int:
        """How many forward passes and ends of steps were compiled and captured so far."""
        return self.state.captures

    @on_its_device
    def prepare(self, tokens: int, budget: int, sequences: int = 1) -> None:
        """Capture in advance all steps that up to `sequences` sequences of up to `tokens` tokens and this budget need.

        Otherwise the first prompt of some length, or the first step of some size, has to wait while it is captured.
        """
        self._ahead.forget()
        most, device = self._most_prepared, self._steps.device
        budget, sequences = min(budget, MOST_NEEDED, most), min(sequences, MOST_ENTRIES, most)
        adjusting = self.state.buffers.adjusting
        if adjusting.lines < sequences:
            self._steps.forget_adjusted()
            with_room(lambda: adjusting.grow(sequences), self._steps.drop_unused, RULES, self.device)
        forwards = list(every_forward(device, sequences, min(tokens, most), budget, most))
        for kind in forwards:
            self._steps.forward(kind)
        for needed in sorted({kind.needed for kind in forwards}, reverse=True):
            for end in every_end(needed):
                self._steps.end(end)
        for kind in forwards_ahead(device, sequences) if self.capture else ():
            for targets in (Targets.GREEDY, Targets.DRAWN):
                self._steps.get(StepKind(kind, TargetsKind(kind.needed, targets))).get_ready_ahead()

    @on_its_device
    def prepare_stand_ins(self, noise: bool = False) -> None:
        """Capture the steps that stand in for others, as far as one sequence of a usual prompt needs them; with `noise`
        those that draw from it. The first call then takes a moment longer, and the next ones wait for nothing."""
        if self.capture and self._steps.patient and self.invariant and noise not in self._prepared:
            self._prepared.add(noise)
            targets = Targets.MULTINOMIAL if noise else Targets.GREEDY
            for kind in first_forwards(self._steps.device, self._most_prepared):
                self._steps.get(StepKind(kind, TargetsKind(kind.needed, targets)))

    @property
    def _most_prepared(self) -> int:
        """The most rows of a pass: no more than its pages hold."""
        return min(self._most_rows, min(self.kv.pages) * PAGE, self.kv.longest * PAGE)

    # A step.

    @on_its_device
    def launch(self, inputs: Sequence[StepInput]) -> RunningStep:
        """Start a step, unless it runs ahead already; then start the next one ahead, if it is known."""
        running = None
        if self._ahead.watches:
            running = self._ahead.take(inputs, [self._slots[item.slot].length for item in inputs], self._slots)
        if running is None:
            running = self._start(inputs)
        if self._ahead.may_follow(running) and all(map(self._has_page_ahead, running.inputs)):
            self._ahead.start(running)
        running.get_ready()
        return running

    def _has_page_ahead(self, item: StepInput) -> bool:
        """Whether the sequence has a page for the token after its next one; if need be, it gets one."""
        slot = self._slots[item.slot]
        if not self._slots.has_pages(slot, slot.length + 2):
            return False
        self._send_pages()
        return True

    def _send_pages(self) -> None:
        """Send the device the pages that sequences have got since the last time."""
        if changes := self._slots.take_changes():
            self.kv.write_tables(changes)

    def _start(self, inputs: Sequence[StepInput]) -> RunningStep:
        """Start a step of these inputs."""
        # 1. Take the pages first: without them, nothing has happened yet.
        items, slots = list(inputs), [self._slots.by_number[item.slot] for item in inputs]
        sizes, lengths = [item.tree.size for item in items], [slot.length for slot in slots]
        self._check_trees(sizes)
        needs = list(map(add, lengths, sizes))
        if has_chunks := any(item.chunk for item in items):
            needs = [need + len(item.chunk) for need, item in zip(needs, items, strict=True)]
        self._slots.need_pages(slots, needs, PAGE // 2)
        for item in items:
            if item.adjustment is not None and item.slot not in self._rules_lines:
                self._take_rules_line(item)
        # 2. A pass has at most `most_rows` rows: run the rest of the prompt chunks in passes before it.
        rows = sum(needs) - sum(lengths)
        while rows > self._most_rows:
            place = max(range(len(items)), key=lambda i: len(items[i].chunk))
            chunk = items[place].chunk
            self._run_alone(StepInput(items[place].slot, chunk[: self._most_rows], NO_TREE, SamplingParams(), ()))
            items[place] = replace(items[place], chunk=chunk[self._most_rows :])
            rows -= len(chunk) - len(items[place].chunk)
            lengths[place] = slots[place].length
            self._slots.need_pages([slots[place]], [needs[place]])  # those of the next rows, where there is a window
        # 3. Choose the captured step.
        step = self._steps.choose(items, lengths)
        # 4. Fill the packet, and go.
        packet, ends, (_, targets, adjusted, _) = step.packet, step.targets.packet, step.kind.targets
        commits, moves = self._commits(packet.entries_room, packet.moves_room)
        packet.begin()
        changes = self._slots.take_changes()
        if len(changes) > 2 * packet.changes_room:
            self.kv.write_tables(changes)
            changes = []
        chunks, trees = [item.chunk for item in items], [item.tree for item in items]
        starts = packet.put([slot.line for slot in slots], lengths, chunks, trees, step.queries)
        packet.end(commits, moves, changes)
        if targets is not Targets.GREEDY:
            ends.put_draws(items)
        if adjusted:
            self.state.buffers.adjusting.put(ends, self._rules_lines, items)
            ends.end(packet)
        if has_chunks:
            for slot, chunk in zip(slots, chunks, strict=True):
                slot.length += len(chunk)  # now it is the root's position, where `commit` starts
        if adjusted:
            self.state.buffers.adjusting.send_masks()
        step.run()
        return RunningStep(step, items, starts, [slot.length for slot in slots], 0, stream_of(self.device))

    def _take_rules_line(self, item: StepInput) -> None:
        """Give a sequence with penalties or a bias its line in the tables."""
        if not item.sampling.penalised and not item.sampling.logit_bias:
            return
        adjusting = self.state.buffers.adjusting
        if adjusting.full:  # the tables are made anew, and captured steps have the old ones
            self._steps.forget_adjusted()
        room = self._steps.drop_unused, RULES, self.device, item.slot
        self._rules_lines[item.slot] = RulesLine(with_room(adjusting.take, *room))

    def _check_trees(self, sizes: Sequence[int]) -> None:
        """Raise ValueError for trees that do not fit into a pass."""
        if sum(sizes) > self._most_rows:
            raise ValueError(f"trees of {sum(sizes)} tokens in a pass of {self._most_rows}")
        if max(sizes) > MOST_NEEDED:
            raise ValueError(f"a tree of {max(sizes)} tokens; at most {MOST_NEEDED} are captured")

    def _run_alone(self, item: StepInput) -> None:
        """Run a pass of one prompt chunk, and wait for it: its packet may be written again then."""
        self._start([item]).wait()

    def _commits(self, most: int, most_moves: int) -> tuple[list[int], list[list[int]]]:
        """The commits that the next packet carries, and their moves; see `Packet`. They then count as done."""
        if not self._slots.pending_fit(most, most_moves):
            self._flush()
        return self._slots.take_pending()

    @on_its_device
    @torch.inference_mode()
    def _flush(self) -> None:
        """Move the accepted K/V of all pending commits now, without a step."""
        self._ahead.forget()
        if self._slots.pending:
            commits, moves = self._slots.take_pending()
            numbers = torch.tensor(commits, dtype=torch.int32, device=self.device).view(-1, 2)
            counts = torch.tensor([0, len(numbers)], dtype=torch.int32, device=self.device)
            for cache, own in zip(self.kv.caches, moves, strict=True):
                places = torch.tensor(own, dtype=torch.int32, device=self.device).view(-1, 2)
                self.state.ops.move_accepted(cache, counts, numbers, places)

    @on_its_device
    def collect(self, running: RunningStep) -> list[StepOutput]:
        """Wait for a step, and read the targets and top tokens of its needed rows.

        Later steps overwrite all of the step's memory, so what is handed out are copies.
        """
        running.wait()
        outputs = running.read(self.state.buffers.logits)
        self._ahead.collected(running, outputs)
        return outputs

    def step(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        """Launch and collect."""
        return self.collect(self.launch(inputs))

    def commit(self, accepted: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Keep the root and these nodes. The root's K/V is in place; that of the nodes is moved by the next step."""
        self._slots.commit(accepted)

    # K/V from and for elsewhere.

    @on_its_device
    @torch.inference_mode()
    def adopt(self, slot: int, length: int, layers: Layers, offset: Sequence[int] = ()) -> None:
        """Take over a sequence's K/V: per layer, keys and values [Hkv, n, D] of the last n of `length` tokens."""
        if any(offset):
            raise ValueError(f"the graph backend's positions are places, and cannot be moved by {tuple(offset)}")
        self._flush()  # a pending move might write to the pages that are taken now
        state = self._slots[slot]
        self._slots.forget_pages(state, length)
        before, state.length = state.length, length
        try:
            self._slots.need_pages([state], [length])
        except MemoryError:
            state.length = before
            raise
        self.kv.write(device_pages(state), length, layers)

    @on_its_device
    @torch.inference_mode()
    def cached(self, slot: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of a sequence's K/V: per layer, keys and values [Hkv, length, D]. Of a layer with a window these may
        be only the tokens that it still reads."""
        state = self._slots[slot]
        self._flush()
        return self.kv.read(device_pages(state), state.length)


def device_pages(slot: Slot) -> list[list[int]]:
    """For each attention group, the sequence's pages as the device counts them: from 1, and 0 for a dropped one."""
    return [[page + 1 for page in table.pages] for table in slot.tables]
