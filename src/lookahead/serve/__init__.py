"""`lookahead serve`: an OpenAI-compatible HTTP server. A reply does not depend on who else is being served.

One process: one thread steps the engine, and asyncio speaks HTTP. The parts, from the outside in:

    app          the routes and the middleware, made from a model and settings
    life         signals, draining, the ready line; listen: its address; connection: what is read from one
    chat, completions, responses, tokens    one file per endpoint
    protocol     the bodies that clients send; replies: what they get
    stream       a reply as server-sent events
    steps        what a stream tells of each step, to requests that ask
    scoring      log-probabilities of prompts
    pages, web/  the web page at `/`
    asks         a body's fields become what the engine takes
    service      jobs go to the engine, and its events come back to asyncio; jobs, reply: what is on its way
    grammar, vocabulary, tools    structured output
    keys, limits, metrics, memory    who asks, how much, what was measured, what is kept on disk
    nesting, surrogates    what of a body no parser, template or tokenizer could take
"""

EXTRA = ("fastapi", "uvicorn", "httptools", "prometheus_client", "llguidance")
"""What the server needs: the extra `serve`."""
