"""Workloads: the work that people give to language models, measured with and without lookahead."""
