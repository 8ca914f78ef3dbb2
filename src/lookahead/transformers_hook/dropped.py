"""Recovers the arguments that `generate` does not pass to a callable `custom_generate`.

`GenerationMixin._extract_generation_mode_kwargs` takes `streamer`, `tokenizer`, `assistant_model` and `synced_gpus` out
of the call. For its own loops `generate` passes them on. For a callable it passes only what is left in `kwargs` under a
name that the callable's signature has, and none of the four is left there. So a signature alone cannot ask for them.

`recover_dropped` is the only code of lookahead that reads a foreign stack frame. It runs when transformers inspects our
callable's signature, inside that method:

- it reads the method's locals `custom_generate`, `generation_mode_kwargs` and `kwargs`;
- it adds two keys to the dictionary `kwargs` of this call: `tokenizer` (if one was given) and `dropped`.

transformers then forwards both, because our signature names them. No function or class of transformers is changed, and
calls with another `custom_generate`, or with none, never reach this code. Checked with transformers 5.17.0, 5.18.0 and
5.22.2, whose method is the same. If the frame is not found, `warn_if_dropped` warns: a streamer must not be dropped
silently.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import FrameType
from typing import Any

import transformers


@dataclass(frozen=True)
class Dropped:
    """The arguments of one call of `generate` that do not reach a callable `custom_generate` by themselves."""

    streamer: Any = None
    assistant_model: Any = None
    synced_gpus: bool = False


def recover_dropped(hook: Any, frame: FrameType | None) -> None:
    """Find the arguments in the frame that inspects `hook`'s signature, and add them to the forwarded ones.

    `frame` is the frame to start from; None (a Python without frames) and unrelated frames do nothing.
    """
    while frame is not None:
        names = frame.f_locals
        if frame.f_code.co_name == "_extract_generation_mode_kwargs" and names.get("custom_generate") is hook:
            taken, kwargs = names["generation_mode_kwargs"], names["kwargs"]
            if taken.get("tokenizer") is not None:
                kwargs["tokenizer"] = taken["tokenizer"]
            kwargs["dropped"] = Dropped(
                taken.get("streamer"), taken.get("assistant_model"), bool(taken.get("synced_gpus"))
            )
            return
        frame = frame.f_back


def warn_if_dropped(dropped: Dropped | None, synced_gpus: bool | None) -> None:
    """Warn if neither the frame nor transformers provided the arguments.

    A transformers that passes them to a callable passes `synced_gpus` in every call, as it does to its own loops.
    Python shows a warning once per code location, so a program sees it once.
    """
    if dropped is None and synced_gpus is None:
        warnings.warn(
            f"transformers {transformers.__version__} may not pass generate's streamer on to lookahead decoding; "
            "give it as custom_generate=lookahead.decoding(streamer=...) instead",
            stacklevel=3,
        )
