"""One rank of a test's world: `worker.py FOLDER` does what FOLDER/task.json says and writes `rank<r>.json`.

transformers is imported only by what needs it: most of a short world's time is imports.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lookahead import LookaheadConfig
from lookahead.engine.settings import RequestSettings
from lookahead.parallel import Group, ParallelBackend, join

Task = dict[str, Any]
RANK = int(os.environ["RANK"])


def identity(task: Task) -> list[Any]:
    """Every case's outputs, steps and counters."""
    from cases import backend_of, decode
    from tiny import tiny

    found = []
    with join(timeout=60, check=task["check"]) as group:
        for case in task["cases"]:
            backend = ParallelBackend(backend_of(case, tiny("Llama", device=task.get("device", "cpu"))), group)
            found.append({**decode(backend, case), **vars(backend.counters), "exchange_seconds": 0})
    return found


def fault(task: Task) -> None:
    """Decode for ever, a line per step; the rank `who` has its accident at step `at`."""
    from toys import ToyBackend, decode

    accidents: dict[str, Callable[[ParallelBackend], None]] = {
        "none": lambda _: None,
        "sleep": lambda _: time.sleep(1000),
        "raise": lambda _: _fail("the device is on fire"),
        "exit": lambda _: sys.exit(0),
    }
    group = join(timeout=task["timeout"], check=task.get("check", False))
    backend = ParallelBackend(ToyBackend(), group)
    launch, accident = backend.inner.launch, accidents.get(task["accident"], accidents["none"])

    def launch_and_tell(inputs: Any) -> Any:
        print(f"step {backend.counters.steps}.", flush=True)
        if task["who"] == RANK and backend.counters.steps == task["at"]:
            accident(backend)
        return launch(inputs)

    launch_all = backend.launch

    def launch_another_tree(inputs: Any) -> Any:
        if task["who"] == RANK and backend.counters.steps == task["at"]:
            inputs[0].tree.tokens[-1] += 1
        return launch_all(inputs)

    backend.inner.launch = launch_and_tell
    if task["accident"] == "diverge":
        backend.launch = launch_another_tree  # type: ignore[method-assign]
    while True:
        decode(backend, [[5, 9, 5], [7]], LookaheadConfig(3, 4, 4, 30), tokens=200)


def _fail(message: str) -> None:
    raise MemoryError(message)


def requests(task: Task) -> list[Any]:
    """Load the folder's model on every rank and answer the requests; an error is an answer, too."""
    import lookahead.parallel

    group = join(timeout=30)
    model = lookahead.parallel.load(
        task["model"], group=group, config=LookaheadConfig(**task["config"]) if "config" in task else None
    )
    found: list[Any] = [[model.default_config.window, model.default_config.step_cost]]
    with group:
        _answer(model, task["requests"], found)
    return found


def _answer(model: Any, asked: list[Task], found: list[Any]) -> None:
    for request in asked:
        settings = {**request["settings"], **request.get(f"rank{RANK}", {})}
        prompt = settings.pop("prompt", request["prompt"])
        try:
            if request.get("stream"):
                stream = model.stream(prompt, **settings)
                pieces = list(stream)
                found.append([[*_said(stream.completion), "".join(pieces)]])
                continue
            answers = model.generate(prompt, **settings)
            answers = answers if isinstance(answers, list) else [answers]
            found.append([[*_said(answer), answer.text] for answer in answers])
        except (ValueError, TypeError) as error:
            found.append(str(error))


def led(task: Task) -> Any:
    """Rank 0 takes requests from many threads at once, in waves, and the others follow. It reports what each request
    got, and how many notes are left in the store."""
    import lookahead.parallel
    from lookahead.parallel.leader import Recipe

    group = join(timeout=30)
    model = lookahead.parallel.load(task["model"], group=group, config=LookaheadConfig(**task["config"]))

    def make(data: Task) -> Any:
        return model._answer(data["prompt"], RequestSettings(**data["settings"])).request

    with group:
        if RANK:
            model.follow(make)
            return model.backend.passes
        model.lead()

        def ask(asked: Task) -> list[int]:
            request = make(asked)
            request.recipe = Recipe(asked)
            stream, tokens, left = model.client.submit(request), [], asked.get("cancel_after", -1)
            for event in stream:
                tokens += event.tokens
                left -= 1
                if left == 0:
                    model.client.cancel(stream)
            return tokens

        with ThreadPoolExecutor(len(task["requests"])) as threads:
            waves = [list(threads.map(ask, task["requests"])) for _ in range(3)]
        without = model._answer("the fox", RequestSettings(max_tokens=2)).request
        try:
            model.client.submit(without).wait()
        except ValueError as error:
            waves.append(str(error))
        waves.append([model.backend.passes, model.client._core._written - model.client._core._erased])
    return waves


def _said(answer: Any) -> list[Any]:
    return [answer.token_ids, answer.stats.steps, answer.seed]


def mismatch(task: Task) -> list[str]:
    """Load what differs on some rank; the refusals."""
    import lookahead.parallel

    found = []
    with join(timeout=30) as group:
        for change in task["changes"]:
            try:
                lookahead.parallel.load(_changed(task["model"], change, group), group=group)
                found.append("none")
            except ValueError as error:
                found.append(str(error))
    return found


def _changed(folder: str, change: str, group: Group) -> tuple[Any, Any]:
    import torch

    from lookahead.generate import open_model

    model, tokenizer, _ = open_model(folder, dtype="auto", device="cpu", log=None)
    if group.rank != group.size - 1 or change == "none":
        return model, tokenizer
    with torch.no_grad():
        if change == "weight":
            model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-6
        elif change == "swap":
            model.lm_head.weight[:2] = model.lm_head.weight[:2].flip(0)
        elif change == "config":
            model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 5.0}
        elif change == "dtype":
            model = model.double()
        elif change == "vocabulary":
            tokenizer.add_tokens(["new"])
    return model, tokenizer


def tensor_parallel(task: Task) -> list[Any]:
    """lp x tp: pairs of ranks share one model, and the pairs share every tree."""
    from cases import backend_of, decode
    from tiny import tiny
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    found = []
    with join(timeout=60, tensor_parallel=task["tensor_parallel"], check=True) as group:
        model = tiny("Llama")
        whole = model.model.layers[0].self_attn.k_proj.weight.numel()
        plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        for layer in model.model.layers:
            parallelize_module(layer, group.mesh["tensor"], plan)
        held = model.model.layers[0].self_attn.k_proj.weight.to_local().numel()
        for case in task["cases"]:
            backend = ParallelBackend(backend_of(case, model), group)
            heads = backend.inner._buffer.keys[0].shape[2]
            found.append({**decode(backend, case), **vars(backend.counters), "part": held / whole, "heads": heads})
    return found


def main(folder: Path) -> None:
    task = json.loads((folder / "task.json").read_text())
    report: Any = []
    for part in task["parts"]:
        report.append(globals()[part["do"]](part))
    (folder / f"rank{RANK}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
