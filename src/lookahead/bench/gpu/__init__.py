"""What a step and a token cost on a CUDA GPU: `python -m lookahead.bench.gpu`."""
