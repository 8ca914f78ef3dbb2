"""`/v1/responses`: text in, text out, with its own events when streamed. Nothing is stored between requests."""
