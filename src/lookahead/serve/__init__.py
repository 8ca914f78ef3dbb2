"""`lookahead serve`: an OpenAI-compatible HTTP server. A reply does not depend on the other requests in the batch.

One thread steps the engine, and asyncio handles HTTP: in one process, or with `fronts` in processes of their own. The
modules, from the outside in:

    fronts       HTTP in processes of its own; ray: several engines
    app          routes and middleware, built from a model and settings
    life         signals, draining, the ready line; sockets: binding the address; connection, closing: limits of one
             connection, and how it ends
    chat, completions, responses, messages, tokens    one file per endpoint
    openapi      the statuses in `/openapi.json`
    protocol, chat_protocol, responses_protocol, messages_protocol    request bodies
    choices, logprobs    parts of the responses; messages_errors: errors in Anthropic's format
    prompts      chats as token ids, through the chat template
    stream       responses as server-sent events
    steps        per-step details of a stream (`lookahead.steps` and `lookahead.trace`)
    scoring      log-probabilities of prompts
    pages, web/  the web page at `/`
    parameters   a body's fields become sampling parameters, stop rules and a config
    service      submits requests to the engine and routes its events back to asyncio
    requests, reply    the requests in flight; serialize, wire, remote: the same for other processes
    structured, grammar, vocabulary, tools    structured output
    reasoning, answers    the parts of a model's text: reasoning, message and calls
    keys, limits, metrics, memory    authentication, admission, Prometheus metrics, state on disk
    access, records, tracing, logs    request ids, a line in the log per request, spans
    nesting, surrogates    bodies that a parser, template or tokenizer would choke on
"""

EXTRA = ("fastapi", "uvicorn", "httptools", "prometheus_client", "llguidance")
"""The packages of the extra `serve`."""
