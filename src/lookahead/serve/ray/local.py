"""`lookahead serve --replicas`: a single-machine cluster for as long as the command runs."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.exceptions import RayServeException
from ray.serve.schema import LoggingConfig

from lookahead.serve.ray.application import NAME, build
from lookahead.serve.ray.settings import RaySettings
from lookahead.serve.sockets import bound, host_port

QUICK_HOPS = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
"""Ray settings for fewer threads per chunk, also in `deploy/ray.yaml`. With 16 streams on two busy
cores, 430 tokens per second became 590 with them."""
FLUSH_SECONDS = 1.0
"""Seconds for the proxy to forward the last output of the ingress before everything is stopped."""
LONGEST_STOP = 30.0
"""Seconds that Ray may take to stop, after the requests have ended."""


def check_machine(settings: RaySettings, gpus: int) -> None:
    """Raise ValueError if the replicas do not fit on this machine's GPUs."""
    if settings.device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {settings.device} names one GPU, and Ray deals them out; use --device cuda")
    if not settings.gpus:
        return
    processes = settings.most * settings.ranks
    what = "replicas" if settings.ranks == 1 else f"ranks ({settings.most} replicas of {settings.ranks})"
    together = int(1 / settings.gpus) if settings.gpus <= 1 else 0  # how many replicas share a GPU
    room = gpus * together if together else gpus // int(settings.gpus)
    if processes > room:
        raise ValueError(
            f"{processes} {what} with {settings.gpus:g} GPUs each, and this machine's {gpus} have room for "
            f"{room}; lower --replicas, or --gpus-per-replica so that they share"
        )


@contextmanager
def cluster(settings: RaySettings, say: Callable[[str], None], log_level: str = "WARNING") -> Iterator[str]:
    """Run the application on this machine. Yields its URL."""
    own = settings.serve
    with bound(own.host, own.port) as sockets:  # only a check: Ray's proxy binds the address itself
        port: int = sockets[0].getsockname()[1]
    logging.getLogger("ray").setLevel(logging.ERROR)
    where = host_port(own.host, port)
    with variables({"RAY_USAGE_STATS_ENABLED": "0", **QUICK_HOPS}), named("Ray cannot start"):  # its processes inherit
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, int(settings.most * settings.ranks * settings.cpus) + 1),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address="127.0.0.1",
        )
    try:
        options = HTTPOptions(host=own.host, port=port, location=ProxyLocation.HeadOnly)
        with named(f"Ray's proxy cannot listen on {where}"):
            serve.start(http_options=options, logging_config=LoggingConfig(log_level=log_level))
        say(f"starting {counted(settings.replicas)}")
        try:
            serve.run(build(settings), name=NAME, route_prefix="/")
        except (RuntimeError, RayServeException) as error:
            raise ValueError(f"the replicas cannot start: {cause()}") from error
        yield f"http://{where}"
    finally:
        serve.shutdown()
        ray.shutdown()


@contextmanager
def named(what: str) -> Iterator[None]:
    """Turn an error of Ray's into one line: its messages are tracebacks that end with the reason."""
    try:
        yield
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ValueError(f"{what}: {lines[-1] if lines else type(error).__name__}") from error


@contextmanager
def variables(wanted: dict[str, str]) -> Iterator[None]:
    """Set environment variables within the context, unless they are set. Later child processes must not inherit them: a
    process that controls a cluster, like this one, cannot shut it down with Ray's router in its own thread."""
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def cause() -> str:
    """Why a deployment failed, in one line."""
    application = serve.status().applications.get(NAME)
    for name, deployment in (application.deployments if application else {}).items():
        lines = [line.strip() for line in deployment.message.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line.split(":")[0] or "Exception" in line.split(":")[0]]
        if errors:
            return f"{name}: {errors[-1]}"
    return application.message.splitlines()[0] if application and application.message else "Ray gave no reason"


def run(settings: RaySettings, say: Callable[[str], None] = print) -> None:
    """Serve until a signal comes. The first one drains, the second ends the process at once."""
    signals: list[int] = []
    stopped = threading.Event()

    def stop(number: int, frame: Any) -> None:
        if signals:
            os._exit(128 + number)
        signals.append(number)
        stopped.set()

    with cluster(settings, say) as address:
        for number in (signal.SIGTERM, signal.SIGINT):  # Ray has set handlers of its own
            signal.signal(number, stop)
        say(f"serving {counted(settings.replicas)} at {address}/v1")
        stopped.wait()
        drain(settings.serve.drain_seconds, say)


def counted(replicas: int) -> str:
    return "1 replica" if replicas == 1 else f"{replicas} replicas"


def drain(seconds: float, say: Callable[[str], None]) -> None:
    """Let the ingress finish its requests."""
    say(f"finishing running requests, at most {seconds:g} s")
    ingress: Any = serve.get_deployment_handle("Ingress", NAME)
    left = ingress.drain.remote(seconds).result(timeout_s=seconds + LONGEST_STOP)
    if left:
        say(f"{left} requests were not finished in time")
    time.sleep(FLUSH_SECONDS)
