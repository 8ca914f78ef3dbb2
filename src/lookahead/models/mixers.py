"""What readers of mixers with a recurrent state share: convolutions, Mamba-2 and gated delta nets of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lookahead.models.feed_forward import Activation
from lookahead.models.matrix import Matrix
from lookahead.models.norm import Norm
from lookahead.models.parts import NormReader, read_norm
from lookahead.models.recurrent import Convolution, GatedDelta, Mamba2


def read_convolution(module: Any, activation: str | None) -> Convolution:
    """A torch.nn.Conv1d whose channels are groups of their own, weight [channels, 1, taps]."""
    bias = None if module.bias is None else module.bias.detach()
    return Convolution(module.weight.detach()[:, 0], bias, None if activation is None else Activation.named(activation))


def read_mamba2(module: Any, norm: NormReader = read_norm, **changes: Any) -> Mamba2:
    """A Mamba-2 mixer with `in_proj`, `conv1d`, `norm` and `out_proj`; `changes` are fields that it does not show."""
    fields = {
        "heads": module.num_heads,
        "head_dim": module.head_dim,
        "groups": module.n_groups,
        "state_dim": module.ssm_state_size,
        "projection": Matrix((module.in_proj,)),
        "convolution": read_convolution(module.conv1d, module.activation),
        "a_log": module.A_log.detach(),
        "dt_bias": module.dt_bias.detach(),
        "skip": module.D.detach(),
        "out": Matrix((module.out_proj,)),
        "norm": None if type(module.norm) is torch.nn.Identity else _in_parts(norm(module.norm), module.norm),
        "norm_first": getattr(module.norm, "norm_before_gate", False),
        "prompt_time_steps": tuple(module.time_step_limit),
    }
    return Mamba2(**{**fields, **changes})


def _in_parts(norm: Norm, module: Any) -> Norm:
    """This norm of as many parts as the module has groups."""
    assert norm.weight is not None
    width = len(norm.weight)
    parts = getattr(module, "n_groups", width // getattr(module, "group_size", width))
    return replace(norm, weight=norm.weight.view(parts, -1))


def read_gated_delta(module: Any, projection: Matrix, **changes: Any) -> GatedDelta:
    """A gated delta net with `conv1d`; `projection` is its input's, and `changes` are fields that others have."""
    fields = {
        "heads": module.num_v_heads,
        "key_heads": module.num_k_heads,
        "key_dim": module.head_k_dim,
        "value_dim": module.head_v_dim,
        "projection": projection,
        "convolution": read_convolution(module.conv1d, module.activation),
        "a_log": module.A_log.detach(),
        "dt_bias": module.dt_bias.detach(),
    }
    return GatedDelta(**{**fields, **changes})
