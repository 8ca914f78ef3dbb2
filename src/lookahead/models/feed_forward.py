"""The feed-forwards of a described model: a dense one, or a mixture of experts with its router."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from lookahead.models.facts import UnsupportedModelError
from lookahead.models.matrix import ExpertMatrix, Matrix, check_shape


class Activation(Enum):
    """The function between the two matrices of a feed-forward.

    GELU_TANH approximates GELU by a tanh, QUICK_GELU is x sigmoid(1.702 x), RELU2 is relu(x)^2. XIELU has four
    constants (`FeedForward.constants`): a, b, c, d. It is a x^2 + c x above 0, else b (exp(min(x, d)) - 1 - x) + c x.
    CLAMPED has two, a limit and a factor, and needs the gate: with g = min(gate, limit) and u = up within +-limit it is
    g sigmoid(factor g) (u + 1), and not the activation's product with up.
    """

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    QUICK_GELU = "quick_gelu"
    RELU = "relu"
    RELU2 = "relu2"
    XIELU = "xielu"
    CLAMPED = "clamped"

    @property
    def constants(self) -> int:
        """How many constants it has."""
        return {Activation.XIELU: 4, Activation.CLAMPED: 2}.get(self, 0)

    @classmethod
    def named(cls, name: str) -> Activation:
        """The activation that configs of transformers give this name. Raises UnsupportedModelError for others."""
        other = {"swish": cls.SILU, **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), cls.GELU_TANH)}
        found = other.get(name) or {known.value: known for known in cls}.get(name)
        if found is None:
            raise UnsupportedModelError(f"its activation is {name!r}")
        return found


@dataclass(frozen=True, eq=False)
class FeedForward:
    """down(activation(gate) * up), where `gate_up` gives all of gate and then all of up.

    Not `gated`: down(activation(up)), where `gate_up` gives up alone. `constants` are those of the activation. The gate
    is multiplied by `gate_scale` before its activation, and the result by `out_scale`.
    """

    gate_up: Matrix
    down: Matrix
    activation: Activation = Activation.SILU
    gated: bool = True
    constants: tuple[float, ...] = ()
    gate_scale: float = 1.0
    out_scale: float = 1.0

    def __post_init__(self) -> None:
        check_shape("gate_up", self.gate_up, ((2 if self.gated else 1) * self.down.shape[1], None))
        _check_activation(self.activation, self.constants, gated=self.gated)


class Scoring(Enum):
    """How a router's logits become scores.

    SOFTMAX over all experts; SIGMOID of each; CHOSEN: the best logits are chosen, and the scores are a softmax over
    these alone. SPARSE_MIXER is Phi's: a softmax over the logits that are at most 2 x jitter below the best, relative
    to the larger of their size and the best; its value at the best is that expert's score. Then the same without it.
    """

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    CHOSEN = "chosen"
    SPARSE_MIXER = "sparse mixer"


@dataclass(frozen=True, eq=False)
class Router:
    """Chooses `top_k` experts for each row of x, and weighs them.

    The logits of all experts, x W^T in fp32 with `logits` [experts, hidden], become scores (`scoring`). The experts
    with the largest score + `choice_bias` are chosen, of equal ones the first. With `groups` the experts are in as many
    equal groups in a row, of which only `kept_groups` may be chosen from: those whose `group_best` best experts have
    the largest sum of scores and biases. The chosen experts' weights are their scores without the bias; if
    `normalised`, divided by their sum + `sum_eps`; times `scale` and, if given, `expert_scale` [experts].
    """

    logits: Matrix
    top_k: int
    scoring: Scoring = Scoring.SOFTMAX
    normalised: bool = False
    choice_bias: torch.Tensor | None = None
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 2
    scale: float = 1.0
    expert_scale: torch.Tensor | None = None
    jitter: float = 0.0
    sum_eps: float = 0.0

    def __post_init__(self) -> None:
        experts = self.logits.shape[0]
        if experts % self.groups or not 1 <= self.kept_groups <= self.groups:
            raise ValueError(f"{self.kept_groups} of {self.groups} groups of {experts} experts")
        if not 1 <= self.top_k <= experts // self.groups * self.kept_groups:
            raise ValueError(f"{self.top_k} experts of {self.kept_groups} groups of {experts // self.groups}")
        for given in (self.choice_bias, self.expert_scale):
            if given is not None and given.numel() != experts:
                raise ValueError(f"{list(given.shape)} numbers for {experts} experts")


@dataclass(frozen=True, eq=False)
class MoE:
    """The sum over a row's chosen experts e of weight[e] * down[e](activation(gate[e]) * up[e]), plus `shared`.

    `gate_up` gives all of gate and then all of up; or, if they `alternate`, a column of gate, one of up, and so on.
    Not `gated`: down[e](activation(up[e])), where `gate_up` gives up alone.

    With `latent_in` [latent, hidden] and `latent_out` [hidden, latent] the experts, but not the router, read the first
    one's product with x, and the second one's product with their sum is added.

    `shared` is a feed-forward that every row goes through; times the sigmoid of `shared_gate` [1, hidden], if given.
    """

    router: Router
    gate_up: ExpertMatrix
    down: ExpertMatrix
    activation: Activation = Activation.SILU
    constants: tuple[float, ...] = ()
    alternate: bool = False
    shared: FeedForward | None = None
    shared_gate: Matrix | None = None
    gated: bool = True
    latent_in: Matrix | None = None
    latent_out: Matrix | None = None

    def __post_init__(self) -> None:
        experts, hidden = self.router.logits.shape
        width = hidden if self.latent_in is None else self.latent_in.shape[0]
        check_shape("gate_up", self.gate_up, ((2 if self.gated else 1) * self.down.shape[1], width))
        if (self.latent_in is None) is not (self.latent_out is None) or (self.alternate and not self.gated):
            raise ValueError("latent_in needs latent_out, and columns that alternate need a gate")
        if self.latent_in is not None and self.latent_out is not None:
            check_shape("latent_in", self.latent_in, (None, hidden))
            check_shape("latent_out", self.latent_out, (hidden, width))
        if {self.gate_up.experts, self.down.experts} != {experts}:
            raise ValueError(f"{self.gate_up.experts} and {self.down.experts} experts, for a router of {experts}")
        if self.shared_gate is not None:
            check_shape("shared_gate", self.shared_gate, (1, hidden))
        _check_activation(self.activation, self.constants, gated=self.gated)


def _check_activation(activation: Activation, constants: tuple[float, ...], *, gated: bool) -> None:
    if len(constants) != activation.constants:
        raise ValueError(f"{len(constants)} constants for {activation.value}")
    if activation is Activation.CLAMPED and not gated:
        raise ValueError(f"{activation.value} needs a gate")
