"""Lookahead inside `model.generate`: one argument, with all other arguments of `generate` unchanged."""

from lookahead.transformers_hook.entry import Decoding, decoding

__all__ = ["Decoding", "decoding"]
