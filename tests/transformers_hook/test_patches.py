"""Forward hooks and replaced `forward` methods: the tokens of `generate`, or a refusal of one line."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import accelerate.hooks
import pytest
import torch
from marks import slow_but
from pairs import decoding, ids
from tiny import tiny
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import lookahead
from lookahead.backends import choose
from lookahead.models.patches import patch_of
from lookahead.transformers_hook import facts

PROMPT = ids([5, 9, 17, 23, 5, 9, 17, 23, 5, 9])
LENGTH = 10
ROWS = ids([5, 9, 17, 23, 5, 9, 17, 23, 5, 9], [4, 8, 4, 8], [3])
STEER = torch.linspace(-3, 3, 32).roll(7)
SAYS = "depends on the length of a pass|does not treat every token alike"

Rule = Callable[[int], bool]
RULES: dict[str, Rule] = {
    "one": lambda length: length == 1,
    "several": lambda length: length > 1,
    "two": lambda length: length == 2,
    "many": lambda length: length > 16,
    "few": lambda length: length < 24,
    "the prompt's": lambda length: length == LENGTH,
}
"""Of which passes a patch changes the tokens."""


def always(length: int) -> bool:
    return True


def steered(output: Any, rule: Rule) -> Any:
    """The output of a layer, changed in passes of some lengths."""
    hidden = output[0] if isinstance(output, tuple) else output
    if not rule(hidden.shape[1]):
        return output
    return (hidden + STEER, *output[1:]) if isinstance(output, tuple) else hidden + STEER


def hook(rule: Rule) -> Any:
    return lambda module, args, output: steered(output, rule)


def pre_hook(rule: Rule) -> Any:
    def change(module: Any, args: Any, kwargs: Any) -> Any:
        if args:
            return (steered(args[0], rule), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": steered(kwargs["hidden_states"], rule)}

    return change


def hook_by_positions(rule: Rule) -> Any:
    def change(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        length = kwargs["position_ids"].shape[-1]
        return steered(output, lambda _: rule(length))

    return change


def hook_of_the_model(rule: Rule) -> Any:
    def change(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        if rule(kwargs["input_ids"].shape[1]):
            output.logits = output.logits.roll(1, -1)
        return output

    return change


def pre_hook_of_the_model(rule: Rule) -> Any:
    def change(module: Any, args: Any, kwargs: Any) -> Any:
        ids = kwargs["input_ids"]
        return args, {**kwargs, "input_ids": (ids + 1) % 61 if rule(ids.shape[1]) else ids}

    return change


def everywhere(rule: Rule, layer: Any) -> Any:
    return lambda module, args, output: steered(output, rule) if module is layer else None


def everywhere_before(rule: Rule, mlp: Any) -> Any:
    return lambda module, args: steered(args, rule) if module is mlp else None


HOOKS: dict[str, Callable[[Any, Rule], Any]] = {
    "a layer": lambda model, rule: model.model.layers[1].register_forward_hook(hook(rule)),
    "a projection": lambda model, rule: model.model.layers[0].mlp.down_proj.register_forward_hook(hook(rule)),
    "the embedding": lambda model, rule: model.model.embed_tokens.register_forward_hook(hook(rule)),
    "before a layer": lambda model, rule: model.model.layers[1].register_forward_pre_hook(
        pre_hook(rule), with_kwargs=True
    ),
    "before attention": lambda model, rule: model.model.layers[1].self_attn.register_forward_pre_hook(
        pre_hook(rule), with_kwargs=True
    ),
    "positions": lambda model, rule: model.model.layers[1].register_forward_hook(
        hook_by_positions(rule), with_kwargs=True
    ),
    "the model": lambda model, rule: model.register_forward_hook(hook_of_the_model(rule), with_kwargs=True),
    "before the model": lambda model, rule: model.register_forward_pre_hook(
        pre_hook_of_the_model(rule), with_kwargs=True
    ),
    "all modules": lambda model, rule: register_module_forward_hook(everywhere(rule, model.model.layers[1])),
    "before all modules": lambda model, rule: register_module_forward_pre_hook(
        everywhere_before(rule, model.model.layers[1].mlp)
    ),
}


def as_closure(module: Any, rule: Rule) -> Any:
    usual = module.forward
    return wraps(usual)(lambda *args, **kwargs: steered(usual(*args, **kwargs), rule))


def as_method(module: Any, rule: Rule) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return steered(type(self).forward(self, *args, **kwargs), rule)

    return types.MethodType(forward, module)


def as_partial(module: Any, rule: Rule) -> Any:
    return partial(lambda usual, *args, **kwargs: steered(usual(*args, **kwargs), rule), module.forward)


def with_slots(module: Any, rule: Rule) -> Any:
    """There can be no weak reference to it, so it cannot be known again."""

    class Forward:
        __slots__ = ("usual",)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return steered(self.usual(*args, **kwargs), rule)

    made = Forward()
    made.usual = module.forward
    return made


FORWARDS = [as_closure, as_method, as_partial, with_slots]


@contextmanager
def class_forward(kind: Any, rule: Rule) -> Iterator[None]:
    """A class whose `forward` is replaced, as libraries of kernels do it."""
    usual = kind.forward
    kind.forward = lambda self, *args, **kwargs: steered(usual(self, *args, **kwargs), rule)
    try:
        yield
    finally:
        kind.forward = usual


def refused(model: Any, inputs: Any = PROMPT, says: str = SAYS, **settings: Any) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        model.generate(**inputs, max_new_tokens=16, pad_token_id=0, custom_generate=decoding(**settings))
    assert "\n" not in str(caught.value)


def said(both: Any, model: Any, inputs: Any = PROMPT) -> Any:
    """What `generate` says with the hook, which is what it says without."""
    return both(model, inputs, max_new_tokens=8, pad_token_id=0).same().ours.tolist()


@pytest.fixture
def model() -> Any:
    return tiny("Llama", seed=0)


WHEN = pytest.mark.parametrize("known", [False, True], ids=["before the first call", "after it"])


@pytest.mark.parametrize(
    ("place", "rule"), [*(("a layer", rule) for rule in RULES), *((place, "one") for place in list(HOOKS)[1:])]
)
@WHEN
@pytest.mark.thinned(1, most=3)
def test_a_hook_that_depends_on_the_length(both: Any, model: Any, place: str, rule: str, known: bool) -> None:
    if known:
        said(both, model)
    handle = HOOKS[place](model, RULES[rule])
    try:
        refused(model)
    finally:
        handle.remove()
    said(both, model)


@pytest.mark.parametrize("rule", slow_but(RULES, "one", "many", "the prompt's"))
@pytest.mark.thinned(1, most=1)
def test_a_hook_in_half_precision(rule: str) -> None:
    """There tokens may differ by rounding, so only a hook that changes much is seen, and one that is right is not."""
    model = tiny("Llama", seed=0).to(torch.bfloat16)
    layer = model.model.layers[1]
    handle = layer.register_forward_hook(lambda module, args, output: output + STEER.to(output.dtype))
    model.generate(**PROMPT, max_new_tokens=4, pad_token_id=0, custom_generate=decoding())
    handle.remove()
    changed = RULES[rule]
    layer.register_forward_hook(
        lambda module, args, output: output + STEER.to(output.dtype) if changed(output.shape[1]) else output
    )
    refused(model)


@pytest.mark.parametrize("rule", ["one", "several", "two", "many"])
@pytest.mark.parametrize("part", [0.3, 0.04])
@pytest.mark.thinned(1, most=1)
def test_a_hook_that_adds_little_in_half_precision(rule: str, part: float) -> None:
    """Less than logits differ between kernels. What it does to its own module's outputs is seen, and the same hook is
    taken if it does that to all tokens, or only records."""
    model = tiny("Llama", seed=0).to(torch.bfloat16)
    mlp, sizes = model.model.layers[0].mlp, list[float]()
    recorded = mlp.register_forward_hook(lambda module, args, output: sizes.append(float(output.norm(dim=-1).mean())))
    model.generate(**PROMPT, max_new_tokens=3, pad_token_id=0, custom_generate=decoding())
    recorded.remove()
    steer = (part * sizes[0] * STEER / STEER.norm()).to(torch.bfloat16)

    def added(rule: Rule) -> Any:
        return lambda module, args, output: output + steer if rule(output.shape[1]) else output

    with mlp.register_forward_hook(added(RULES[rule])):
        refused(model)
    with mlp.register_forward_hook(added(always)):
        model.generate(**PROMPT, max_new_tokens=3, pad_token_id=0, custom_generate=decoding())


@pytest.mark.parametrize("place", slow_but(HOOKS, "a layer", "before attention", "all modules"))
@pytest.mark.thinned(1, most=1)
def test_a_hook_that_changes_every_token_alike(both: Any, model: Any, place: str) -> None:
    before = said(both, model)
    handle = HOOKS[place](model, always)
    try:
        after = said(both, model)
        assert after != before
        if place == "a layer":
            said(both, model, ROWS)
    finally:
        handle.remove()
    assert said(both, model) == before


def test_a_hook_that_only_records(both: Any, model: Any) -> None:
    seen: list[torch.Size] = []
    before = said(both, model)
    for module in model.modules():
        module.register_forward_hook(lambda module, args, output: seen.append(getattr(output, "shape", None)))
    assert said(both, model) == before
    assert seen


def test_a_hook_under_the_key_of_another(both: Any, model: Any) -> None:
    hooks = model.model.layers[1]._forward_hooks
    for rule in (always, RULES["one"]):
        hooks[-1] = hook(rule)
        said(both, model) if rule is always else refused(model)


@pytest.mark.parametrize("row", [0, 40])
def test_a_hook_that_changes_one_row_of_a_pass(model: Any, row: int) -> None:
    """A token of the prompt is meant, and a tree has a token there, too."""

    def change(module: Any, args: Any, output: Any) -> Any:
        if output.shape[1] > row + 1:
            output[:, row] += STEER
        return output

    model.model.layers[1].register_forward_hook(change)
    refused(model, budget=64)


def test_a_prompt_of_the_length_that_a_hook_knows(both: Any, model: Any) -> None:
    """A shorter one is decoded before and after; only the one that the hook knows by its length is refused."""
    HOOKS["a layer"](model, RULES["the prompt's"])
    shorter = ids([5, 9, 17, 23, 5, 9, 17])
    said(both, model, shorter)
    refused(model)
    said(both, model, shorter)


def test_a_hook_that_counts_to_a_larger_budget(both: Any, model: Any) -> None:
    HOOKS["a layer"](model, lambda length: length > 140)
    said(both, model)
    refused(model, budget=200)


@pytest.mark.parametrize("rule", ["one", "two"])
@pytest.mark.thinned(1, most=1)
def test_a_model_that_prepares_its_passes(both: Any, model: Any, rule: str) -> None:
    """There the tree is compared with the model's own passes behind the prompt."""
    usual = model.prepare_inputs_for_generation

    @wraps(usual)
    def prepare(*args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = usual(*args, **kwargs)
        return {**inputs, "position_ids": inputs["position_ids"] + 3}

    model.prepare_inputs_for_generation = prepare
    for inputs in (PROMPT, ROWS):
        said(both, model, inputs)
    handle = HOOKS["a layer"](model, RULES[rule])
    for inputs in (PROMPT, ROWS):
        refused(model, inputs)
    handle.remove()
    HOOKS["a layer"](model, always)
    for inputs in (PROMPT, ROWS):
        said(both, model, inputs)


@pytest.mark.parametrize("make", FORWARDS)
@pytest.mark.parametrize(
    "path", slow_but(["model.layers.1", "model.layers.0.mlp", "model.embed_tokens"], "model.layers.1")
)
@pytest.mark.thinned(1, most=1)
def test_a_forward_set_on_a_module(both: Any, model: Any, make: Any, path: str) -> None:
    """Before the first call, replaced by another, removed, and set again."""
    module = model.get_submodule(path)
    module.forward = make(module, RULES["one"])
    refused(model)
    del module.forward
    plain = said(both, model)
    module.forward = make(module, RULES["several"])
    refused(model)
    del module.forward
    module.forward = make(module, always)
    assert said(both, model) != plain
    module.forward = make(module, RULES["two"])
    refused(model)
    del module.forward
    assert said(both, model) == plain


def test_a_forward_set_on_the_model(both: Any, model: Any) -> None:
    usual = model.forward

    def patched(rule: Rule) -> Any:
        @wraps(usual)
        def forward(*args: Any, **kwargs: Any) -> Any:
            output = usual(*args, **kwargs)
            if rule(kwargs["input_ids"].shape[1]):
                output.logits = output.logits.roll(1, -1)
            return output

        return forward

    plain = said(both, model)
    for rule in (RULES["one"], always, RULES["many"]):
        model.forward = patched(rule)
        if rule is always:
            assert said(both, model) != plain
        else:
            refused(model)


def test_a_forward_at_the_address_of_another(both: Any, model: Any) -> None:
    """Python gives the memory of what is gone to the next object."""
    layer = model.model.layers[1]
    layer.forward = as_closure(layer, always)
    said(both, model)
    address, others = id(layer.forward), []
    del layer.forward
    for _ in range(1000):
        others.append(as_closure(layer, RULES["one"]))
        if id(others[-1]) == address:
            break
    assert id(others[-1]) == address
    layer.forward = others[-1]
    refused(model)


def test_a_forward_that_moves_to_another_module(both: Any, model: Any) -> None:
    first, second = (layer.mlp for layer in model.model.layers)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2 if first.__dict__.get("forward") is forward or hidden.shape[1] == 1 else hidden * 3

    first.forward = forward
    said(both, model)
    del first.forward
    second.forward = forward
    refused(model)


@WHEN
@pytest.mark.thinned(1, most=1)
def test_a_forward_set_on_a_class(both: Any, model: Any, known: bool) -> None:
    kind = type(model.model.layers[0].mlp)
    if known:
        said(both, model)
    for rule in ("one", "two"):
        with class_forward(kind, RULES[rule]):
            refused(model)
    with class_forward(kind, always):
        said(both, model)
    said(both, model)


@WHEN
@pytest.mark.thinned(1, most=3)
@pytest.mark.parametrize("kind", ["forward", "model", "class", "hook", "all modules", "before all modules"])
def test_the_graph_backend_calls_no_patch(model: Any, kind: str, known: bool) -> None:
    """So even one that changes nothing is refused there."""

    def never(length: int) -> bool:
        return False

    if known:
        model.generate(**PROMPT, max_new_tokens=2, custom_generate=decoding(backend="graph"))
    module, says = model.model.layers[1].mlp, "graph backend.*would not be called"
    if kind in ("forward", "model"):
        changed = module if kind == "forward" else model
        changed.forward = as_closure(changed, never)
        refused(model, says=says, backend="graph")
    elif kind == "class":
        with class_forward(type(module), never):
            refused(model, says=says, backend="graph")
    else:
        handle = HOOKS.get(kind, HOOKS["a layer"])(model, never)
        try:
            refused(model, says=says, backend="graph")
        finally:
            handle.remove()


@pytest.mark.parametrize("kind", ["forward", "all modules"])
@pytest.mark.thinned(1, most=1)
def test_auto_then_takes_the_eager_backend(both: Any, model: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "input_device", lambda model: torch.device("cuda"))
    if kind == "forward":
        model.model.layers[1].forward = as_closure(model.model.layers[1], always)
        handle = None
    else:
        handle = HOOKS[kind](model, always)
    try:
        pair = both(model, PROMPT, max_new_tokens=16, hook=decoding(backend="auto")).same()
    finally:
        if handle is not None:
            handle.remove()
    assert pair.hook.used == "eager"


class Steering(accelerate.hooks.ModelHook):
    """A hook of accelerate's kind, which takes the place of `module.forward`."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def post_forward(self, module: Any, output: Any) -> Any:
        return steered(output, self.rule)


def test_hooks_of_accelerate(both: Any, model: Any) -> None:
    """They replace `forward`, and those that move weights change nothing."""
    plain, layer = said(both, model), model.model.layers[1]
    accelerate.hooks.add_hook_to_module(model, accelerate.hooks.AlignDevicesHook("cpu"))
    assert said(both, model) == plain
    assert patch_of(model.modules()) is None
    for rule, append in ((RULES["one"], False), (always, False), (RULES["two"], True)):
        accelerate.hooks.add_hook_to_module(layer, Steering(rule), append=append)
        said(both, model) if rule is always else refused(model)
    accelerate.hooks.remove_hook_from_module(layer)
    assert said(both, model) == plain
    assert patch_of(model.modules()) is None
    layer.forward = as_closure(layer, RULES["one"])
    accelerate.hooks.add_hook_to_module(layer, accelerate.hooks.AlignDevicesHook("cpu"))
    refused(model)


def test_a_method_of_the_class_is_no_patch(model: Any) -> None:
    assert patch_of(model.modules()) is None
    mlp = model.model.layers[0].mlp
    mlp.forward = mlp.forward
    assert patch_of(model.modules()) is None
    mlp.forward = model.model.layers[1].mlp.forward
    assert patch_of(model.modules()) == "the forward that was set on its LlamaMLP"


@pytest.mark.slow
def test_a_compiled_forward_is_no_patch(model: Any) -> None:
    model.forward = torch.compile(model.forward, backend="eager")
    assert patch_of(model.modules()) is None
    mlp = model.model.layers[0].mlp
    mlp.forward = torch.compile(as_closure(mlp, always), backend="eager")
    assert patch_of(model.modules()) == "the forward that was set on its LlamaMLP"


def test_a_known_model_is_not_probed_again(both: Any, model: Any) -> None:
    """Nor is one with patches."""
    HOOKS["a layer"](model, always)
    model.model.layers[0].mlp.forward = as_closure(model.model.layers[0].mlp, always)
    said(both, model)
    kept = facts.known[model]
    said(both, model)
    assert facts.known[model] is kept


def test_a_patch_does_not_keep_the_model_alive() -> None:
    def used() -> weakref.ref[Any]:
        model = tiny("Llama", seed=0)
        HOOKS["all modules"](model, always).remove()
        layer = model.model.layers[1]
        layer.register_forward_hook(lambda *_: model.config and None)
        layer.forward = as_method(layer, always)
        model.generate(**PROMPT, max_new_tokens=4, custom_generate=decoding())
        assert model in facts.known
        return weakref.ref(model)

    gone = used()
    gc.collect()
    assert gone() is None


@pytest.mark.thinned(1, most=3)
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "the prompt's"])
def test_a_loaded_model(model: Any, tokenizer: Any, rule: str, backend: str) -> None:
    HOOKS["a layer"](model, RULES[rule])
    with pytest.raises(ValueError, match=SAYS) as caught:
        lookahead.load((model, tokenizer), backend=backend)
    assert "\n" not in str(caught.value)


def test_a_loaded_model_whose_forward_was_replaced(make_model: Any, tokenizer: Any) -> None:
    """The CPU backend would not call it; the eager one does."""
    model = make_model(eos_token_id=None)
    inputs = tokenizer("the quick brown fox", return_tensors="pt")
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda hidden: hidden * 2
    expected = model.generate(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=0)
    with pytest.raises(ValueError, match=r"cpu backend.*the forward that was set on its LlamaMLP would not be called"):
        lookahead.load((model, tokenizer), backend="cpu")
    loaded = lookahead.load((model, tokenizer))
    text = tokenizer.decode(expected[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    assert loaded.generate("the quick brown fox", max_tokens=12, raw=True).text == text
