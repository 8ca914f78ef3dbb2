"""Running jobs: prompts, methods, transformers' own decoding, and records on disk."""
