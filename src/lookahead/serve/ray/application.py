"""The application: three deployments of Ray Serve, built from settings.

reports   one process, to which the others report their status
replicas  engines; Ray starts, monitors, replaces and scales them
ingress   HTTP
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig

from lookahead.serve.keys import read_keys
from lookahead.serve.ray.ingress import Ingress
from lookahead.serve.ray.replica import Replica
from lookahead.serve.ray.reports import ReportStore
from lookahead.serve.ray.settings import RaySettings

NAME = "lookahead"
HEALTH_PERIOD, HEALTH_TIMEOUT = 1.0, 30.0
"""Seconds: how soon a dead process is noticed, and how long a busy one may take to answer."""
MANY = 100_000
"""Effectively unlimited: an ingress has its own limits, with better error messages."""
QUICK = 0.2
"""Seconds between checks whether a process has drained."""


def build(settings: RaySettings) -> serve.Application:
    """The application, ready for `serve.run`."""
    own, light = settings.serve, {"num_cpus": 0}
    reports = deployed(ReportStore, num_replicas=1, max_ongoing_requests=MANY, ray_actor_options=light).bind()
    replicas = deployed(
        Replica,
        max_ongoing_requests=own.max_concurrency + settings.ingresses,  # and a channel per ingress
        max_queued_requests=max(1, own.max_queue),
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        graceful_shutdown_timeout_s=own.drain_seconds,
        **_count(settings),
        **_placement(settings),
    ).bind(settings_for_replicas(settings), reports)
    return deployed(
        serve.ingress()(Ingress),
        num_replicas=settings.ingresses,
        max_ongoing_requests=MANY,
        ray_actor_options=light,
        # A redeployed ingress may finish all of its requests.
        graceful_shutdown_timeout_s=max(own.drain_seconds, own.request_timeout),
    ).bind(settings, replicas, reports)


def deployed(kind: type[Any], **options: Any) -> serve.Deployment:
    """A class as a deployment with the class's name."""
    found: serve.Deployment = serve.deployment(
        name=kind.__name__,
        health_check_period_s=HEALTH_PERIOD,
        health_check_timeout_s=HEALTH_TIMEOUT,
        graceful_shutdown_wait_loop_s=QUICK,
        **options,
    )(kind)
    return found


def settings_for_replicas(settings: RaySettings) -> RaySettings:
    """The settings without the secrets of an ingress."""
    return replace(settings, serve=settings.for_replicas())


def _count(settings: RaySettings) -> dict[str, Any]:
    """A fixed number of replicas, or autoscaling."""
    if settings.max_replicas is None:
        return {"num_replicas": settings.replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=settings.replicas,
            max_replicas=settings.max_replicas,
            target_ongoing_requests=settings.target,
            upscale_delay_s=settings.upscale_seconds,
            downscale_delay_s=settings.downscale_seconds,
        )
    }


def _placement(settings: RaySettings) -> dict[str, Any]:
    """The ranks of a replica are placed together on one machine."""
    if settings.ranks == 1:
        return {}
    given = {name: value for name, value in (("CPU", settings.cpus), ("GPU", settings.gpus)) if value}
    return {"placement_group_bundles": [given] * settings.ranks, "placement_group_strategy": "STRICT_PACK"}


def app(options: dict[str, Any]) -> serve.Application:
    """For `serve deploy`: the application with the settings under `args` in the config file.

    The keys come from the file that `api_key_file` names on the head node, or from LOOKAHEAD_API_KEYS there. Ray's
    `http_options` set where the proxies listen, so without keys `public: true` is required.
    """
    options = dict(options)
    path = options.pop("api_key_file", None)
    keys = read_keys(None if path is None else Path(path), os.environ)
    return build(RaySettings.from_options(options, keys))
