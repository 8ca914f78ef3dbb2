"""Benchmarks: models, prompt sets, methods, reports."""
