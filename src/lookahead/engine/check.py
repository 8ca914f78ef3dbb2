"""Whether a request can run on a backend."""

from __future__ import annotations

from lookahead.backends.base import Backend
from lookahead.backends.exact import check_exact
from lookahead.engine.request import Request


def check_request(request: Request, backend: Backend) -> None:
    """Raise ValueError if the request could not run to its end, even alone."""
    for token, _ in request.sequence.sampling.bias[-1:]:
        if token >= backend.vocab_size:
            raise ValueError(f"logit_bias has token {token}; the vocabulary is 0 to {backend.vocab_size - 1}")
    check_exact(request.sequence.config, backend)
    if request.mask is not None and (request.verifier is not None or request.noise is not None):
        raise ValueError("a request with a mask cannot have a verifier or noise; leave one of them out")
    if request.noise is not None and not backend.capabilities.draws_noise:
        raise ValueError(
            f"the {backend.capabilities.name} backend cannot sample with a request's own noise; leave `noise` out"
        )
    sequence, holds = request.sequence, backend.holds()
    longest = sequence.prompt_tokens + sequence.room + sequence.config.budget
    if holds is not None and longest > holds:
        raise ValueError(
            f"a prompt of {sequence.prompt_tokens} tokens, an output of up to {sequence.room} and a step of "
            f"{sequence.config.budget} need K/V for {longest} tokens, and the backend has room for {holds}; lower "
            "max_tokens or shorten the prompt"
        )
