"""The parts around replicas that need no cluster: settings, conversations, reports, metrics, refusals, manifests."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections import Counter
from typing import Any

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from lookahead.cli import app as command
from lookahead.cli import serve as verb
from lookahead.cli.common import Host
from lookahead.serve.errors import ApiError
from lookahead.serve.ray import reports as reports_module
from lookahead.serve.ray.application import build
from lookahead.serve.ray.conversations import BLOCK, TAIL, Conversations, Homes
from lookahead.serve.ray.gather import ingress_text, merge_metrics
from lookahead.serve.ray.local import check_machine, cluster
from lookahead.serve.ray.reports import Report, ReportStore
from lookahead.serve.ray.settings import RaySettings
from lookahead.serve.settings import ServeSettings
from lookahead.serve.wire import as_fields

# Settings and refusals.


def test_a_port_in_use_shows_before_ray_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(**options: Any) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray, "init", never)
    with socket.create_server(("127.0.0.1", 0)) as other:
        settings = RaySettings(serve=ServeSettings(port=other.getsockname()[1]))
        with pytest.raises(ValueError, match="the port is in use"), cluster(settings, print):
            pass


def test_an_error_of_rays_becomes_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**options: Any) -> None:
        raise RuntimeError("ray::Actor()\n  File ..., line 1\nRuntimeError: no room\n")

    monkeypatch.setattr(ray, "init", fail)
    settings = RaySettings(serve=ServeSettings(port=0))
    with pytest.raises(ValueError, match=r"^Ray cannot start: RuntimeError: no room$"), cluster(settings, print):
        pass


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"replicas": 0}, "replicas=0 must be from 1"),
        ({"ingresses": -1}, "ingresses=-1 must be from 1"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas=2 must be from replicas=3"),
        ({"gpus": 1.5}, "gpus=1.5 must be 0 or more, and whole above 1"),
        ({"target_ongoing": 100}, "target_ongoing=100 must be above 0, and at most max_concurrency=64"),
        ({"ranks": 0}, "ranks=0 must be from 1 to 64"),
        ({"rank_timeout": 1}, "rank_timeout=1 must be at least 2 seconds"),
        ({"ranks": 2, "cpus": 0}, "ranks=2 are placed by what they are given"),
        ({"downscale_seconds": -1}, "downscale_seconds=-1 must be a number of seconds from 0 up"),
        ({"replica": 2}, "unknown setting 'replica'"),
        ({"max_queue": -1}, "max_queue=-1 must be at least 0"),
        ({"host": "0.0.0.0"}, "unknown setting 'host'"),
    ],
)
def test_a_wrong_setting_is_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RaySettings.from_options(options)


def test_options_of_a_file_become_settings() -> None:
    found = RaySettings.from_options({"model": "m", "replicas": 1, "max_replicas": 4, "max_concurrency": 8}, ("a" * 9,))
    assert (found.model, found.most, found.target, found.serve.keys) == ("m", 4, 6.0, ("a" * 9,))


def test_replicas_do_not_get_the_keys() -> None:
    told = RaySettings(serve=ServeSettings(keys=("a-long-secret name=shop", "another-secret"))).for_replicas()
    assert len(told.keys) == 2
    assert "secret" not in repr(told.keys)


def test_limits_are_wired_to_ray() -> None:
    own = ServeSettings(max_concurrency=7, max_queue=11, drain_seconds=3)
    scales = {"max_replicas": 5, "target_ongoing": 4, "upscale_seconds": 5, "downscale_seconds": 50}
    ingress = build(RaySettings(replicas=2, **scales, gpus=0.5, serve=own))
    _, replicas, _ = ingress._bound_deployment.init_args
    deployment = replicas._bound_deployment
    assert deployment.max_ongoing_requests == 8  # and a channel of the ingress
    assert deployment.max_queued_requests == 11
    assert deployment.ray_actor_options["num_gpus"] == 0.5
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 5, 4)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (5, 50)
    assert deployment._deployment_config.graceful_shutdown_timeout_s == 3


def test_ranks_are_placed_on_one_machine() -> None:
    ingress = build(RaySettings(ranks=3, gpus=1))
    config = ingress._bound_deployment.init_args[1]._bound_deployment._replica_config
    assert config.placement_group_bundles == [{"CPU": 1.0, "GPU": 1.0}] * 3
    assert config.placement_group_strategy == "STRICT_PACK"


def run(*args: str) -> Any:
    def never(*given: Any, **options: Any) -> Any:
        raise AssertionError("the model was loaded")

    return CliRunner().invoke(command, ["serve", *args], obj=Host(load=never))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--replicas", "0"), "replicas=0 must be from 1"),
        (("--replicas", "2", "--device", "cuda:1"), "Ray deals them out; use --device cuda"),
        (("--gpus-per-replica", "1"), "--gpus-per-replica belongs to --replicas"),
        (("--replicas", "2", "--device", "cpu", "--gpus-per-replica", "1"), "this machine's 0 have room for 0"),
    ],
)
def test_a_mistake_is_one_line(args: tuple[str, ...], says: str) -> None:
    done = run(*args)
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_missing_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "RAY", ("no_such_ray",))
    done = run("--replicas", "2")
    assert done.exit_code == 2
    assert "--replicas needs no_such_ray; install the extra: pip install 'lookahead-decoding[ray]'" in done.stderr


def test_replicas_may_share_gpus() -> None:
    check_machine(RaySettings(replicas=4, gpus=0.5), 2)
    check_machine(RaySettings(replicas=2, gpus=2), 4)
    for settings, room in ((RaySettings(replicas=5, gpus=0.5), 4), (RaySettings(replicas=2, gpus=2), 1)):
        with pytest.raises(ValueError, match=f"have room for {room}; lower --replicas"):
            check_machine(settings, 2)


def test_an_error_crosses_the_hop() -> None:
    error = ApiError(429, "wait", param="n", code="x", headers={"Retry-After": "2"})
    again = ApiError(**pickle.loads(pickle.dumps(as_fields(error))))
    assert (again.status, again.body(), again.headers) == (429, error.body(), error.headers)


# Conversations.


def test_a_longer_prompt_belongs_to_the_conversation_of_its_beginning() -> None:
    found = Conversations()
    first = list(range(3 * BLOCK))
    name = found.name("shop", first)
    assert name
    second = [*first, *range(900, 950)]
    assert found.name("shop", second) == name
    assert found.name("shop", [*second, *range(200)]) == name
    assert found.name("shop", [*first[:-TAIL], *range(500, 600)]) == name  # the assistant's turn began differently
    assert found.name("other", second) != name


def test_a_common_system_prompt_makes_no_conversation() -> None:
    found = Conversations()
    system = list(range(20 * BLOCK))
    names = {found.name("shop", [*system, *[user] * 3 * BLOCK]) for user in range(5)}
    assert len(names) == 5


def test_a_short_prompt_has_no_conversation_and_old_ones_are_forgotten() -> None:
    found = Conversations(kept=2)
    assert found.name("", list(range(BLOCK))) == ""
    first = found.name("", [1] * 2 * BLOCK)
    for token in (2, 3):
        found.name("", [token] * 2 * BLOCK)
    assert first
    assert len(found._names) == 2


def test_homes_are_kept_until_they_are_left() -> None:
    homes = Homes(kept=2)
    for conversation, replica in (("a", "1"), ("b", "2"), ("a", "3"), ("c", "4"), ("", "5")):
        homes.assign(conversation, replica)
    assert [homes.find(name) for name in ("a", "b", "c", "")] == ["3", "", "4", ""]
    homes.forget("a")
    assert homes.find("a") == ""


# Reports, and the merged metrics.


def test_an_old_report_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(reports_module, "monotonic", lambda: now[0])

    async def test() -> None:
        reports = ReportStore()
        await reports.post("replica", "a", b"1")
        now[0] = reports_module.STALE - 1
        await reports.post("replica", "b", b"2")
        assert [report.name for report in await reports.read()] == ["a", "b"]
        now[0] = reports_module.STALE + 1
        assert [report.name for report in await reports.read()] == ["b"]

    asyncio.run(test())


def test_one_text_has_the_samples_of_all_replicas(served: Any) -> None:
    from lookahead.serve.metrics import Metrics

    metrics = Metrics("tiny")
    metrics.observe_step(3, 0.01)
    metrics.totals["generation_tokens"] = 5
    text = metrics.text(served)
    ingress = ingress_text("tiny", 4, Counter({"429": 2}), Counter(lost=1))
    found = merge_metrics([Report("replica", "b", text), Report("ingress", "i", ingress), Report("replica", "a", text)])
    families = {family.name: family for family in text_string_to_metric_families(found.decode())}
    tokens = {sample.labels["replica"]: sample.value for sample in families["lookahead:generation_tokens"].samples}
    assert tokens == {"a": 5, "b": 5}
    assert len(found.decode().split("# TYPE lookahead:generation_tokens_total counter")) == 2
    waiting = {sample.labels["replica"]: sample.value for sample in families["lookahead:num_requests_waiting"].samples}
    assert waiting == {"a": 0, "b": 0, "i": 4}
    assert families["lookahead:replicas_lost"].samples[0].value == 1
    steps = [sample for sample in families["lookahead:step_time_seconds"].samples if sample.name.endswith("_count")]
    assert {sample.labels["replica"] for sample in steps} == {"a", "b"}
