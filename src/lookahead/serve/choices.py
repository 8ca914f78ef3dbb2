"""What all responses share: ids, times, usage, and the end of a stream of choices."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from time import time
from typing import Any

from lookahead.serve.errors import ApiError
from lookahead.serve.protocol import StreamOptions
from lookahead.serve.reply import Reply
from lookahead.serve.requests import RequestState
from lookahead.serve.stream import DONE, event
from lookahead.stats import Stats


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def now() -> int:
    return int(time())


def usage_of(states: Sequence[RequestState], reasoning: int = 0) -> dict[str, Any]:
    """OpenAI's usage, with speculation statistics under `lookahead`. Choices of one prompt count it once. `reasoning`
    is how many tokens of the output are reasoning."""
    total = Stats.total(state.sequence.stats for state in states)
    prompts = {id(state.spec.prompt): state for state in states}.values()
    prompt = sum(len(state.spec.prompt) for state in prompts)
    predictions = [state.sequence.prediction for state in states if state.sequence.prediction is not None]
    accepted = sum(one.accepted for one in predictions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": total.generated_tokens,
        "total_tokens": prompt + total.generated_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(min(state.request.cached, len(state.spec.prompt)) for state in prompts)
        },
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(0, sum(len(one.tokens) for one in predictions) - accepted),
        },
        "lookahead": {
            "steps": total.steps,
            "compression": round(total.compression, 3),
            "tried": sum(state.tried for state in states),
            "accepted": sum(total.accepted_by_depth),
            "by_source": total.accepted_by_source,
        },
    }


class Choices:
    """Events that completions and chats share (see `stream.Events`). `head` holds the first fields of each."""

    def __init__(self, head: dict[str, Any], options: StreamOptions | None, reply: Reply) -> None:
        self.head, self.reply = head, reply
        self._includes_usage = options is not None and options.include_usage

    def last(self) -> bytes:
        if not self._includes_usage:
            return DONE
        return event({**self.head, "choices": [], "usage": self._usage()}) + DONE

    def _usage(self) -> dict[str, Any]:
        return usage_of(self.reply.states)

    def failed(self, error: ApiError) -> bytes:
        return event(error.body()) + DONE

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self.head, "choices": [choice]}
