"""The manifest of a TrainJob, validated by the models of kubeflow-trainer-api."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml
from kubeflow_trainer_api import models

from megatron_wrap.bridge.loading.hub import read_run
from megatron_wrap.errors import ConfigError
from megatron_wrap.launch.interface import Launch, Program
from megatron_wrap.launch.kubernetes import KubernetesLauncher
from megatron_wrap.launch.kubernetes_manifest import _text, _yaml

CONFIG = Path(__file__).parents[3] / "configs" / "tiny-llama-mock.yaml"
KEYS, TRAIN = "megatron_wrap.launch.kubernetes", "megatron_lm.train.common"
MODELS = {
    "ConfigMap": models.IoK8sApiCoreV1ConfigMap,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}
SETTINGS = (
    f"{KEYS}.namespace=research",
    f"{KEYS}.image=registry.example/megatron-wrap:1",
    f"{KEYS}.image_pull_policy=IfNotPresent",
    f"{KEYS}.image_pull_secrets=[registry]",
    f"{KEYS}.working_dir=/data/code",
    f"{KEYS}.volumes={{/data: datasets, /scratch: {{hostPath: {{path: /mnt/scratch}}}}}}",
    f"{KEYS}.shared_memory=16Gi",
    f"{KEYS}.env={{NCCL_DEBUG: INFO, FLAG: '1'}}",
    f"{KEYS}.secret_env=[WANDB_API_KEY=wandb/api-key]",
    f"{KEYS}.env_from_secrets=[hub]",
    f"{KEYS}.resources={{cpu: 8, memory: 64Gi, rdma/ib: 1}}",
    f"{KEYS}.node_selector={{pool: h100}}",
    f"{KEYS}.tolerations=[{{key: amd.com/gpu, operator: Exists}}]",
    f"{KEYS}.gpu_resource=amd.com/gpu",
    f"{KEYS}.labels={{kueue.x-k8s.io/queue-name: research}}",
    f"{KEYS}.pod={{priorityClassName: high}}",
    f"{KEYS}.max_restarts=7",
    f"{TRAIN}.save=checkpoints",
    f"{TRAIN}.stop_within_seconds=240",
)


def documents(folder: Path, *overrides: str, config: Path = CONFIG, nodes: int = 2) -> dict[str, dict]:
    """Kind -> object of the manifest that is written for a run."""
    overrides = (*overrides, f"megatron_wrap.logger.output_dir={folder}")
    launch = Launch(read_run(config, overrides), ("train", str(config), *overrides), Program(()), nodes, 4)
    KubernetesLauncher().preview(launch)
    return {each["kind"]: each for each in yaml.safe_load_all((folder / "trainjob.yaml").read_text())}


@pytest.mark.parametrize("settings", [(), SETTINGS])
def test_the_models_of_kubeflow_trainer_accept_every_field(tmp_path, settings):
    written = documents(tmp_path, *settings)
    assert set(written) == set(MODELS)
    for kind, document in written.items():
        # a field that a model does not know would be missing in what it returns
        assert MODELS[kind].from_dict(document).to_dict() == document


def test_settings_reach_their_fields(tmp_path):
    written = documents(tmp_path, *SETTINGS)
    job, runtime = written["TrainJob"]["spec"], written["TrainingRuntime"]["spec"]["template"]["spec"]
    assert {each["metadata"]["namespace"] for each in written.values()} == {"research"}
    assert written["TrainJob"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    trainer = job["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["image"] == "registry.example/megatron-wrap:1"
    gpus = {"cpu": 8, "memory": "64Gi", "rdma/ib": 1, "amd.com/gpu": 4}
    assert trainer["resourcesPerNode"] == {"limits": gpus, "requests": gpus}
    assert runtime["failurePolicy"]["maxRestarts"] == 7
    (replicated,) = runtime["replicatedJobs"]
    job_spec = replicated["template"]["spec"]
    rules = job_spec["podFailurePolicy"]["rules"]
    assert [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in rules] == [
        ("Ignore", [75]),
        ("FailJob", [2]),
        ("Ignore", None),
    ]
    pod = job_spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 240
    assert pod["nodeSelector"] == {"pool": "h100"}
    assert pod["priorityClassName"] == "high"
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    sources = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert sources[mounts["/dev/shm"]] == {"emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}
    assert sources[mounts["/data"]] == {"persistentVolumeClaim": {"claimName": "datasets"}}
    assert sources[mounts["/scratch"]] == {"hostPath": {"path": "/mnt/scratch"}}
    assert container["envFrom"] == [{"secretRef": {"name": "hub"}}]
    secret = {"secretKeyRef": {"name": "wandb", "key": "api-key"}}
    assert {"name": "WANDB_API_KEY", "valueFrom": secret} in container["env"]
    assert {"name": "FLAG", "value": "1"} in container["env"]


def test_the_settings_of_the_page_are_those_of_a_run(tmp_path):
    text = (CONFIG.parents[1] / "docs" / "cluster.md").read_text(encoding="utf-8")
    blocks = map(yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```$", text, re.M | re.S))
    (block,) = [block for block in blocks if "kubernetes" in block["megatron_wrap"]["launch"]]
    run = yaml.safe_load(CONFIG.read_text())
    run["megatron_wrap"] |= block["megatron_wrap"]
    run["megatron_lm"]["train"]["common"] |= block["megatron_lm"]["train"]["common"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    job = documents(tmp_path, config=tmp_path / "run.yaml")["TrainJob"]
    assert job["spec"]["trainer"]["resourcesPerNode"]["limits"]["rdma/ib"] == 8
    config = read_run(tmp_path / "run.yaml")
    assert (config.launch.launcher, config.launch.nodes) == ("kubernetes", 2)


def test_pods_get_the_yaml_its_overlay_and_the_overrides(tmp_path):
    config = tmp_path / "My run_2.yaml"
    shutil.copy(CONFIG, config)
    part = tmp_path / "nest" / "megatron_lm" / "model" / "arch" / "tiny-llama.yaml"
    part.parent.mkdir(parents=True)
    shutil.copy(CONFIG.parent / "nest" / "megatron_lm" / "model" / "arch" / "tiny-llama.yaml", part)
    written = documents(tmp_path / "out", "megatron_wrap.init.platform=cpu", f"{TRAIN}.train_iters=3", config=config)
    job = written["TrainJob"]
    assert job["metadata"]["name"] == "my-run-2"
    words = job["spec"]["trainer"]["command"]
    assert words[:5] == ["megatron-wrap", "train", "/etc/megatron-wrap/My run_2.yaml", "--launcher", "local"]
    assert f"{TRAIN}.train_iters=3" in words
    assert "resourcesPerNode" not in job["spec"]["trainer"]
    template = written["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"][
        "template"
    ]
    items = template["spec"]["volumes"][0]["configMap"]["items"]
    data = written["ConfigMap"]["data"]
    files = {item["path"]: data[item["key"]] for item in items}
    assert files == {
        "My run_2.yaml": config.read_text(),
        "nest/megatron_lm/model/arch/tiny-llama.yaml": part.read_text(),
    }


def test_no_variable_of_kubernetes_is_replaced_in_the_command(tmp_path):
    words = documents(tmp_path, f"{TRAIN}.save=s3://bucket/$(HOME)")["TrainJob"]["spec"]["trainer"]["command"]
    assert f"{TRAIN}.save=s3://bucket/$$(HOME)" in words


WORDS = ["word", "a/b:c", "on", "No", "null", "~", "1", "0x1f", "1e3", "2026-11-24", "é", "y"]
SIGNS = ["", " ", "a: b", "- a", "# a", "a #b", '"']
BLOCKS = ["a\nb", "a\nb\n", "a\n\n\n", "  a\n b\n", "a\n\tb: 'c'\n\n", "\na\n", "a\x07\nb", "a: null\n\n# b\u2028c\n"]


@pytest.mark.parametrize("text", [*WORDS, *SIGNS, *BLOCKS, "# a\n\nb:\n  c: null\n"])
def test_every_text_is_read_back(text):
    document = f"data:\n  {_yaml(text)}: {_text(text)}\n  list: {_yaml([text, {'nested': text}])}\n"
    assert yaml.safe_load(document) == {"data": {text: text, "list": [text, {"nested": text}]}}


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ([f"{KEYS}.env={{HF_TOKEN: hf_abcdefghijklmnopqrstuvwx}}"], [r"\[hidden\]", "secret_env"]),
        ([f"{KEYS}.secret_env=[WANDB_API_KEY]"], ["WANDB_API_KEY", "VARIABLE=SECRET/KEY"]),
        ([f"{KEYS}.env={{FLAG: 1}}"], ["FLAG is 1", "'1'"]),
        ([f"{KEYS}.name=Run_1"], ["'Run_1'"]),
        ([f"{KEYS}.volumes={{data: claim}}"], ["'data'", "absolute"]),
        ([f"{KEYS}.volumes={{/data: 3}}"], ["/data is 3"]),
        ([f"{KEYS}.pod={{volumes: []}}"], ["volumes"]),
        ([f"{TRAIN}.save=checkpoints"], ["checkpoints", "lost", f"{TRAIN}.save"]),
        ([f"{TRAIN}.save=/database/run", f"{KEYS}.volumes={{/data: claim}}"], ["/database/run", "are /data"]),
        ([f"{KEYS}.termination_grace_seconds=60", f"{TRAIN}.stop_within_seconds=90"], ["60 s", "90 s"]),
        ([f"{KEYS}.manifest=/proc/no/file.yaml"], ["/proc/no/file.yaml", f"{KEYS}.manifest"]),
    ],
)
def test_what_would_fail_later_is_refused(tmp_path, overrides, names):
    with pytest.raises(ConfigError) as refusal:
        documents(tmp_path, *overrides)
    for name in names:
        assert name.replace("\\", "") in str(refusal.value)
    assert "abcdefghijklmnopqrstuvwx" not in str(refusal.value)
