"""The workloads of the bench: their tasks, what is counted, and the preset end to end on a tiny model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from lookahead.bench.run.stock import Stock
from lookahead.bench.workloads import page
from lookahead.bench.workloads.command import WorkloadOptions, command
from lookahead.bench.workloads.material import material
from lookahead.bench.workloads.measure import COLD, PLAIN, STOCK, WARM, Measurement, changed, text_of
from lookahead.bench.workloads.overlap import Overlap
from lookahead.bench.workloads.picture import LENGTHS, chain_counts, chain_shares
from lookahead.bench.workloads.tasks import EDITS, PASSAGES, WORKLOADS, Task, Workload
from lookahead.cli import app
from lookahead.cli.common import Host
from lookahead.generate import LookaheadModel
from lookahead.stats import Stats

LIMIT = 4


@pytest.fixture
def folder(data_dir: Path) -> Path:
    """The paper's sets, with what the workloads read besides."""
    classes = [
        {"class_name": f"Fox{i}", "solution_code": f"class Fox{i}:\n    pass\n", "test": "Fox"} for i in range(2)
    ]
    (data_dir / "classeval.json").write_text(json.dumps(classes), encoding="utf-8")
    rows = [
        {
            "entry_point": f"dog{i}",
            "prompt": f"def dog{i}():\n",
            "canonical_solution": "    return 1\n",
            "test": "assert 1",
        }
        for i in range(2)
    ]
    (data_dir / "humaneval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    codes = [{"task_id": i, "code": f"fox = {i}\r\n \r\n", "test_list": ["assert fox"]} for i in range(2)]
    (data_dir / "mbpp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in codes), encoding="utf-8")
    articles = [{"id": str(i), "document": f"the dog {i} jumps"} for i in range(2 * PASSAGES)]
    (data_dir / "xsum_sample.jsonl").write_text("".join(json.dumps(row) + "\n" for row in articles), encoding="utf-8")
    return data_dir


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_two_tasks_ask_the_same(name: str, folder: Path) -> None:
    for source in (None, folder):
        tasks = WORKLOADS[name].make(material(source), LIMIT)
        texts = [json.dumps(task.turns) for task in tasks]
        assert 1 <= len(tasks) <= LIMIT
        assert len(set(texts)) == len(texts)
        assert len({task.id for task in tasks}) == len(tasks)


def test_files_of_three_sets_take_turns_and_keep_one_kind_of_line_break(folder: Path) -> None:
    files = material(folder).files(LIMIT)
    assert [file.name for file in files] == ["dog0.py", "task_0.py", "fox0.py", "dog1.py"]
    assert files[1].code == "fox = 0"
    edits = WORKLOADS["edit"].make(material(folder), LIMIT)
    assert all(file.code in task.turns[0][0]["content"] for file, task in zip(files, edits, strict=True))
    assert EDITS[1] in edits[1].turns[0][0]["content"]


def test_an_agent_has_six_to_ten_turns_over_one_transcript() -> None:
    tasks = WORKLOADS["agent"].make(material(None), LIMIT)
    assert [len(task.turns) for task in tasks] == [6, 7, 8, 9]
    assert tasks[0].turns[0][0]["role"] == "system"
    assert all(turn[0]["role"] == "user" for task in tasks for turn in task.turns[1:])


def test_overlap_counts_what_stood_before() -> None:
    overlap = Overlap()
    overlap.add([1, 2, 3, 4, 5], [[1, 2, 3, 4, 9, 9, 9, 9, 9]])
    # Of six n-grams of four: one is in the prompt, and the second 9 9 9 9 repeats the first.
    assert overlap.shares()["4"] == {"context": round(2 / 6, 4), "earlier": 0.0}
    again = overlap.next()
    again.add([7], [[4, 9, 9, 9, 0], [4, 9, 9, 9, 0]])
    assert again.shares()["4"] == {"context": 0.0, "earlier": 0.5}, "samples of one prompt do not know each other"


def test_lengths_of_chains() -> None:
    """Of ten steps six accepted one draft token or more, two of them three."""
    stats = Stats(steps=10)
    stats.accepted_by_depth = [6, 2, 2]
    assert chain_counts(10, stats.accepted_by_depth) == [4, 4, 0, 2]
    shares = chain_shares({"steps": 10, "accepted_by_depth": [6, 2, 2]})
    assert shares == [40, 40, 0, 20, 0, 0, 0, 0]
    long = chain_shares({"steps": 2, "accepted_by_depth": [1] * 80})
    assert (long[0], long[-1]) == (50, 50)
    assert len(long) == len(LENGTHS)


class Letters:
    """A tokenizer whose tokens are characters."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, tokens: Any, **_: Any) -> str:
        return "".join(map(chr, tokens))


def test_a_prediction_is_the_answer_with_three_lines_changed() -> None:
    lm: Any = SimpleNamespace(tokenizer=Letters(), stop_ids=frozenset([0]))

    def predicted(text: str) -> str:
        return text_of(lm, changed(lm, [*map(ord, text), 0]))

    text = "\n".join(f"    fox {i}" for i in range(12))
    after = predicted(text).split("\n")
    assert sum(one != other for one, other in zip(text.split("\n"), after, strict=True)) == 3
    assert sum(line.startswith("    replaced") for line in after) == 3
    assert predicted("one\n\ntwo\nthree") == "one\n\nreplaced_0 = 0\nthree", "at most every third"
    assert predicted("the fox") == "the fox", "too short to change"


@pytest.mark.slow
def test_all_ways_give_the_same_texts(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chats of two turns, sampled rollouts and predictions; transformers beside them where it can be compared."""
    monkeypatch.setattr(lm, "memory", lm.memory.new())  # other tests may have filled the one they share
    task = Task("t", (({"role": "user", "content": "the fox"},), ({"role": "user", "content": "once more"},)))
    other = Task("u", (({"role": "user", "content": "the dog and the fox"},),))
    kinds = {
        "chat": Workload("chat", "", lambda *_: []),
        "rollouts": Workload("rollouts", "", lambda *_: [], samples=3, epochs=2),
        "edit-predicted": Workload("edit-predicted", "", lambda *_: [], predicted=True),
    }
    for name, workload in kinds.items():
        found = Measurement(lm, workload, 12, stock=Stock(lm)).run([task, other])
        rows = [name] if workload.epochs == 1 else [f"{name}, epoch 1", f"{name}, epoch 2"]
        assert list(found["rows"]) == rows
        for row in rows:
            ways = found["rows"][row]
            assert list(ways) == [PLAIN, COLD, WARM, *([STOCK] if name != "rollouts" else [])]
            assert found["answers"][row] == 3 * workload.samples
            assert all(count == found["answers"][row] for count in found["equal"][row].values())
            assert ways[PLAIN]["compression"] == 1
            assert ways[PLAIN]["generated_tokens"] == ways[WARM]["generated_tokens"]
            spent = sum(ways[WARM][f"{part}_seconds"] for part in ("prompt", "verify", "host"))
            assert 0 < spent <= ways[WARM]["seconds"] * 1.001
        if workload.predicted:
            assert found["rows"][name][COLD]["accepted_by_source"].get("prediction", 0) > 0
    assert len(lm.memory.successors) == 0, "the model's own memory is not used"


def test_weights_that_drift_between_epochs_are_seen_and_put_back(
    make_model: Callable[..., Any], tokenizer: Any, settings: Any
) -> None:
    """On the graph backend, which shares the prompt's keys and values between samples and epochs."""
    lm = LookaheadModel(make_model(), tokenizer, "tiny", settings, "graph")
    task = Task("t", (({"role": "user", "content": "the fox and the dog jump " * 12},),))
    before = [parameter.clone() for parameter in lm.model.parameters()]
    outputs = []
    for drift in (0.0, 0.5):
        found = Measurement(lm, Workload("rollouts", "", lambda *_: [], samples=2, epochs=2, drift=drift), 6)
        record = found.run([task])
        for row in record["rows"]:
            assert set(record["equal"][row].values()) == {2}
        outputs.append([tallies[PLAIN].outputs for tallies in found.rows.values()])
    assert outputs[0][0] == outputs[1][0], "the weights of the first epoch are the model's own"
    assert outputs[0][1] != outputs[1][1]
    pairs = zip(before, lm.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_task_that_does_not_fit_is_left_out_of_all_ways(lm: Any) -> None:
    """Its first turn fits, the second does not."""
    first, second = {"role": "user", "content": "the fox"}, {"role": "user", "content": "dog " * 600}
    task, short = Task("t", ((first,), (second,))), Task("u", ((first,),))
    found = Measurement(lm, Workload("chat", "", lambda *_: []), 6).run([task, short])
    assert found["answers"]["chat"] == 1
    assert {way["steps"] > 0 and way["prompt_tokens"] for way in found["rows"]["chat"].values()} == {
        found["rows"]["chat"][PLAIN]["prompt_tokens"]
    }
    assert found["errors"][0].startswith("t: the prompt has")


def test_repeats_give_medians_and_a_spread() -> None:
    def record(repeat: int, speed: float) -> dict[str, Any]:
        way = {"tokens_per_second": speed, "compression": 2.0, "prompt_tokens": 10, "generated_tokens": 20}
        ways = {PLAIN: {**way, "tokens_per_second": 10.0}, COLD: way, WARM: way}
        shares = {size: {"context": 0.5, "earlier": 0.25} for size in ("4", "12")}
        return {
            "workload": "chat", "repeat": repeat, "rows": {"chat": ways}, "answers": {"chat": 2},
            "equal": {"chat": dict.fromkeys(ways, 2)}, "overlap": {"chat": shares}, "errors": [],
        }  # fmt: skip

    speed, overlap = page.sections([record(0, 20.0), record(1, 30.0), record(2, 50.0)])
    assert speed.rows[0] == ["chat", "2", "5", "10", "10.0", *2 * ["2.00", "30.0", "3.00x (2.00 to 5.00)"], "12/12"]
    assert overlap.rows[0] == ["chat", "50%", "50%", "25%", "25%"]


def test_the_preset_reports_and_goes_on(lm: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*more: str) -> Any:
        args = ["bench", "--preset", "workloads", "--data-dir", str(folder), "--limit", "1", "--max-tokens", "6"]
        host = Host(load=lambda *_, **__: lm)
        return CliRunner().invoke(app, [*args, "--out", str(tmp_path / "out"), *more], obj=host)

    whole = Measurement.run
    monkeypatch.setattr(
        Measurement, "run", lambda self, tasks: whole(self, tasks) if self.workload.name == "chat" else stop()
    )

    def stop() -> Any:
        raise KeyboardInterrupt

    result = run("--sets", "chat,rollouts")
    assert result.exit_code == 130
    assert "goes on with the first workload" in result.stderr
    monkeypatch.setattr(Measurement, "run", whole)
    result = run("--sets", "chat,rollouts")
    assert result.exit_code == 0, result.output
    assert "chat: 1 tasks" not in result.stderr
    written = (tmp_path / "out" / "workloads.md").read_text(encoding="utf-8")
    assert result.stdout == written
    rows = re.findall(r"^\| (chat|rollouts, epoch \d) \|.* (\d+/\d+) \|$", written, re.MULTILINE)
    assert rows == [*((f"rollouts, epoch {i}", "16/16") for i in (1, 2, 3)), ("chat", "4/4")]
    for name in re.findall(r"\((workload-.*svg)\)", written):
        ElementTree.parse(tmp_path / "out" / name)
    found = json.loads(run("--sets", "chat", "--json").stdout)
    assert found["records"][0]["workload"] == "chat"
    for wrong, said in (
        (("--sets", "chatt"), "unknown workload 'chatt': did you mean 'chat'"),
        (("--method", "jacobi"), "it takes hf-greedy"),
        (("--warm",), "--warm is not for the preset workloads"),
        (("--preset", "workloads,speed"), "must be used alone"),
    ):
        result = run(*wrong)
        assert result.exit_code == 2
        assert said in result.stderr


def test_the_command_is_written_without_folders(tmp_path: Path, folder: Path) -> None:
    options = WorkloadOptions(["chat"], folder, quick=True, limit=1, repeats=3, stock=True)
    given = "--data-dir DATA --sets chat --quick --limit 1 --repeats 3 --method hf-greedy"
    assert command(options) == f"lookahead bench --preset workloads {given}"


@pytest.mark.parametrize("bound", [False, True])
def test_structured_output_binds_an_extract(bound: bool, lm: Any) -> None:
    """A mask that the caller gives is used in every way, and only for tasks with a schema."""
    masks = []

    class Anything:
        def rows(self, tree: Any, sequence: Any) -> None:
            return None

        def accept(self, tokens: Any) -> None:
            masks.append(len(tokens))

    def bind(schema: dict[str, Any]) -> Any:
        assert schema == {"type": "object"}
        return Anything()

    tasks = [Task("t", (({"role": "user", "content": "the fox"},),), {"type": "object"} if bound else None)]
    found = Measurement(lm, Workload("extract", "", lambda *_: []), 6, stock=Stock(lm), bind=bind).run(tasks)
    assert (STOCK in found["rows"]["extract"]) != bound, "transformers is not bound"
    assert found["equal"]["extract"][WARM] == 1
    assert bool(masks) == bound


def test_tasks_of_an_unknown_folder_are_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs .*cnn_dm"):
        WorkloadOptions(["summary"], tmp_path)
