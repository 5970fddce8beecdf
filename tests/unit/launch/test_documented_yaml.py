"""The YAML of docs/cluster.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from kubeflow_trainer_api import models

from megatron_wrap.bridge.loading.hub import read_run
from megatron_wrap.launch.contract import Launch, Program
from megatron_wrap.launch.kubernetes_manifest import manifest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
BLOCKS = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```$", TEXT, re.M | re.S)]


def one_with(key: str) -> dict:
    """The block with a key at its top."""
    (block,) = [block for block in BLOCKS if key in block]
    return block


def test_the_settings_are_those_of_a_run(tmp_path):
    (block,) = [block for block in BLOCKS if "kubernetes" in block.get("megatron_wrap", {}).get("launch", {})]
    run = yaml.safe_load((ROOT / "configs" / "tiny-llama-mock.yaml").read_text())
    run["megatron_wrap"] |= block["megatron_wrap"]
    run["megatron_lm"]["train"]["common"] |= block["megatron_lm"]["train"]["common"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    config = read_run(tmp_path / "run.yaml")
    assert (config.launch.launcher, config.launch.nodes) == ("kubernetes", 2)
    launch = Launch(config, ("train", str(tmp_path / "run.yaml")), Program(()))
    assert [each["kind"] for each in yaml.safe_load_all(manifest(launch))] == [
        "ConfigMap",
        "TrainingRuntime",
        "TrainJob",
    ]


def test_the_job_set_is_one():
    job_set = one_with("kind")
    assert job_set["kind"] == "JobSet"
    assert models.JobsetV1alpha2JobSet.from_dict(job_set).to_dict() == job_set


@pytest.mark.parametrize("name", ["NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_nodes_get_the_variables_of_torchrun(name):
    (job,) = one_with("kind")["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert name in [variable["name"] for variable in container["env"]]
    task = one_with("file_mounts")
    assert f"{name}=" in task["run"]
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
