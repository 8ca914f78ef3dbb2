"""The files under deploy/: Ray's own schema takes them, and the settings in them are ones that the server takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from lookahead.serve.ray import application
from lookahead.serve.ray.settings import RaySettings

DEPLOY = Path(__file__).parents[3] / "deploy"


def config(name: str) -> dict[str, Any]:
    """The Serve config of a file."""
    found = yaml.safe_load((DEPLOY / name).read_text())
    return yaml.safe_load(found["spec"]["serveConfigV2"]) if name == "kuberay.yaml" else found


@pytest.mark.parametrize("name", ["ray.yaml", "kuberay.yaml"])
def test_a_serve_config_is_valid(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (one,) = ServeDeploySchema.model_validate(config(name)).applications
    module, _, attribute = one.import_path.partition(":")
    assert module == "lookahead.serve.ray"
    assert getattr(application, attribute) is application.app
    keys = tmp_path / "keys"
    keys.write_text("a-long-secret\n")
    monkeypatch.setattr(application, "build", lambda settings: settings)
    settings: Any = application.app({**one.args, "api_key_file": str(keys)})
    assert isinstance(settings, RaySettings)
    assert settings.serve.keys == ("a-long-secret",)
    assert settings.most > settings.replicas


def test_the_rayservice_has_what_the_operator_asks_for() -> None:
    found = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayService")
    cluster = found["spec"]["rayClusterConfig"]
    args = config("kuberay.yaml")["applications"][0]["args"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    for group in (head, workers):
        assert "rayStartParams" in group
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    gpus = float(workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert args["max_replicas"] * args["gpus"] <= gpus * workers["maxReplicas"]
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] > args["drain_seconds"]
