"""Models whose steps are chains, as a user meets them: loaded from a folder, from the command line, and served.

That chains give the tokens of `model.generate` for every class is tested in `backends/eager/test_chain_backend.py`.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from http_server import Running, running
from marks import slow_but
from model_table_recurrent import RECURRENT_ROWS
from tiny import tiny
from typer.testing import CliRunner

import lookahead
from lookahead import LookaheadConfig
from lookahead.algorithm.choice import DraftBudget
from lookahead.algorithm.cost import PassCost
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.backends.base import Capabilities
from lookahead.cli import app
from lookahead.cli.common import Host
from lookahead.config import StopRules
from lookahead.loading import timing
from lookahead.loading.chunks import CHUNK, shorter_chunks
from lookahead.loading.default import fit_budget

ROWS = {name: (kind, changes) for name, kind, changes in RECURRENT_ROWS}
PROMPTS = [
    "the quick brown fox jumps over the lazy dog; the quick brown fox jumps",
    "once more the dog",
    "def fox(dog):",
]
COUNT = 24


@pytest.fixture(scope="module", params=slow_but(["qwen3.5", "granite-mamba", "lfm2"], "qwen3.5"))
def folder(request: pytest.FixtureRequest, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model with states, with its tokenizer."""
    kind, changes = ROWS[request.param]
    made: Path = tmp_path_factory.mktemp("hybrid")
    tiny(kind, **changes, vocab_size=len(tokenizer)).save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def loaded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOKAHEAD_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(timing, "MAX_SECONDS", 0.1)
        yield lookahead.load(folder)


def stock_tokens(loaded: Any, prompt: str) -> list[int]:
    ids = torch.tensor([loaded.tokenizer.encode(prompt)])
    end = loaded.tokenizer.eos_token_id
    with torch.inference_mode():
        found = loaded.model.generate(ids, max_new_tokens=COUNT, do_sample=False, eos_token_id=end, pad_token_id=end)
    return found[0, ids.shape[1] :].tolist()


def test_loaded_from_a_folder(loaded: Any) -> None:
    """Greedy text is that of `generate`, sampled text that of token-by-token decoding: alone, streamed, in a batch."""
    assert (loaded.backend.capabilities.name, loaded.backend.capabilities.branches) == ("eager", False)
    assert loaded.default_config.step_cost is not None
    budget = loaded.engine.budget
    assert budget.guarded
    assert isinstance(budget.cost, PassCost)
    expected = [stock_tokens(loaded, prompt) for prompt in PROMPTS]
    alone = [loaded.generate(prompt, raw=True, max_tokens=COUNT) for prompt in PROMPTS]
    assert [one.token_ids for one in alone] == expected
    assert [one.token_ids for one in loaded.generate(PROMPTS, raw=True, max_tokens=COUNT)] == expected
    streamed = [token for piece in loaded.stream(PROMPTS[0], raw=True, max_tokens=COUNT) for token in piece.token_ids]
    assert streamed == expected[0]
    sampling = {"raw": True, "max_tokens": COUNT, "temperature": 0.9, "seed": 5}
    ours = loaded.generate(PROMPTS[0], **sampling)
    assert ours.token_ids == loaded.generate(PROMPTS[0], method="autoregressive", **sampling).token_ids != expected[0]


def test_chains_of_any_cost(loaded: Any) -> None:
    """Where they are said to cost nothing they are drafted, and accepted: a text that was generated before."""
    config = LookaheadConfig(window=0, recycle_scope="model")
    texts = [loaded.generate(PROMPTS[0], raw=True, max_tokens=COUNT, config=config) for _ in range(2)]
    assert [text.token_ids for text in texts] == [stock_tokens(loaded, PROMPTS[0])] * 2
    assert texts[1].stats.steps < COUNT


def test_from_the_command_line(folder: Path, loaded: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))
    monkeypatch.setattr(timing, "MAX_SECONDS", 0.1)
    options = ["--model", str(folder), "--raw", "--max-tokens", str(COUNT), "--json"]
    done = CliRunner().invoke(app, ["generate", "--prompt", PROMPTS[0], *options], obj=Host(), prog_name="lookahead")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["text"] == loaded.generate(PROMPTS[0], raw=True, max_tokens=COUNT).text
    assert "cannot run trees" in done.stderr
    assert "the eager backend runs it" in done.stderr
    assert "steps are chains" in done.stderr


def served_text(server: Running, prompt: str) -> str:
    text: str = server.complete(prompt=prompt, max_tokens=COUNT, temperature=0)["choices"][0]["text"]
    return text


def test_served(loaded: Any) -> None:
    """Several clients at once get the texts that each would get alone."""
    expected = [loaded.generate(prompt, raw=True, max_tokens=COUNT).text for prompt in PROMPTS]
    with running(loaded) as server, ThreadPoolExecutor(len(PROMPTS)) as clients:
        for _ in range(2):
            answers = clients.map(partial(served_text, server), PROMPTS)
            assert list(answers) == expected


def test_mamba_has_shorter_chunks_on_a_cpu(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over several tokens is padded to a chunk. The text is that of the model's own chunks."""
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(timing, "MAX_SECONDS", 0.1)
    kind, changes = ROWS["granite-mamba"]
    stock = tiny(kind, **{**changes, "mamba_chunk_size": 32, "vocab_size": len(tokenizer)})
    stock.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    said: list[str] = []
    loaded = lookahead.load(tmp_path / "model", log=said.append)
    assert "note: its Mamba-2 layers run chunks of 16 tokens, not of 32" in said
    sizes = {module.chunk_size for module in loaded.model.modules() if hasattr(module, "chunk_size")}
    assert sizes == {loaded.model.config.mamba_chunk_size} == {CHUNK}
    prompt = " ".join(PROMPTS)
    ids = torch.tensor([tokenizer.encode(prompt)])
    assert ids.shape[1] > 32
    expected = stock_tokens(SimpleNamespace(model=stock, tokenizer=tokenizer), prompt)
    assert loaded.generate(prompt, raw=True, max_tokens=COUNT).token_ids == expected
    assert shorter_chunks(stock.config, torch.device("cuda")) == {}
    assert shorter_chunks(loaded.model.config, torch.device("cpu")) == {}


def backend_of(**can: Any) -> Any:
    return SimpleNamespace(capabilities=Capabilities("any", **can), device=torch.device("cpu"), most_rows=4)


def test_chains_have_a_guard() -> None:
    """A curve of chains does not know what they cost behind long texts; that of trees knows it all."""
    chains, trees = DraftBudget(), DraftBudget()
    fit_budget(chains, backend_of(pads=True, branches=False), LookaheadConfig(step_cost=(1.0, 2.0)))
    assert chains.guarded
    assert chains.cost is not None
    assert chains.cost.table.tolist() == [1.0, 2.0]
    fit_budget(trees, backend_of(pads=True), LookaheadConfig(step_cost=(1.0, 2.0)))
    assert (trees.guarded, trees.cost) == (False, None)
    fit_budget(chains, backend_of(pads=True, branches=False), LookaheadConfig())
    assert (chains.guarded, chains.cost) == (False, None)


def test_a_guard_leaves_other_configs_alone() -> None:
    """A config without a curve drafts whatever it costs, also while drafting is paused for others."""
    text, flat = [5, 9, 17, 23, 5, 9, 17, 23, 5, 9], (1.0,) * 40
    budget = DraftBudget(PassCost(flat), guarded=True)
    for _ in range(64):
        budget.record_step(1, False, 1.0, 1.0)
        budget.record_step(1, True, 1.0, 9.0)

    def size(step_cost: tuple[float, ...] | None) -> int:
        config = LookaheadConfig(window=0, budget=8, step_cost=step_cost)
        sequence = DecodingSequence(text, config, rules=StopRules(30))
        return budget.choose_trees([sequence], again=[0])[0].size

    assert size(flat) == 1
    assert size(None) > 1
