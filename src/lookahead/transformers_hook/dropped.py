"""The arguments that `generate` takes and does not pass to a callable `custom_generate`, and how we still get them.

`GenerationMixin._extract_generation_mode_kwargs` takes `streamer`, `tokenizer`, `assistant_model` and `synced_gpus` out
of the call. For its own loops `generate` passes them on. For a callable it passes only what is left in `kwargs` under a
name that the callable's signature has, and none of the four is left there. So a signature alone cannot ask for them.

`recover_dropped` is the only code of lookahead that looks into somebody else's frame. It runs when transformers asks
for our callable's signature, inside that method:

- it reads the method's locals `custom_generate`, `generation_mode_kwargs` and `kwargs`;
- it writes two entries into the dictionary `kwargs` of this one call: `tokenizer` (if one was given) and `dropped`.

transformers then passes both on by itself, because our signature names them. Neither a function nor a class of
transformers is changed, and a call with another `custom_generate`, or with none, never comes here. Checked with
transformers 5.17.0, 5.18.0 and 5.22.2, whose method is the same. Where the frame is not found, `warn_if_dropped` says
so: a streamer must not be dropped silently.
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
    """Find the arguments in the frame that asks for `hook`'s signature, and put them where they are passed on.

    `frame` is the frame to start from; None (a Python without frames) and frames of anybody else do nothing.
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
    """Warn where neither the frame nor transformers gave us the arguments.

    A transformers that passes them to a callable passes `synced_gpus` in every call, as it does to its own loops.
    Python shows a warning once per place, so a program sees it once.
    """
    if dropped is None and synced_gpus is None:
        warnings.warn(
            f"transformers {transformers.__version__} may not pass generate's streamer on to lookahead decoding; "
            "give it as custom_generate=lookahead.decoding(streamer=...) instead",
            stacklevel=3,
        )
