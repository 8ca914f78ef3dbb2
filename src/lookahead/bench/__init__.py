"""Measuring: run jobs and keep records, report them, and the paper's tables and the GPU's parts as presets."""
