"""Lookahead decoding: a Hugging Face causal LM generates several tokens per step, with the same output.

import lookahead
model = lookahead.load()
print(model.generate("Write a haiku.", max_tokens=64).text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lookahead.config import LookaheadConfig
from lookahead.loading.embedded import ModelError

if TYPE_CHECKING:
    from lookahead.backends.failures import DeviceError
    from lookahead.generate import Completion, LookaheadModel, Piece, Stream, load
    from lookahead.models.facts import UnsupportedModelError
    from lookahead.transformers_hook import Decoding, decoding

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "Decoding",
    "DeviceError",
    "LookaheadConfig",
    "LookaheadModel",
    "ModelError",
    "Piece",
    "Stream",
    "UnsupportedModelError",
    "__version__",
    "decoding",
    "load",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch and transformers when it is first used, so that the command line starts fast."""
    if name in ("Decoding", "decoding"):
        from lookahead import transformers_hook as hook

        return getattr(hook, name)
    if name in __all__:
        from lookahead import generate

        return getattr(generate, name)
    raise AttributeError(f"module 'lookahead' has no attribute {name!r}")
