"""What a body asks its reply to follow: a JSON schema, a regular expression, one of several texts, or a grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from lookahead.serve.errors import bad_request
from lookahead.serve.grammar import ANY_OBJECT, json_grammar, refusal
from lookahead.serve.nesting import MOST_DEPTH, too_deep
from lookahead.serve.protocol import Generation
from lookahead.serve.service import Service
from lookahead.serve.surrogates import is_text


@dataclass(frozen=True)
class Constraint:
    """A JSON schema, or a grammar as llguidance reads it; or neither."""

    schema: dict[str, Any] | None = None
    text: str | None = None

    def grammar(self) -> str | None:
        """The grammar of the whole reply; None if it may be any text."""
        return self.text if self.schema is None else json_grammar(self.schema)


def constraint_of(body: Generation) -> Constraint:
    """The constraint in vLLM's fields. Raises a 400 if it cannot be read."""
    for kind, given in body.constraints().items():
        if kind == "json":
            return Constraint(schema=parsed_schema(given) if isinstance(given, str) else given)
        if kind == "json_object":
            return Constraint(schema=ANY_OBJECT)
        if kind == "regex":
            return Constraint(text=regex_grammar(given))
        if kind == "choice":
            return Constraint(text="start: " + " | ".join(json.dumps(text) for text in dict.fromkeys(given)))
        return Constraint(text=lark_grammar(given))
    return Constraint()


def parsed_schema(text: str) -> dict[str, Any]:
    """A schema that came as JSON text."""
    if too_deep(text):
        raise bad_request(f"the schema is nested more than {MOST_DEPTH} levels deep; flatten it", code="too_deep")
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise bad_request(f"the schema is not JSON: {error}", code="invalid_schema") from error
    if not isinstance(schema, dict) or not is_text(schema):
        raise bad_request("the schema must be a JSON object without lone surrogates", code="invalid_schema")
    return schema


def regex_grammar(regex: str) -> str:
    """The grammar of texts that match a regular expression from beginning to end."""
    whole: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(regex))
    return str(whole["grammars"][0]["lark_grammar"])


def lark_grammar(text: str) -> str:
    """A client's grammar in llguidance's Lark, or in GBNF (llama.cpp, XGrammar), which is converted."""
    if text.lstrip().startswith("{"):  # llguidance would read it as several grammars of its own
        raise refusal("it is JSON; write it in Lark, with a rule 'start'", kind="grammar")
    if "::=" not in text:
        return text
    try:
        return str(any_to_lark(text))
    except Exception as error:  # the converter raises several kinds
        raise refusal(str(error), kind="grammar") from error


async def compile_grammar(grammar: str | None, service: Service) -> None:
    """Compile a grammar in a worker thread, so that it is in the cache. Raises a 400 if that fails."""
    if grammar is not None:
        await service.in_worker(lambda: service.grammars.mask(grammar))
