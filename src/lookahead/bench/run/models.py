"""The models of a run: the one that was loaded, and its weights in other dtypes and backends that methods ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lookahead.bench.run.methods import Method
from lookahead.bench.run.stock import Stock
from lookahead.config import LookaheadConfig
from lookahead.generate import LookaheadModel, fit_to_machine

Say = Callable[[str], None]
Load = Callable[..., Any]
"""(dtype=, backend=) -> a loaded model; None for the run's own."""


def fitted(
    model: Any, tokenizer: Any, name: str, backend: str, say: Say | None, config: LookaheadConfig | None = None
) -> LookaheadModel:
    """A model of weights that are there already, fitted to this machine as `load` does unless a config is given."""
    made = LookaheadModel(model, tokenizer, name, config, backend, say)
    made.prepare(log=say)
    fit_to_machine(made, config, say)
    return made


class Models:
    """Every model that the methods ask for, made when first needed.

    The weights of a dtype are loaded once: its backends share them.
    """

    def __init__(
        self, own: Any, load: Load | None = None, draft: Callable[[], Any] | None = None, say: Say | None = None
    ) -> None:
        self.own, self._load, self._draft, self._say = own, load, draft, say
        self._made: dict[tuple[str, str | None], Any] = {}
        self._stock: dict[int, Stock] = {}
        self._alone: Any = None

    def of(self, method: Method) -> Any:
        if hasattr(self.own, "alone") and method.ranks == 1:
            self._alone = self._alone or self.own.alone()
            return self._alone
        if method.dtype is None and method.backend is None:
            return self.own
        own = _kind(self.own)
        self._made.setdefault(own, self.own)
        kind = method.dtype or own[0], method.backend
        if kind not in self._made:
            self._made[kind] = self._make(method, *kind)
        return self._made[kind]

    def _make(self, method: Method, dtype: str, backend: str | None) -> Any:
        """A model of this dtype; a backend that no method names is whatever `load` has chosen."""
        loaded = [lm for (its, _), lm in self._made.items() if its == dtype]
        for lm in loaded:
            if backend is None or backend == _kind(lm)[1]:
                return lm
        if loaded and backend is not None:
            return fitted(loaded[0].model, loaded[0].tokenizer, loaded[0].name, backend, self._say)
        if self._load is None:
            raise ValueError(f"method {method.label!r} needs another model than the one that was given")
        return self._load(dtype=dtype, backend=backend)

    def stock(self, method: Method) -> Stock:
        """transformers' own decoding of the method's model, which has nothing to do with the backend."""
        lm = self.of(method)
        stock = self._stock.setdefault(id(lm.model), Stock(lm))
        if method.how == "hf-assisted" and stock.draft is None and self._draft is not None:
            stock.draft = self._draft()
        return stock


def _kind(lm: Any) -> tuple[str, str]:
    """A loaded model's dtype and backend, by the names that a method asks for them."""
    return lm.weights, lm.backend.capabilities.name
