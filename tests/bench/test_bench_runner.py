"""Methods, jobs and rows on a tiny model: identity with greedy, one counter, several turns, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lookahead.bench.run import stock
from lookahead.bench.run.about import about
from lookahead.bench.run.methods import Method, named
from lookahead.bench.run.models import Models
from lookahead.bench.run.prompts import Prompt
from lookahead.bench.run.results import Results
from lookahead.bench.run.runner import Job, Runner, prompt_ids
from lookahead.bench.run.summary import lines
from lookahead.config import LookaheadConfig
from lookahead.generate import LookaheadModel
from lookahead.loading.formats import quantised_copy
from lookahead.loading.load import static_generation

NAMES = (
    "hf-greedy",
    "hf-prompt-lookup",
    "autoregressive",
    "jacobi",
    "prompt-lookup",
    "lookahead",
    "paper+prompt:3,3,3",
)
TALK = Prompt("talk", ("the quick brown fox", "once more"), "chat")


def job(name: str | Method, prompt: Prompt = TALK, tokens: int = 20, **more: Any) -> Job:
    return Job("builtin", 0, prompt, named(name) if isinstance(name, str) else name, tokens, **more)


def runner(lm: Any, tmp_path: Path | None = None, **options: Any) -> Runner:
    return Runner(Models(lm), None if tmp_path is None else Results(tmp_path / "r.jsonl"), **options)


def test_every_method_gives_greedy_tokens_and_is_counted_alike(lm: Any, plain: Callable[..., list[int]]) -> None:
    run = runner(lm)
    rows = {name: run.record(job(name)) for name in NAMES}
    ids = prompt_ids(lm, TALK, ())
    first = plain(lm.model, ids, 20)
    for name, row in rows.items():
        assert "error" not in row, row
        assert row["tokens"][0] == first, name
        assert row["tokens"] == rows["hf-greedy"]["tokens"], name
        assert row["generated_tokens"] == sum(map(len, row["tokens"]))
        assert 0 < row["steps"] <= row["generated_tokens"]
        assert row["compression"] == row["generated_tokens"] / row["steps"]
        assert 0 < row["first_token_seconds"] <= row["seconds"]
        assert sum(row["accepted_by_depth"]) == sum(row["accepted_by_source"].values())
        if name.startswith("hf-") or name == "autoregressive":
            assert row["generated_tokens"] - row["steps"] == sum(row["accepted_by_source"].values()), name
    for name in ("hf-greedy", "autoregressive"):
        assert rows[name]["steps"] == rows[name]["generated_tokens"]
    assert rows["lookahead"]["steps"] < rows["hf-greedy"]["steps"]


def test_a_second_turn_is_asked_with_the_methods_own_answer(lm: Any, plain: Callable[..., list[int]]) -> None:
    row = runner(lm).record(job("lookahead"))
    ids = prompt_ids(lm, TALK, row["texts"][:1])
    assert len(ids) > len(prompt_ids(lm, TALK, ())) + 10
    assert row["tokens"][1] == plain(lm.model, ids, 20)


def test_assisted_generation(lm: Any, make_model: Callable[..., Any]) -> None:
    draft = make_model(num_hidden_layers=1)
    run = Runner(Models(lm, draft=lambda: draft), None)
    row, greedy = run.record(job("hf-assisted")), run.record(job("hf-greedy"))
    assert row["tokens"] == greedy["tokens"]
    assert row["steps"] <= greedy["steps"]


@pytest.mark.slow
def test_weights_are_loaded_once_for_all_backends_of_a_dtype(
    make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))
    asked: list[tuple[str, str | None]] = []

    def load(dtype: str, backend: str | None) -> Any:
        asked.append((dtype, backend))
        return LookaheadModel(make_model().to(getattr(torch, dtype)), tokenizer, "tiny", backend=backend or "auto")

    own = LookaheadModel(make_model(), tokenizer, "tiny", backend="eager")
    models = Models(own, load)
    ours = named("lookahead", config=LookaheadConfig(3, 4, 4, 40))
    eager, graph = replace(ours, backend="eager"), replace(ours, backend="graph")
    exact = replace(ours, dtype="float32")
    assert models.of(ours) is models.of(eager) is models.of(exact) is own, "it is all of these already"
    captured = models.of(graph)
    assert type(captured.backend).__name__ == "GraphBackend"
    assert captured.model is own.model
    assert models.of(replace(exact, backend="graph")) is captured
    assert asked == []
    half = [models.of(replace(one, dtype="bfloat16")) for one in (ours, eager, graph)]
    assert asked == [("bfloat16", None)]
    assert half[0] is half[1]
    assert half[1].model is half[2].model
    assert half[1].model is not own.model
    assert models.stock(named("hf-greedy")) is models.stock(replace(named("hf-greedy"), backend="graph"))
    run = Runner(models, None)
    rows = [run.record(job(method)) for method in ("hf-greedy", ours, graph, eager)]
    assert rows[0]["tokens"] == rows[1]["tokens"] == rows[2]["tokens"] == rows[3]["tokens"]


def test_a_quantised_model_is_not_that_of_its_dtype(
    make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not quantised of it is in float32, but a method that asks for float32 wants all of it."""
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))
    whole = LookaheadModel(make_model(), tokenizer, "tiny", backend="eager")
    own = LookaheadModel(quantised_copy(make_model(), "fp8"), tokenizer, "tiny", backend="eager")
    models = Models(own, lambda dtype, backend: whole)
    assert models.of(replace(named("lookahead"), dtype="fp8")) is own
    assert models.of(replace(named("lookahead"), dtype="float32")) is whole
    assert about(own)["dtype"] == "fp8"


def test_a_backend_that_is_named_is_that_backend(
    make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` may choose another one in another dtype than the run's: that one must not stand for the run's."""
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))

    def load(dtype: str, backend: str | None) -> Any:
        return LookaheadModel(make_model().to(getattr(torch, dtype)), tokenizer, "tiny", backend=backend or "eager")

    models = Models(LookaheadModel(make_model(), tokenizer, "tiny", backend="graph"), load)
    half = replace(named("autoregressive"), dtype="bfloat16")
    found = [models.of(replace(half, backend=backend)) for backend in (None, "graph", "eager", None)]
    kinds = [type(lm.backend).__name__ for lm in found]
    assert kinds == ["EagerBackend", "GraphBackend", "EagerBackend", "EagerBackend"]
    assert found[0] is found[2] is found[3]
    assert found[0].model is found[1].model


def test_sampling_is_that_of_our_autoregressive(lm: Any) -> None:
    run = runner(lm)
    rows = [run.record(job(name, temperature=1.0, seed=5)) for name in ("autoregressive", "lookahead", "paper:3,3,3")]
    assert rows[0]["tokens"] == rows[1]["tokens"] == rows[2]["tokens"]
    other = run.record(job("lookahead", temperature=1.0, seed=6))
    assert other["tokens"] != rows[0]["tokens"]
    refused = run.record(job("hf-greedy", temperature=1.0))
    assert "sampling is compared among our methods" in refused["error"]


def test_a_prompt_that_does_not_fit_is_an_error_row(lm: Any) -> None:
    row = runner(lm).record(job("lookahead", tokens=2000))
    assert "do not fit the context of 512" in row["error"]
    assert "tokens" not in row


def test_only_what_is_missing_is_run(lm: Any, tmp_path: Path) -> None:
    jobs = [job(name, repeat=r) for r in range(2) for name in ("autoregressive", "lookahead")]
    first = runner(lm, tmp_path)
    running = first.run(first.agreed(jobs))
    for _ in range(3):
        next(running)
    running.close()  # as Ctrl-C does
    again = runner(lm, tmp_path)
    assert again.agreed(jobs) == jobs[3:]
    for _ in again.run(again.agreed(jobs)):
        pass
    assert again.agreed(jobs) == []
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 4


def test_a_rank_that_follows_runs_what_rank_0_lacks(tmp_path: Path) -> None:
    jobs = [job("lookahead", repeat=r) for r in range(3)]
    said: list[bytes] = []

    class Group:
        def agree(self, topic: str, own: bytes) -> list[bytes]:
            said.append(own)
            return [said[0], own]

    results = Results(tmp_path / "r.jsonl")
    results.add({"kind": "answer", "key": jobs[1].key})
    models = Models(SimpleNamespace(group=Group()))
    first, second = Runner(models, results).agreed(jobs), Runner(models, None).agreed(jobs)
    assert first == second == [jobs[0], jobs[2]]


def test_no_prompt_learns_from_another_unless_asked(lm: Any, tmp_path: Path) -> None:
    config = LookaheadConfig(0, 3, 0, 16, sources=("recycle",))
    method = Method("recycle", "lookahead", config)
    jobs = [Job("builtin", i, Prompt(str(i), TALK.turns), method, 20) for i in range(2)]
    cold = [row["steps"] for _, row in runner(lm).run(jobs)]
    assert cold[0] == cold[1]
    warm_jobs = [Job("builtin", i, Prompt(str(i), TALK.turns), method, 20, warm=True) for i in range(2)]
    run = runner(lm, tmp_path, warm=True)
    warm = [row["steps"] for _, row in run.run(warm_jobs)]
    assert warm[0] == cold[0], "the warm-up leaves nothing behind"
    assert warm[1] < cold[1]
    # Cut short, a warm group is run from its beginning: what it had learned is gone.
    half = Results(tmp_path / "half.jsonl")
    half.add(run.results.records[warm_jobs[0].key])  # type: ignore[union-attr]
    assert Runner(Models(lm), half, warm=True).missing(warm_jobs) == warm_jobs


def test_on_a_gpu_what_captures_its_steps_is_warmed_up_by_a_whole_answer() -> None:
    run = Runner(Models(SimpleNamespace(device=SimpleNamespace(type="cuda"))), None)
    names = ("lookahead", "autoregressive", "paper:3,3,3", "hf-static", "hf-greedy", "hf-prompt-lookup")
    tokens = [run._warm_up(job(name, tokens=200)).max_tokens for name in names]
    assert tokens == [200, 200, 200, 200, 32, 32]
    assert run._warm_up(job("hf-greedy", tokens=8)).max_tokens == 8


def test_the_key_is_made_of_what_decides_the_answer() -> None:
    base = job("lookahead")
    others: Sequence[Job] = (
        job("paper:3,3,3"),
        job("lookahead", tokens=21),
        job("lookahead", repeat=1),
        job("lookahead", temperature=0.5),
        job("lookahead", prompt=Prompt("talk", ("another text",))),
    )
    assert len({one.key for one in (base, *others)}) == 6
    assert job(named("lookahead", "under another name")).key == base.key


def answered(job: Job, seconds: float, tokens: list[list[int]], steps: int) -> dict[str, Any]:
    return {
        "key": job.key, "seconds": seconds, "first_token_seconds": seconds / 10, "tokens": tokens,
        "generated_tokens": sum(map(len, tokens)), "steps": steps, "step_tokens": 3 * steps,
        "accepted_by_depth": [1, 1], "accepted_by_source": {"suffix": 2},
    }  # fmt: skip


def test_lines_take_medians_and_compare_with_greedy() -> None:
    two = Prompt("two", ("b",))
    greedy = [job("hf-greedy", prompt) for prompt in (TALK, two)]
    ours = [job("lookahead", prompt, repeat=r) for r in range(3) for prompt in (TALK, two)]
    rows = [answered(one, 8.0, [[1, 2, 3, 4]], 4) for one in greedy]
    rows += [answered(one, 1.0 + one.repeat * 3, [[1, 2, 3, 4]], 2) for one in ours[:-1]]
    rows.append(answered(ours[-1], 7.0, [[1, 2, 3, 9]], 2))
    first, second = lines([*greedy, *ours], {row["key"]: row for row in rows})
    assert (first.reference.identity, first.reference.speedup, first.compression) == ("2/2", 1.0, 1.0)
    assert second.reference.identity == "1/2", "a repeat that differs counts"
    assert second.reference.speedup == pytest.approx(2.0)
    assert (second.stats.seconds, second.stats.generated_tokens, second.compression) == (8.0, 8, 2.0)
    assert second.first_ms == pytest.approx(400.0)
    assert (second.stats.accepted_by_depth, second.stats.accepted_by_source) == ([2, 2], {"suffix": 4})


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("lookahed", "unknown method 'lookahed': did you mean 'lookahead'"),
        ("papr:1,2,3", "unknown method .papr:1,2,3.: write paper, .* or config before the colon"),
        ("paper:1,2", "three whole numbers"),
        ("config:windw=3", "'windw=3' is no FIELD=VALUE"),
        ("config:window=x", "window='x' must be a whole number"),
        ("config:sources=magic", "unknown source 'magic'"),
    ],
)
def test_unknown_methods(name: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        named(name)


def test_configs_by_name() -> None:
    assert named("paper:15,5,7").config == LookaheadConfig.paper(15, 5, 7)
    assert named("paper+prompt:15,5,7").config == LookaheadConfig.paper(15, 5, 7, prompt=True)
    made = named("config:window=0,budget=32,sources=suffix+recycle").config
    assert made is not None
    assert (made.window, made.budget, made.sources) == (0, 32, ("suffix", "recycle"))


@pytest.mark.slow
def test_static_and_compiled(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache for both prompts; compiled by torch's `eager` backend, which needs no compiler."""
    made = []

    def static(model: Any, length: int) -> dict[str, Any]:
        options = static_generation(model, length)
        options["compile_config"].backend = "eager"
        made.append(length)
        return options

    monkeypatch.setattr(stock, "static_generation", static)
    run = runner(lm)
    jobs = [job("hf-static", prompt) for prompt in (TALK, Prompt("two", ("def fox(dog): return the end of the fox",)))]
    for one, row in run.run(jobs):
        assert row["tokens"] == run.record(job("hf-greedy", one.prompt))["tokens"]
        assert row["steps"] == row["generated_tokens"]
    assert len(made) == 1


def test_without_a_streamer_the_first_token_is_timed_apart(lm: Any) -> None:
    """As on a GPU: the counters must be the same."""
    as_on_a_gpu = stock.Stock(lm)
    as_on_a_gpu.streams = False
    output, stats = as_on_a_gpu.run("hf-greedy", prompt_ids(lm, TALK, ()), 12, 0)
    assert output == runner(lm).record(job("hf-greedy", tokens=12))["tokens"][0]
    assert stats.steps == stats.generated_tokens == stats.step_tokens == len(output)
    assert stats.first_token_seconds > 0
