"""The settings of a request. Each is checked once, and an error says what to change."""

from lookahead.config.checks import reject_unknown
from lookahead.config.drafting import (
    BACKENDS,
    METHODS,
    OTHER_SOURCES,
    SCOPES,
    SOURCES,
    UNCHANGED,
    LookaheadConfig,
    given_fields,
)
from lookahead.config.sampling import MOST_LOGPROBS, SamplingParams, StopRules, new_seed

__all__ = [
    "BACKENDS",
    "METHODS",
    "MOST_LOGPROBS",
    "OTHER_SOURCES",
    "SCOPES",
    "SOURCES",
    "UNCHANGED",
    "LookaheadConfig",
    "SamplingParams",
    "StopRules",
    "given_fields",
    "new_seed",
    "reject_unknown",
]
