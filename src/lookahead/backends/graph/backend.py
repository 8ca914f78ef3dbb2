"""The graph backend: described models with paged K/V, fused layers, and each step as two CUDA graphs.

A step is a flat list of rows: the tokens of all its sequences, one sequence after the other, without padding between
them. The host half (`planner`) writes one packet of numbers into pinned memory: tokens, trees, pages, moves of accepted
K/V, sampling parameters. The device half (`runner`) replays the graphs captured for this number of rows, and returns
one array of results. The first graph (`forward.CapturedForward`) copies the packet to the device, moves the K/V of the
tokens accepted last, and runs the layers. The second (`targets.CapturedTargets`) computes targets and top tokens, and
copies them to the host. The graphs read lengths, pages and positions on the device, so that they serve every context
length and every distribution of the rows among sequences. A plain one-token step can even start before the host asks
for it: see `ahead`.

On a CPU the same steps run uncaptured, with the kernels' reference implementations: for tests, not for speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from lookahead.algorithm.output import StepOutput
from lookahead.backends.base import CacheUse, Capabilities, Layers, StepInput
from lookahead.backends.graph.ahead import LaunchedStep, StepAhead
from lookahead.backends.graph.current_device import on_model_device
from lookahead.backends.graph.exchange import Exchange
from lookahead.backends.graph.kernels.tiles import NEAR_KEYS
from lookahead.backends.graph.kinds import Sampler
from lookahead.backends.graph.kv import PagedKV, new_pools
from lookahead.backends.graph.model import GraphModel
from lookahead.backends.graph.packet import MOST_SEQUENCES
from lookahead.backends.graph.planner import Planner
from lookahead.backends.graph.rules import Rules
from lookahead.backends.graph.runner import Runner
from lookahead.backends.graph.sizes import INVARIANT_NODES, MOST_NEEDED, MOST_STATE_NODES, PAGE, ROW_SIZES, bucket
from lookahead.backends.support import check_supported, check_trees
from lookahead.kv.pages import PagePools
from lookahead.kv.slots import Slots
from lookahead.kv.states import KeptRows, Snapshots
from lookahead.models.facts import UnsupportedModelError, context_length
from lookahead.models.read import read
from lookahead.models.spec import Decoder, experts_of


class GraphBackend:
    """A `Backend` for the models that have a reader (`models.read`).

    With `invariant`, a row's result in half precision does not depend on the other rows of its step, bit for bit:
    attention sums each row in the order of its positions (see `kernels.attention`), and the matrix products sum in one
    order, too (see `products`). So it does not matter either whether K/V came from a prefill or from decoding steps.
    `kv_tokens` is the capacity of the pages in tokens, `most_rows` the maximum number of rows of a pass.
    `capture=False` runs the steps uncaptured. `capture_after`: an invariant step of a new kind is captured only after
    it was needed this many times, and until then a larger captured step is its fallback; for callers with a single
    request, who should not wait for captures. `drop_pages=False`: layers with a sliding window keep the pages before
    it, so that `cached` can return all K/V. `description` replaces the one that the model's reader gives.
    `adopts_prompts`: every sequence begins with K/V of the model's own forward pass (`adopt`). Only so does it run a
    model whose prompts are not causal.
    """

    def __init__(
        self,
        model: Any,
        *,
        invariant: bool = True,
        capture: bool | None = None,
        kv_tokens: int | None = None,
        most_rows: int = ROW_SIZES[-1],
        capture_after: int = 0,
        drop_pages: bool = True,
        description: Decoder | None = None,
        adopts_prompts: bool = False,
    ) -> None:
        check_supported(model)
        check_trees(model, recurrent=True)
        decoder = read(model, "graph") if description is None else description
        if not (decoder.causal_prompt or adopts_prompts):
            raise UnsupportedModelError(
                "the graph backend does not run this model: the tokens of its prompts see each other; "
                "use model.generate(..., custom_generate=lookahead.decoding())"
            )
        self.model = model
        self.device, self.dtype = decoder.embedding.device, decoder.embedding.dtype
        self.invariant = invariant and self.dtype in (torch.float16, torch.bfloat16)
        self.max_length = context_length(model.config.get_text_config(decoder=True))
        self.most_rows = bucket(most_rows)
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
        states = self.runner.state.states
        most_slots = None if states is None else states.slots
        self.most_nodes: int | None = min(self.most_rows, MOST_NEEDED if states is None else MOST_STATE_NODES)
        self.capabilities = Capabilities(
            "graph",
            exact_nodes=INVARIANT_NODES if self.invariant else None,
            exact_depth=NEAR_KEYS if self.invariant else None,
            row_sizes=tuple(size for size in ROW_SIZES if size <= self.most_rows),
            most_sequences=most_slots,
            experts=experts_of(decoder) if self.device.type == "cuda" else 0,  # kernels count
            runs_prompts=decoder.causal_prompt,
            adopts=states is None,
            shares_at=PAGE if states is not None and states.snapshots else None,
            overlaps=self.device.type == "cuda",
            runs_ahead=True,
            draws_noise=True,
        )
        self.vocab_size: int = len(decoder.embedding)
        kept = None if states is None else KeptRows(states.ring)
        snapshots = None if states is None else Snapshots(states.slots, states.snapshots)
        pools = new_pools(self.kv, self.most_rows)
        self.slots = Slots(pools, self.kv.longest, MOST_SEQUENCES, most_slots, kept, snapshots)
        rules = Rules(self.vocab_size, self.runner.reserve_table_slots, pinned=self.device.type == "cuda")
        self.planner = Planner(
            self.slots, rules, self.runner, self.runner.traits, most_rows=self.most_rows, capture_after=capture_after
        )
        self._ahead = StepAhead(self.runner.order_after)
        self._exchange = Exchange(self.runner, self.slots, self._ahead, adopts=self.capabilities.adopts)
        self.expert_reads = 0

    @property
    def kv(self) -> PagedKV:
        return self.runner.kv

    @property
    def layers(self) -> GraphModel:
        """The model's layers, with their matrices."""
        return self.runner.state.model

    @property
    def pool(self) -> PagePools:
        """The pages, including those in the prefix cache."""
        return self.slots.pool

    @property
    def captures(self) -> int:
        """Number of forward passes and targets graphs compiled or captured so far."""
        return self.runner.state.captures

    @property
    def noise(self) -> torch.Tensor:
        """Exponential noise [32, V] fp32, for inputs with `noise` rows, which the caller fills before the step."""
        return self.runner.state.buffers.noise

    @on_model_device
    def reads_weights_of(self, model: Any) -> bool:
        """Whether captured steps read the model's current weights. Matrices that were replaced are fused again. What
        the model's reader computed from weights is computed again."""
        return self.runner.reads_weights_of(read(model, "graph"), model)

    @property
    def has_computed_weights(self) -> bool:
        """Whether the model's reader computed some numbers from its weights. If so, captured steps see a change in
        place only after `reads_weights_of`."""
        return self.layers.has_computed_weights(self.model)

    def reload_weights(self) -> None:
        if self.slots:
            raise RuntimeError(f"{len(self.slots)} sequences are open; change the weights when they have ended")
        self._ahead.drop()
        self.slots.forget(new_pools(self.kv, self.most_rows))
        if not self.reads_weights_of(self.model):
            raise UnsupportedModelError(
                "captured steps cannot read the model's new weights, because tensors were replaced; change weights in "
                "place, with copy_ for example, or load the model again"
            )

    # Slots.

    def open(self, tokens: Sequence[int] = (), salt: str = "") -> int:
        """A slot for a new sequence, sharing cached pages, and states, of an earlier one with the same prefix."""
        number = self.slots.open(tokens, salt)
        slot = self.slots[number]
        if slot.snapshot >= 0:
            self._ahead.drop()  # it may still update a state that is replaced now
            self.runner.copy_states(slot.snapshot, slot.table_index)
        return number

    def close(self, slot: int) -> None:
        """Free the slot and its pages. What was given to `remember` stays cached until its pages are needed."""
        self._exchange.shift(self.slots[slot], 0)
        self.slots.close(slot)
        self.planner.rules.close(slot)

    def length(self, slot: int) -> int:
        """Number of cached tokens of the sequence."""
        return self.slots.by_number[slot].length

    def reserve(self, slot: int, tokens: int) -> bool:
        """Reserve pages for `tokens` tokens of the sequence. False if there are too few."""
        return self.slots.reserve_pages(self.slots.by_number[slot], tokens)

    def holds(self) -> int | None:
        """Maximum tokens of a single sequence: as many as its page table has room for, which is never more than all
        pages hold."""
        return self.slots.most_tokens

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Let later sequences share the full pages of these tokens, which are cached in the slot. Shifted positions are
        not shared. With recurrent states, sharing begins at one of the sequence's snapshots."""
        state = self.slots[slot]
        if state.shift:
            return
        self.pool.remember(state.tables, tokens[: state.length])
        if self.slots.snapshots is not None:
            self.slots.snapshots.remember(slot, state.tables[0].digests)

    def cache_use(self) -> CacheUse:
        """How full the pages are, and the prefix cache's hits."""
        pool = self.pool
        return CacheUse(pool.usage, pool.query_tokens, pool.hit_tokens)

    @on_model_device
    def check_room(self, sequences: int, tokens: int) -> None:
        """Make sure that `sequences` sequences of `tokens` tokens each fit into the slots and pages at once.

        If the pages do not, and no slot is open, the K/V is reallocated. Raises UnsupportedModelError if that is
        impossible.
        """
        if sequences > self.slots.most_slots:
            raise UnsupportedModelError(
                f"the graph backend has room for the recurrent states of {self.slots.most_slots} sequences, and "
                f"{sequences} are needed; use a smaller batch"
            )
        needs = self.runner.missing_pages(sequences, tokens)
        if not needs:
            return
        if self.slots:
            held = max(self.kv.pages) * PAGE
            raise UnsupportedModelError(f"the graph backend's pages hold {held} tokens and are in use")
        self._ahead.drop()
        try:
            self.runner.enlarge(needs, sequences, tokens)
        finally:
            self.slots.replace_pages(new_pools(self.kv, self.most_rows), self.kv.longest)

    # Capturing in advance.

    @on_model_device
    def compile_kernels(self) -> None:
        """Compile the kernels of one sequence's steps in several threads. Otherwise each of them is compiled when it is
        first launched, one after the other. Where steps are captured lazily, only fallback steps are compiled."""
        self.runner.compile_kernels(fallbacks=self._lazy)

    @property
    def _lazy(self) -> bool:
        """Whether steps of a new kind run as fallback steps first."""
        return bool(self.capture and self.planner.capture_after and self.invariant)

    @on_model_device
    def prepare(self, tokens: int, budget: int, sequences: int = 1) -> Mapping[str, float]:
        """Capture all steps that up to `sequences` sequences of up to `tokens` tokens and this budget need.

        Otherwise the first prompt or step of a new size has to wait for its capture. Returns the `PrepareTimes` of the
        backend so far.
        """
        self._ahead.drop()
        sequences = min(sequences, MOST_SEQUENCES, self.runner.most_prepared)
        self.planner.rules.reserve(sequences)
        self.runner.prepare(tokens, budget, sequences)
        return asdict(self.runner.state.times)

    @on_model_device
    def prepare_fallbacks(self, noise: bool = False) -> None:
        """Capture the fallback steps of a single sequence with a typical prompt; with `noise` those that sample with
        it. The first call then takes a moment longer, and later ones do not wait for captures."""
        if self._lazy:
            self.runner.prepare_fallbacks(Sampler.MULTINOMIAL if noise else Sampler.GREEDY)

    # A step.

    @on_model_device
    def launch(self, inputs: Sequence[StepInput]) -> LaunchedStep:
        """Start a step, unless it already runs ahead; then start the next one ahead if its inputs are known."""
        launched = None
        if self._ahead.watches:
            launched = self._ahead.take_matching(
                inputs, [self.slots[sequence.slot].length for sequence in inputs], self.slots
            )
        if launched is not None:
            self.planner.continue_from(inputs, launched.kept)
        else:
            kind, packet, starts, lengths, snapshots = self.planner.plan(inputs)
            launched = LaunchedStep(list(inputs), starts, lengths, self.runner.run(kind, packet))
            for source, target in snapshots:
                self.runner.copy_states(source, target)
        if self._ahead.may_follow(launched) and self.planner.reserve_ahead(launched.inputs):
            kept = self.planner.keep_ahead(launched.inputs)
            running = self.runner.run_ahead(launched.running, self.slots.take_changes())
            self._ahead.note_started(launched, running, kept)
        launched.make_outputs()
        return launched

    @on_model_device
    def collect(self, launched: LaunchedStep) -> list[StepOutput]:
        """Wait for a step, and read the targets and top tokens of its needed rows."""
        launched.running.wait()
        self.expert_reads = launched.running.expert_reads()
        outputs = launched.read()
        self._ahead.note_results(launched, outputs)
        return outputs

    def step(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        """Launch and collect."""
        return self.collect(self.launch(inputs))

    def commit(self, accepted: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Keep the root and these nodes. The root's K/V is already in place; the next step moves that of the nodes."""
        self.slots.commit(accepted)

    # Importing and exporting K/V: see `exchange`.

    @on_model_device
    def adopt(self, slot: int, length: int, layers: Layers, offset: Sequence[int] = ()) -> None:
        self._exchange.adopt(self.slots[slot], length, layers, offset)

    @on_model_device
    def cached(self, slot: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return self._exchange.cached(self.slots[slot])
