"""What the two ranks of the fixture `two` are asked for."""

from __future__ import annotations

from typing import Any

CONFIG = {"window": 3, "ngram": 4, "guesses": 4, "budget": 40}
SAMPLED = {"max_tokens": 16, "temperature": 0.8, "seed": 5}
CHANGES = ["none", "weight", "swap", "config", "dtype", "vocabulary"]
LED: list[dict[str, Any]] = [
    {"prompt": "the fox", "settings": {"max_tokens": 30}},
    {"prompt": "once more", "settings": {**SAMPLED, "max_tokens": 24}},
    {"prompt": "a dog", "settings": {"max_tokens": 40}, "cancel_after": 2},
    {"prompt": "the fox and the dog", "settings": {**SAMPLED, "stop": ["o", "x"]}},
    {"prompt": "once", "settings": {**SAMPLED, "max_tokens": 40, "seed": 8}, "cancel_after": 1},
    {"prompt": "more", "settings": {"max_tokens": 12, "repetition_penalty": 1.3, "logit_bias": [[5, 2.0]]}},
    {"prompt": "the dog", "settings": {**SAMPLED, "max_tokens": 20, "method": "autoregressive"}},
]
"""What rank 0 alone is asked for, all at once."""
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "the fox", "settings": {"max_tokens": 20}},
    {"prompt": ["the fox", "once more", "a dog"], "settings": SAMPLED},
    {"prompt": "once more", "settings": SAMPLED, "stream": True},
    {"prompt": "the fox", "settings": SAMPLED, "rank1": {"prompt": None}},
    {"prompt": "the fox", "settings": {"max_tokens": 8, "method": "prompt-lookup"}},
    {"prompt": "the fox", "settings": {"max_tokens": 20, "stop": ["o", "x"]}},
    {"prompt": "the fox", "settings": {"max_tokens": 16, "temperature": 1.0}},
    {"prompt": "the fox", "settings": {"max_tokens": 16}, "rank1": {"max_tokens": 17}},
    {"prompt": "the fox", "settings": {}, "rank1": {"prompt": "the dog"}},
    {"prompt": "the fox", "settings": SAMPLED, "rank1": {"seed": 6}},
    {"prompt": "the fox", "settings": {"max_tokens": 0}},
    {"prompt": "the fox", "settings": {"max_token": 3}},
    {"prompt": "", "settings": {"raw": True}},
    {"prompt": ["a", "b"], "settings": {}, "stream": True},
]
