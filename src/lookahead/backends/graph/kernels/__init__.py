"""Triton kernels of a decoding step, and `reference`, their slow reference implementations."""
