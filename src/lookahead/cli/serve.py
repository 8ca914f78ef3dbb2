"""`lookahead serve`: an OpenAI-compatible server."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from lookahead.cli.common import Host
from lookahead.cli.config_file import read_config
from lookahead.cli.ranks import Ranks
from lookahead.cli.settings import DTYPES, check_device
from lookahead.config import BACKENDS
from lookahead.serve import EXTRA

RAY = ("ray",)


def serve(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="A YAML file of these options.", is_eager=True, callback=read_config),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Embedded model, short name, hub id, folder or .gguf.", metavar="NAME")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help=f"One of {', '.join(DTYPES)}.", metavar="NAME")] = "auto",
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.", metavar="NAME")] = "auto",
    backend: Annotated[str, typer.Option("--backend", help=f"One of {', '.join(BACKENDS)}.", metavar="NAME")] = "auto",
    served_name: Annotated[
        str | None, typer.Option("--served-name", help="The model's name for clients.", metavar="NAME")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="The port to listen on; 0 for any free one.")] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", help="API keys, one per line; or set LOOKAHEAD_API_KEYS to a,b,..."),
    ] = None,
    allow_public: Annotated[
        bool, typer.Option("--allow-public", help="Allow a public address without any key.")
    ] = False,
    share_memory: Annotated[
        bool, typer.Option("--share-memory", help="All keys share the prefix cache and the successors.")
    ] = False,
    cors: Annotated[
        list[str] | None, typer.Option("--cors", help="An allowed CORS origin. Repeatable.", metavar="ORIGIN")
    ] = None,
    max_concurrency: Annotated[
        int, typer.Option("--max-concurrency", help="The most sequences that run at once.")
    ] = 64,
    max_queue: Annotated[int, typer.Option("--max-queue", help="The most sequences that wait; then 429.")] = 256,
    max_body: Annotated[int, typer.Option("--max-body", help="The most bytes of a request's body.")] = 4 << 20,
    request_timeout: Annotated[float, typer.Option("--request-timeout", help="The most seconds of a request.")] = 600.0,
    header_timeout: Annotated[
        float, typer.Option("--header-timeout", help="The most seconds in which headers arrive; then 408.")
    ] = 20.0,
    body_timeout: Annotated[
        float, typer.Option("--body-timeout", help="The most seconds in which a body arrives; then 408.")
    ] = 60.0,
    drain_seconds: Annotated[
        float, typer.Option("--drain-seconds", help="How long running requests may finish after SIGTERM.")
    ] = 30.0,
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Save drafting state across restarts.")] = True,
    vllm_metrics: Annotated[
        bool, typer.Option("--vllm-metrics", help="Also export metrics under vLLM's names.")
    ] = False,
    log_level: Annotated[
        str, typer.Option("--log-level", help="The least level: debug, info, warning, error.", metavar="LEVEL")
    ] = "info",
    log_format: Annotated[
        str, typer.Option("--log-format", help="text, or json: one object a line.", metavar="FORMAT")
    ] = "text",
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts to the log.")] = False,
    fronts: Annotated[
        int | None,
        typer.Option("--fronts", help="Processes for HTTP and text; 0: in the engine's. By default by the cores."),
    ] = None,
    reasoning_tags: Annotated[
        str,
        typer.Option(
            "--reasoning-tags", help="Tags around a model's reasoning, as in '<think> </think>'; auto or none."
        ),
    ] = "auto",
    replicas: Annotated[
        int | None, typer.Option("--replicas", help="Engines on this machine, each with the model, behind one address.")
    ] = None,
    gpus: Annotated[
        float | None,
        typer.Option("--gpus-per-replica", help="GPUs of each replica, or of each of its ranks; 0.5: two share one."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", help="Processes that share every step's tokens, each with the model.")
    ] = None,
    rank_timeout: Annotated[
        float, typer.Option("--rank-timeout", help="Exit after this many seconds without an answer from a rank.")
    ] = 60.0,
) -> None:
    """Serve a model over HTTP, for any OpenAI client. A reply does not depend on the other requests in the batch."""
    console = ctx.ensure_object(Host)
    check_device(dtype, device, backend)
    check_extra(EXTRA, "serve")
    several = Ranks(ranks, rank_timeout, check=False)
    if replicas is not None:
        check_extra(RAY, "ray")
    elif gpus is not None:
        raise ValueError("--gpus-per-replica belongs to --replicas; give that, too")
    from lookahead.serve.sockets import bound

    if fronts and (replicas is not None or several.together):
        other = "--ranks" if replicas is None else "--replicas"
        raise ValueError(
            f"--fronts {fronts} is for a single engine, and {other} has processes of its own; leave one out"
        )
    if replicas is None and several.together and not several.started:
        with bound(host, port):  # only a check: rank 0 binds it again
            pass
        raise typer.Exit(several.launch(console, None, forwarded=(signal.SIGTERM, signal.SIGINT)))

    from lookahead.cache import cache_dir
    from lookahead.serve.errors import log
    from lookahead.serve.keys import read_keys
    from lookahead.serve.logs import logging_to_stderr
    from lookahead.serve.settings import ServeSettings

    settings = ServeSettings(
        host=host,
        port=port,
        model_name=served_name,
        keys=read_keys(api_key_file, os.environ),
        public=allow_public,
        share_memory=share_memory,
        cors_origins=tuple(cors or ()),
        max_concurrency=max_concurrency,
        max_queue=max_queue,
        max_body=max_body,
        request_timeout=request_timeout,
        header_timeout=header_timeout,
        body_timeout=body_timeout,
        drain_seconds=drain_seconds,
        vllm_metrics=vllm_metrics,
        memory_folder=cache_dir() / "memory" if memory else None,
        log_prompts=log_prompts,
        log_level=log_level,
        log_format=log_format,
        reasoning_tags=reasoning_tags,
    )
    say: Callable[[str], None] = log.info if log_format == "json" else console.say  # all of stderr is JSON then
    with logging_to_stderr(log_level, log_format):
        if replicas is not None:
            where = {"model": model, "dtype": dtype, "device": device, "backend": backend}
            serve_replicas(settings, replicas, gpus, say, ranks=ranks or 1, rank_timeout=rank_timeout, **where)
        elif several.together:
            with several.watched(console):
                serve_together(several, settings, say, model, dtype=dtype, device=device, backend=backend)
        else:
            with bound(host, port) as sockets:  # before the model is loaded, which may take minutes
                serve_alone(settings, fronts, sockets, say, partial(console.load, model), dtype, device, backend)


def serve_alone(
    settings: Any, fronts: int | None, sockets: Any, say: Callable[[str], None], load: Callable[..., Any],
    dtype: str, device: str, backend: str,
) -> None:  # fmt: skip
    """Serve with one engine, behind front processes or in one process with HTTP."""
    from lookahead.serve.fronts.run import Fronts, default_fronts
    from lookahead.serve.fronts.run import serve as run_behind
    from lookahead.serve.life import serve as run

    options = {"dtype": dtype, "device": device, "backend": backend, "log": say}
    count = default_fronts() if fronts is None else fronts
    if not count:
        run(load(**options), settings, say, sockets=sockets)
        return
    with Fronts(count, sockets) as started:
        run_behind(load(**options), settings, say, started)


def serve_together(several: Ranks, settings: Any, say: Callable[[str], None], name: str | None, **options: Any) -> None:
    """Serve as one of several ranks that share an engine: rank 0 serves HTTP, and the others follow it."""
    import lookahead.parallel
    from lookahead.serve.life import serve as run
    from lookahead.serve.ranks import LeadingService, run_follower
    from lookahead.serve.sockets import bound

    load = partial(lookahead.parallel.load, name, **options, ranks=several.count, timeout=several.timeout)
    if several.follows:
        model = load()
        run_follower(model, settings)
    else:
        with bound(settings.host, settings.port) as sockets:  # before the model is loaded
            model = load(log=say)
            model.lead()
            run(model, settings, say, LeadingService, sockets)
    model.close()


def serve_replicas(settings: Any, replicas: int, gpus: float | None, say: Callable[[str], None], **model: Any) -> None:
    """Serve with several engines on this machine, one per replica."""
    import torch

    from lookahead.serve.ray.local import check_machine, run
    from lookahead.serve.ray.settings import RaySettings

    found = torch.cuda.device_count() if model["device"] != "cpu" else 0
    given = float(found > 0) if gpus is None else gpus
    wanted = RaySettings(replicas=replicas, gpus=given, serve=settings, **model)
    check_machine(wanted, found)
    run(wanted, say)


def check_extra(names: tuple[str, ...], extra: str) -> None:
    """Raise ValueError if packages of an extra are not installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        what = "lookahead serve" if extra == "serve" else "--replicas"
        raise ValueError(
            f"{what} needs {', '.join(missing)}; install the extra: pip install 'lookahead-decoding[{extra}]'"
        )
