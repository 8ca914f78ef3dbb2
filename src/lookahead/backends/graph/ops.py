"""The operations of a step besides matrix products: Triton kernels on a GPU, reference implementations on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lookahead.backends.graph.kernels import (
    reference,
    reference_draw,
    reference_heads,
    reference_layers,
    reference_states,
)
from lookahead.backends.graph.kernels.rows import Rows
from lookahead.backends.graph.kernels.tiles import HeadShape, Tiling, tiles_for
from lookahead.machine import cores

COMPILE_THREADS = 16
"""The most kernels that are compiled at once. A 7B Llama has 54, of which attention's four take half of the time."""


class Ops:
    """The operations for one device. Their shapes are documented in `kernels`.

    `compiled` and `processors` (the number of multiprocessors to tile for) are for tests, which run the kernels on a
    CPU in Triton's interpreter.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        compiled: bool | None = None,
        processors: int | None = None,
    ) -> None:
        self.compiled = device.type == "cuda" if compiled is None else compiled
        self._device = device
        self._use_reference()
        if self.compiled:
            self._use_kernels()
            self._processors = processors or torch.cuda.get_device_properties(device).multi_processor_count

    def _use_reference(self) -> None:
        self.attend: Any = reference.attend
        self.move_accepted: Any = reference.move_accepted
        self.copy_pinned: Any = reference.copy_pinned
        self.copy_packet: Any = reference.copy_packet
        self.locate_rows: Any = reference_heads.locate_rows
        self.norm_heads: Any = reference_heads.norm_heads
        self.rotate_write: Any = reference_heads.rotate_write
        self.embed: Any = reference_layers.embed
        self.add_norm: Any = reference_layers.add_norm
        self.activate: Any = reference_layers.activate
        self.apply_gate: Any = reference_layers.apply_gate
        self.apply_head_gates: Any = reference_layers.apply_head_gates
        self.scale: Any = reference_layers.scale
        self.last_columns: Any = reference_layers.last_columns
        self.finish_logits: Any = reference_layers.finish_logits
        self.list_walks: Any = reference_states.list_walks
        self.convolve: Any = reference_states.convolve
        self.store_inputs: Any = reference_states.store_inputs
        self.replay_inputs: Any = reference_states.replay_inputs
        self.gate: Any = reference_states.gate
        self.scan: Any = reference_states.scan
        self.gated_norm: Any = reference_states.gated_norm
        self.quantised: Any = None
        self.fp8: Any = None
        self.experts: Any = None

    def _use_kernels(self) -> None:
        from lookahead.backends.graph.kernels import (
            activations,
            attention,
            convolve,
            copies,
            ends,
            gated_norm,
            gates,
            heads,
            locate,
            norms,
            paths,
            scan,
            walks,
        )
        from lookahead.backends.graph.kernels.expert_products import ExpertProducts
        from lookahead.backends.graph.kernels.fp8 import fp8_products
        from lookahead.backends.graph.kernels.quantised import QuantisedProducts
        from lookahead.backends.graph.kernels.workspace import Workspace

        self.quantised, self.experts = QuantisedProducts(self._device), ExpertProducts(self._device)
        self.fp8 = fp8_products(self._device, self.quantised)
        self.attend, self._paths, self._workspace = attention.attend, paths, Workspace
        self.move_accepted, self.copy_pinned = copies.move_accepted, copies.copy_pinned
        self.copy_packet, self.locate_rows = copies.copy_packet, locate.locate_rows
        self.norm_heads, self.rotate_write = heads.norm_heads, heads.rotate_write
        self.embed, self.last_columns, self.finish_logits = ends.embed, ends.last_columns, ends.finish_logits
        self.activate, self.apply_gate, self.add_norm = activations.activate, activations.apply_gate, norms.add_norm
        self.apply_head_gates, self.scale = activations.apply_head_gates, activations.scale
        self.list_walks, self.scan, self.gate = walks.list_walks, scan.scan, gates.gate
        self.convolve, self.store_inputs = convolve.convolve, convolve.store_inputs
        self.replay_inputs, self.gated_norm = convolve.replay_inputs, gated_norm.gated_norm

    def compile_launched(self, work: Callable[[], object]) -> None:
        """Compile, in several threads, the kernels that `work` launches, without running them; nothing on a CPU."""
        if self.compiled:
            from lookahead.backends.graph.kernels.compiling import compile_launched

            compile_launched(work, threads=min(cores(), COMPILE_THREADS))

    def workspace(self) -> Any:
        """Memory for the partial results of `attend`, shared by all captured steps; see `kernels.workspace`."""
        return self._workspace(self._device) if self.compiled else None

    def list_paths(self, rows: Rows, work: Any, tiles: Any, group: int) -> None:
        """List the paths of an invariant step's trees for `attend`; see `kernels.paths`.

        The reference implementation of `attend` needs no list.
        """
        if self.compiled and tiles.near_keys:
            self._paths.list_paths(rows, work.paths, tiles, group)

    @property
    def processors(self) -> int:
        """Number of multiprocessors of the device; 0 on a CPU, so that no tile is split there."""
        return self._processors if self.compiled else 0

    def tiles(self, rows: int, shape: HeadShape, tiling: Tiling, *, invariant: bool) -> Any:
        """The launch parameters of `attend` for a step of this many rows; see `kernels.tiles`. None on a CPU."""
        if not self.compiled:
            return None
        return tiles_for(rows, shape, tiling, invariant=invariant, processors=self._processors)


def new_top_work(rows: int, vocabulary: int, top: int, device: torch.device) -> Any:
    """Workspace for the `top` best tokens of up to `rows` rows, shared by all steps; None on a CPU."""
    if device.type != "cuda":
        return None
    from lookahead.backends.graph.kernels.top import TopWork

    return TopWork(rows, vocabulary, top, device)


class TopTokens:
    """The results of a step: for each of R needed nodes target, n likeliest tokens, and their probability levels.

    They are int32 [R, 1 + 2 n], once on the device (`out`) and twice on the host (`host_copies`, which begin at
    `addresses`). Consecutive steps alternate between the two host copies, so that the host can read one step's results
    while the device sends the next. A host copy may be read only after waiting for its step.
    """

    def __init__(self, out: torch.Tensor, work: Any = None) -> None:
        """`out` int32 [R, 1 + 2 n]. `work` is a `TopWork` for at least R rows, on a GPU."""
        self.out, self.work = out, work
        pinned = out.device.type == "cuda"
        self.host_copies = [torch.zeros(out.shape, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self.addresses = [copy.data_ptr() for copy in self.host_copies]

    def fill(self, logits: torch.Tensor) -> None:
        """Compute `out` from logits [R, V]."""
        if self.work is None:
            reference.top_tokens(logits, self.out)
            return
        from lookahead.backends.graph.kernels.top import top_tokens

        top_tokens(logits, self.out, self.work)

    @torch.inference_mode()
    def send(self, turn: int) -> None:
        """Start copying `out` to host copy `turn`, whose memory torch keeps alive until the copy is done."""
        self.host_copies[turn].copy_(self.out, non_blocking=True)


class ExpertReads:
    """How many experts all passes so far have read: on the device, and after waiting for a step on the host, one number
    per host copy of `TopTokens`."""

    def __init__(self, reads: torch.Tensor) -> None:
        """`reads` int32 [1]."""
        self._reads, pinned = reads, reads.device.type == "cuda"
        self.host_copies = [torch.zeros(1, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._last, self._total = 0, 0

    def copy(self, copy_pinned: Any) -> None:
        """Copy the number to the first host copy, in a captured step."""
        copy_pinned(self._reads, self.host_copies[0])

    @torch.inference_mode()
    def send(self, turn: int) -> None:
        """As `TopTokens.send`."""
        self.host_copies[turn].copy_(self._reads, non_blocking=True)

    def total(self, turn: int) -> int:
        """The number without overflow, from this host copy."""
        now = int(self.host_copies[turn][0])
        self._total += (now - self._last) % (1 << 32)
        self._last = now
        return self._total


class LogProbs:
    """Log-probabilities of R rows: of their targets and of their `top` likeliest tokens.

    On the host, after waiting for the step: `likely` are these tokens, `array` [R, 1 + n] the log-probabilities.
    """

    def __init__(self, rows: int, top: int, device: torch.device, work: Any = None) -> None:
        self._top = TopTokens(torch.zeros(rows, 1 + 2 * top, dtype=torch.int32, device=device), work)
        self._values = torch.zeros(rows, 1 + top, dtype=torch.float32, device=device)
        self._host = torch.zeros(self._values.shape, dtype=torch.float32, pin_memory=device.type == "cuda")
        self.likely, self.array = self._top.host_copies[0].numpy()[:, 1 : 1 + top], self._host.numpy()
        self._log_probs: Any = reference_draw.log_probs
        if device.type == "cuda":
            from lookahead.backends.graph.kernels.draw import log_probs

            self._log_probs = log_probs

    def fill(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Compute them from the model's unadjusted logits [R, V] and the targets [R]."""
        self._top.fill(logits)
        self._top.out[:, 0].copy_(targets)
        self._log_probs(logits, self._top.out, self._top.work, self._values)

    def send(self, copy_pinned: Any) -> None:
        """Copy them to the host."""
        copy_pinned(self._top.out, self._top.host_copies[0])
        copy_pinned(self._values, self._host)


class Drawing:
    """Samples the targets of up to `rows` rows.

    The shapes are documented in `kernels.draw`. `tops` is the `TopTokens.work` of the step, filled from the same
    logits; it is None on a CPU. `dtype` is that of the logits. One object serves all captured steps of at most `rows`
    rows, since they never run at the same time. `compiled` is for tests, which run the kernels on a CPU in Triton's
    interpreter.
    """

    def __init__(
        self,
        rows: int,
        vocabulary: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        compiled: bool | None = None,
    ) -> None:
        compiled = device.type == "cuda" if compiled is None else compiled
        self._work: Any = None
        self._draws: Any = reference_draw
        if compiled:
            from lookahead.backends.graph.kernels import draw, filters

            self._work = filters.DrawWork(rows, vocabulary, device, dtype)
            self._draws = draw

    def draw(self, logits: torch.Tensor, settings: torch.Tensor, out: torch.Tensor, tops: Any) -> None:
        """Sample by inverse CDF, as `sampling.pick` does, into column 0 of out [R, 1 + 2 n]: `draw.draw_targets`."""
        self._draws.draw_targets(logits, settings, out, tops, self._work)

    def draw_multinomial(
        self,
        logits: torch.Tensor,
        settings: torch.Tensor,
        noise: torch.Tensor,
        depths: torch.Tensor,
        out: torch.Tensor,
        tops: Any,
    ) -> None:
        """Sample as `torch.multinomial` does, with noise [D, V], into column 0 of `out`.

        See `draw.multinomial_targets`.
        """
        self._draws.multinomial_targets(logits, settings, noise, depths, out, tops, self._work)
