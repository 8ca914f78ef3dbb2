"""Reads quantised checkpoints: one small reader per format, all into the layout of `models.quantised`.

No format's own package is needed. `methods` finds the reader of a config, `quantizer` puts it into transformers'
loading, and `gguf` keeps the blocks of a GGUF file packed.
"""
