"""Small descriptions with experts that differ from a plain mixture in one knob each, as `knobs` has them of the rest.

`MIXTURES` has a function of a `Maker` for each. All have a dense layer, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from described import HIDDEN
from knobs import DIM, HEADS, Maker

from lookahead.models.feed_forward import Activation, MoE, Router, Scoring
from lookahead.models.matrix import ExpertMatrix
from lookahead.models.spec import Decoder

EXPERTS, TOP, WIDTH = 8, 3, 24


def router(make: Maker, experts: int = EXPERTS, *, bias: bool = False, **changes: Any) -> Router:
    return Router(**{"logits": make.matrix(experts, bias=bias), "top_k": min(TOP, experts), **changes})


def experts_of(
    make: Maker, out: int, width: int, experts: int = EXPERTS, *, bias: bool = False, transposed: bool = False
) -> ExpertMatrix:
    weights = make.random(experts, width, out) if transposed else make.random(experts, out, width)
    return ExpertMatrix(weights, experts, make.random(experts, out) if bias else None, transposed)


def mixture(make: Maker, own: Router | None = None, **changes: Any) -> MoE:
    """`bias` and `transposed` are of the experts' matrices; all other changes are fields of the mixture."""
    own = own or router(make)
    stored = {name: changes.pop(name) for name in ("bias", "transposed") if name in changes}
    gate_up = experts_of(make, 2 * WIDTH, HIDDEN, own.logits.shape[0], **stored)
    return MoE(own, gate_up, experts_of(make, HIDDEN, WIDTH, own.logits.shape[0], **stored), **changes)


def _routed(**changes: Any) -> Callable[[Maker], Decoder]:
    """A plain layer, and one whose router has these fields; a function is called with the maker."""

    def made(make: Maker) -> Decoder:
        found = {name: value(make) if callable(value) else value for name, value in changes.items()}
        return make.decoder(make.block(), make.block(feed_forward=mixture(make, router(make, **found))))

    return made


def _mixed(**changes: Any) -> Callable[[Maker], Decoder]:
    """The same for fields of the mixture."""

    def made(make: Maker) -> Decoder:
        found = {name: value(make) if callable(value) else value for name, value in changes.items()}
        return make.decoder(make.block(), make.block(feed_forward=mixture(make, **found)))

    return made


def _block(**changes: Any) -> Callable[[Maker], Decoder]:
    """The same for fields of the block."""

    def made(make: Maker) -> Decoder:
        found = {name: value(make) if callable(value) else value for name, value in changes.items()}
        shared = mixture(make, shared=make.feed_forward())
        return make.decoder(make.block(feed_forward=shared, **found), make.block(feed_forward=mixture(make), **found))

    return made


def _choice_bias(make: Maker) -> torch.Tensor:
    return make.random(EXPERTS, size=0.5)


MIXTURES: dict[str, Callable[[Maker], Decoder]] = {
    # routers
    "softmax": _routed(),
    "softmax, weights with sum 1": _routed(normalised=True),
    "softmax of the chosen": _routed(scoring=Scoring.CHOSEN, bias=True),
    "sigmoid": _routed(scoring=Scoring.SIGMOID),
    "sigmoid with a bias of the choice": _routed(
        scoring=Scoring.SIGMOID, choice_bias=_choice_bias, normalised=True, scale=2.5
    ),
    "groups": _routed(scoring=Scoring.SIGMOID, choice_bias=_choice_bias, groups=4, kept_groups=2, normalised=True),
    "groups by their best": _routed(groups=4, kept_groups=3, group_best=1),
    "sparse mixer": _routed(scoring=Scoring.SPARSE_MIXER, top_k=2, jitter=0.3),
    "scale per expert": _routed(normalised=True, expert_scale=lambda make: 1 + make.random(EXPERTS)),
    "one expert for each row": _routed(top_k=1),
    "all experts for each row": _routed(top_k=EXPERTS),
    "a single expert": _routed(experts=1),
    # experts
    "biases": _mixed(bias=True),
    "transposed": _mixed(bias=True, transposed=True),
    "alternating, clamped": _mixed(activation=Activation.CLAMPED, constants=(0.7, 1.7), alternate=True, bias=True),
    "clamped": _mixed(activation=Activation.CLAMPED, constants=(0.7, 1.7)),
    "tanh gelu": _mixed(activation=Activation.GELU_TANH),
    "shared expert": _mixed(shared=lambda make: make.feed_forward(bias=True)),
    "shared expert behind a gate": _mixed(
        shared=lambda make: make.feed_forward(), shared_gate=lambda make: make.matrix(1)
    ),
    # blocks
    "scaled": _block(residual_scale=0.22),
    "norms behind": _block(feed_forward_out_norm=lambda make: make.norm(), residual_scale=0.5),
    "parallel": _block(parallel=True),
    # beside it
    "dense, clamped": lambda make: make.decoder(
        make.block(), make.block(feed_forward=make.feed_forward(activation=Activation.CLAMPED, constants=(0.7, 1.7)))
    ),
    "output gate": lambda make: make.decoder(
        make.block(), make.block(make.attention(output_gate=make.matrix(HEADS * DIM)), mixture(make))
    ),
}
