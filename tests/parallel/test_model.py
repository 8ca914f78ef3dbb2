"""Two ranks: the tokens of one process, one request however it is made, and models that differ are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import assert_same, decode_alone, random_cases
from requests_of_two import CHANGES, CONFIG, LED, REQUESTS
from worlds import World

import lookahead
from lookahead import LookaheadConfig
from lookahead.parallel.handshake import checksum

CASES = random_cases(0, 2, tokens=12)


@pytest.fixture(scope="module")
def two(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """One world of two ranks for all that needs no more: what each rank reports of the random cases, of the requests
    with a config and with a measured one, and of models that differ."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch has no gloo")
    parts = [
        {"do": "identity", "cases": CASES, "check": False},
        {"do": "requests", "model": str(folder), "config": CONFIG, "requests": REQUESTS},
        {"do": "requests", "model": str(folder), "requests": REQUESTS[:1]},
        {"do": "mismatch", "model": str(folder), "changes": CHANGES},
        {"do": "led", "model": str(folder), "config": CONFIG, "requests": LED},
    ]
    home = tmp_path_factory.mktemp("two")
    with World(home, 2, *parts, variables={"LOOKAHEAD_CACHE": str(home / "cache")}) as world:
        return world.reports(400)


def test_two_processes(two: list[list[Any]]) -> None:
    expected = decode_alone(CASES)
    first, second = (report[0] for report in two)
    assert first == second
    for one, other in zip(first, expected, strict=True):
        assert_same(one, other)
        assert one["collectives"] == one["steps"]
        assert one["slowest"] < one["tree_tokens"] + one["steps"]


def same_as(alone: Any, request: dict[str, Any], found: list[Any]) -> None:
    """A world's answers are one process's: tokens and text; and steps, if there is one prompt. (Of several, some may
    run before the last one has come, so that they share fewer steps.)"""
    answers = alone.generate(request["prompt"], **request["settings"])
    expected = answers if isinstance(answers, list) else [answers]
    assert [[tokens, text] for tokens, _, _, text in found] == [[answer.token_ids, answer.text] for answer in expected]
    if len(expected) == 1:
        assert found[0][1] == expected[0].stats.steps


def test_answers_are_those_of_one_process(two: list[list[Any]], folder: Path) -> None:
    """One after the other, as a model that is kept knows more after each answer."""
    first, second = (report[1] for report in two)
    assert first == second
    alone = lookahead.load(folder, config=LookaheadConfig(**CONFIG))
    for request, found in zip(REQUESTS[:6], first[1:], strict=False):
        same_as(alone, request, found)


def test_a_seed_that_nobody_chose_is_rank_0s(two: list[list[Any]]) -> None:
    first, second = (report[1][7] for report in two)
    assert first == second
    assert 0 < len(first[0][0]) <= 16


def test_a_measured_config_is_rank_0s(two: list[list[Any]]) -> None:
    """Two ranks that measured for themselves would hardly have the same times."""
    first, second = (report[2] for report in two)
    assert first == second
    window, times = first[0]
    assert window in (0, LookaheadConfig().window)
    assert times is None or min(times) > 0


def test_rank_0_leads(two: list[list[Any]], folder: Path) -> None:
    """It takes requests from many threads, and cancels some; the other rank makes the same steps."""
    (*waves, refused, (passes, left)), followed = (report[4] for report in two)
    alone = lookahead.load(folder, config=LookaheadConfig(**CONFIG))
    assert len(waves) == 3
    for wave in waves:
        for asked, tokens in zip(LED, wave, strict=True):
            expected = alone.generate(asked["prompt"], **asked["settings"]).token_ids
            assert tokens
            if "cancel_after" in asked:
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected
    assert refused == "a request without a recipe cannot run on several ranks"
    assert followed == passes > 0
    assert left < 6  # what all ranks have read was erased


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (7, "rank 1 was called with other arguments than rank 0: max_tokens 17 and 16"),
        (8, "rank 1 was called with other arguments than rank 0: another prompt"),
        (9, "rank 1 was called with other arguments than rank 0: seed 6 and 5"),
        (10, "max_tokens=0 must be a whole number of at least 1"),
        (11, "unknown setting 'max_token'; did you mean 'max_tokens'?"),
        (12, "the prompt has no tokens; give at least one"),
        (13, "stream() takes one prompt, not 2"),
    ],
)
def test_a_request_that_is_refused_is_refused_everywhere(two: list[list[Any]], number: int, message: str) -> None:
    """And the next one runs."""
    for report in two:
        assert report[1][number + 1].startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("none", "none"),
        ("weight", "rank 1 differs from rank 0 in weights (model.layers.1.mlp.up_proj.weight): '(64, 32) "),
        ("swap", "rank 1 differs from rank 0 in weights (lm_head.weight): '("),
        ("config", "rank 1 differs from rank 0 in the model's config (rope_parameters): {"),
        ("dtype", "rank 1 differs from rank 0 in the dtype: 'torch.float64' and 'torch.float32'; start every rank"),
        ("vocabulary", "rank 1 differs from rank 0 in the tokenizer: '"),
    ],
)
def test_ranks_that_differ_are_refused(two: list[list[Any]], change: str, message: str) -> None:
    for report in two:
        assert report[3][CHANGES.index(change)].startswith(message)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (4096,), (4097,), (130, 100), (0,)])
def test_a_checksum_sees_every_change(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * 50).to(dtype)
    assert checksum(tensor) == checksum(tensor.clone())
    flat = tensor.flatten()
    for index in {0, len(flat) // 2, len(flat) - 1} if len(flat) else ():
        other = flat.clone()
        other[index] = not other[index] if dtype == torch.bool else other[index] + 1
        assert checksum(other.view(shape)) != checksum(tensor)
    if len(flat) > 4096 + 7:
        other = flat.clone()
        other[7], other[7 + 4096] = 2, 3
        swapped = other.clone()
        swapped[7], swapped[7 + 4096] = 3, 2
        assert dtype == torch.bool or checksum(other) != checksum(swapped)
    if len(flat) > 1:
        assert checksum(tensor) != checksum(tensor.flatten()[None])


def test_a_model_that_asks_for_processors_is_refused(
    make_model: Callable[..., Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lookahead.parallel

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    model = make_model()
    model.generation_config.no_repeat_ngram_size = 2
    with pytest.raises(ValueError, match="has no_repeat_ngram_size, which needs logits, and ranks exchange"):
        lookahead.parallel.load((model, tokenizer))


def test_one_process_needs_no_launcher(
    make_model: Callable[..., Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lookahead.parallel

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    parts = make_model(), tokenizer
    model = lookahead.parallel.load(parts, config=LookaheadConfig(**CONFIG))
    expected = lookahead.load(parts, config=LookaheadConfig(**CONFIG)).generate("the fox", max_tokens=12)
    assert model.generate("the fox", max_tokens=12).token_ids == expected.token_ids
    assert model.rank == 0
    options = {"max_tokens": 12, "repetition_penalty": 1.3, "logit_bias": {5: 2.0, 9: -float("inf")}, "min_tokens": 4}
    expected = lookahead.load(parts, config=LookaheadConfig(**CONFIG)).generate("the fox", **options)
    assert model.generate("the fox", **options).token_ids == expected.token_ids
    with pytest.raises(ValueError, match=r"^logprobs=1: ranks exchange tokens, not log-probabilities; request them on"):
        model.generate("the fox", logprobs=1)


@pytest.mark.parametrize(
    ("dtype", "computed"),
    [
        ("int8", torch.int8),
        ("fp8", torch.float32),
        pytest.param("fp8_dynamic", torch.float8_e4m3fn, marks=pytest.mark.slow),
    ],
)
def test_ranks_quantise(make_model: Callable[..., Any], tokenizer: Any, dtype: str, computed: torch.dtype) -> None:
    pytest.importorskip("onnxruntime")
    import lookahead.parallel

    options: dict[str, Any] = {"dtype": dtype, "config": LookaheadConfig(**CONFIG)}
    parts = make_model(), tokenizer
    model, alone = lookahead.parallel.load(parts, **options), lookahead.load(parts, **options)
    assert model.dtype is alone.dtype is computed
    assert model.weights == alone.weights == dtype
    assert model.generate("the fox", max_tokens=12).token_ids == alone.generate("the fox", max_tokens=12).token_ids


@pytest.mark.slow
@pytest.mark.model
def test_the_embedded_model(tmp_path: Path) -> None:
    """Greedy and sampled, alone and in a batch; as many steps as one process takes."""
    config = {"window": 3, "ngram": 4, "guesses": 8, "budget": 32}
    requests: list[dict[str, Any]] = [
        {"prompt": "Name three colours.", "settings": {"max_tokens": 16}},
        {"prompt": ["Hello!", "What is a fox?"], "settings": {"max_tokens": 8, "temperature": 0.7, "seed": 3}},
    ]
    task = {"do": "requests", "model": None, "config": config, "requests": requests}
    with World(tmp_path, 2, task) as world:
        alone = lookahead.load(config=LookaheadConfig(**config))
        reports = world.reports(240)
    for request, first, second in zip(requests, *(report[0][1:] for report in reports), strict=True):
        assert first == second
        same_as(alone, request, first)
