"""Lookahead inside `model.generate`: one argument, and everything else that `generate` takes keeps its meaning."""

from lookahead.transformers_hook.entry import Decoding, decoding

__all__ = ["Decoding", "decoding"]
