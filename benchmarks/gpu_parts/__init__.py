"""The parts of `benchmarks/gpu.py`, by what they measure."""
