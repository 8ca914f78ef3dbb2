"""One small reader per group of model families. Every module here with `READERS` is found by `models.read`."""
