"""The targets graph: from the logits of the needed rows to targets, top tokens and log-probabilities on the host.

It is a separate CUDA graph, so that a forward pass need not be captured again for every way of sampling.
"""

from __future__ import annotations

import torch

from lookahead.backends.graph.kinds import Sampler, TargetsKind
from lookahead.backends.graph.ops import LogProbs, TopTokens
from lookahead.backends.graph.records import Draw
from lookahead.backends.graph.state import Captured, DeviceState
from lookahead.backends.graph.targets_packet import TargetsPacket
from lookahead.config import MOST_LOGPROBS


class CapturedTargets(Captured):
    """Samples the targets of one kind of step from the most recent logits."""

    packet: TargetsPacket

    def __init__(self, state: DeviceState, kind: TargetsKind) -> None:
        super().__init__(state)
        self.kind, self.draws = kind, kind.sampler is not Sampler.GREEDY
        device, buffers = state.device, state.buffers
        self.logits = buffers.logits
        self.packet = TargetsPacket(
            kind.needed, device.type == "cuda", drawn=self.draws, adjusted=kind.adjusted, most_rows=state.most_rows
        )
        self.memory = torch.zeros_like(self.packet.host, device=device)
        self.views = self.packet.views(self.memory)
        self.top = TopTokens(buffers.results[: kind.needed], buffers.top_work(buffers.results.shape[1] // 2))
        self.expert_reads = buffers.expert_reads
        self.ahead = torch.zeros(1, dtype=torch.int64, device=device)  # steps ahead since the last packet
        # Allocate what this kind needs now: nothing may be allocated during a capture.
        self.logprobs: LogProbs | None = None
        if self.draws:
            buffers.drawing, buffers.noise  # noqa: B018
        if kind.adjusted:
            buffers.adjusting, buffers.scores(kind.needed)
        if kind.logprobs:
            top = min(MOST_LOGPROBS, buffers.logits.shape[1])
            self.logprobs = LogProbs(kind.needed, top, device, buffers.top_work(top))

    def run_ahead(self, turn: int) -> None:
        """Sample the targets of a step ahead, and send its results to host copy `turn`.

        The copy to the host is not part of the graph, for two reasons: either host copy may be the target, and torch
        keeps the pinned memory alive until the copy is done, even if the backend is deleted before. The first run is
        captured only afterwards: replaying it would count the step twice.
        """
        if self.graph_ahead is not None:
            self.graph_ahead.replay()
        else:
            self._run_ahead()
        self.top.send(turn)
        if self.expert_reads is not None:
            self.expert_reads.send(turn)
        if self.state.capture and self.graph_ahead is None:
            self.graph_ahead = self.state.captured_ahead(self._run_ahead)

    @torch.inference_mode()
    def _run(self) -> None:
        """Sample the targets, on the device."""
        ops = self.state.ops
        # 1. Copy the packet to the device, and count the newly accepted tokens.
        if len(self.memory):
            ops.copy_pinned(self.packet.host, self.memory)
        if self.kind.adjusted:
            self.state.buffers.adjusting.count(self.views)
        # 2. Sample.
        self._sample()
        if self.draws:
            self.ahead.zero_()
        # 3. Copy the results to the host.
        ops.copy_pinned(self.top.out, self.top.host_copies[0])
        if self.expert_reads is not None:
            self.expert_reads.copy(ops.copy_pinned)
        if self.logprobs is not None:
            self.logprobs.send(ops.copy_pinned)

    @torch.inference_mode()
    def _run_ahead(self) -> None:
        """Sample the targets one token further in every sequence."""
        if self.draws:
            self.views["draws"][:, Draw.UNIFORM] = self.views["next_uniforms"].index_select(1, self.ahead)[:, 0]
            self.ahead.add_(1)
        self._sample()

    def _sample(self) -> None:
        """Targets, top tokens and log-probabilities from the logits."""
        buffers, kind, views = self.state.buffers, self.kind, self.views
        logits = scores = buffers.logits[: kind.needed]
        if kind.adjusted:
            scores, drawing = buffers.scores(kind.needed)
            buffers.adjusting.adjust(logits, scores, views)
        self.top.fill(scores)
        if self.draws:
            if not kind.adjusted:
                drawing = buffers.drawing
            if kind.sampler is Sampler.MULTINOMIAL:
                drawing.draw_multinomial(
                    scores, views["draws"], buffers.noise, views["noise"], self.top.out, self.top.work
                )
            else:
                drawing.draw(scores, views["draws"], self.top.out, self.top.work)
        if self.logprobs is not None:
            self.logprobs.fill(logits, self.top.out[:, 0])
