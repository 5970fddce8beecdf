"""The file of a Slurm job, and what is refused before it is submitted; Slurm itself is in tests/distributed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from megatron_wrap.cli.main import main
from megatron_wrap.config import load_run_config
from megatron_wrap.errors import ConfigError
from megatron_wrap.launch.interface import Launch, Program
from megatron_wrap.launch.slurm import job_file

ROOT = Path(__file__).parents[3]
CONFIG, SLURM = "configs/tiny-llama-mock.yaml", "megatron_wrap.launch.slurm"
TOKEN = "hf_" + "x" * 24


def launched(*overrides: str, nodes: int = 1, processes: int = 2) -> Launch:
    config = load_run_config(ROOT / CONFIG, overrides)
    return Launch(config, ("train", CONFIG, *overrides), Program(()), nodes, processes)


def sbatch_options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_the_keys_of_a_site_are_options_of_sbatch() -> None:
    keys = ("partition=gpu", "account=me", "time_limit=1-12:00:00", "signal_seconds=300", "job_name=mine")
    more = (f"{SLURM}.sbatch_options=[--qos=high, --exclusive]", f"{SLURM}.requeue=false")
    more += (f"{SLURM}.srun_options=[--container-image=a b.sqsh]", f"{SLURM}.rendezvous_port=29511")
    text = job_file(launched(*(f"{SLURM}.{key}" for key in keys), *more, nodes=4, processes=8))
    expected = {"--partition=gpu", "--account=me", "--time=1-12:00:00", "--signal=B:USR1@300", "--job-name=mine"}
    expected |= {"--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--qos=high", "--exclusive", "--no-requeue"}
    assert expected <= set(sbatch_options(text))
    assert "--nodes 4 --gpus-per-node 8" in text
    assert '--rdzv-endpoint "$RENDEZVOUS"' in text
    assert "\nsrun_options=('--container-image=a b.sqsh')\n" in text
    assert "\nport=29511  #" in text


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        (("megatron_wrap.init.platform=cpu",), {"--cpus-per-task=2"}),
        ((), {"--gpus-per-node=2"}),
        ((f"{SLURM}.cpus_per_node=32",), {"--gpus-per-node=2", "--cpus-per-task=32"}),
        ((f"{SLURM}.sbatch_options=[--gres=gpu:h100:2]",), {"--gres=gpu:h100:2"}),
    ],
)
def test_cores_and_gpus(overrides: tuple[str, ...], options: set[str]) -> None:
    asked = {option for option in sbatch_options(job_file(launched(*overrides))) if "pus" in option or "gres" in option}
    assert asked == options


def test_a_container_has_its_own_python() -> None:
    text = job_file(launched(f"{SLURM}.container=apptainer exec --nv image.sif", f"{SLURM}.setup=[module load cuda]"))
    assert "    apptainer exec --nv image.sif python3 -m megatron_wrap.cli.main train" in text
    assert "\nmodule load cuda\n" in text


def test_the_file_is_valid_bash_whatever_its_names_are(tmp_path: Path) -> None:
    overrides = (f"megatron_wrap.logger.output_dir={tmp_path}/it's a $folder", f"{SLURM}.job_name=a 'name'")
    file = tmp_path / "run.sbatch"
    file.write_text(job_file(launched(*overrides, nodes=2)))
    assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0
    printed = subprocess.run(
        ["bash", "-c", f"source <(sed -n '/^output=/p' {file}); echo \"$output\""],
        text=True,
        capture_output=True,
        check=True,
    )
    assert printed.stdout == f"{tmp_path}/it's a $folder\n"


@pytest.mark.parametrize(
    "override",
    [
        f"{SLURM}.setup=[export HF_TOKEN={TOKEN}]",
        f"{SLURM}.setup=[export WANDB_API_KEY=0123456789]",
        f"megatron_wrap.logger.wandb_name={TOKEN}",
        f"{SLURM}.sbatch_options=[--comment=secret-of-the-environment]",
    ],
)
def test_a_file_with_a_secret_is_refused(override: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASSWORD", "secret-of-the-environment")
    with pytest.raises(ConfigError, match="would contain a secret") as refused:
        job_file(launched(override))
    assert TOKEN not in str(refused.value)
    job_file(launched(f"{SLURM}.setup=[export WANDB_API_KEY=$MY_PASSWORD]"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{SLURM}.sbatch_options=[qos=high]", "'qos=high' is no option"),
        (f"{SLURM}.sbatch_options=[--nodes=2]", "--nodes=2 follows from megatron_wrap.launch.common.nodes"),
        (f"{SLURM}.sbatch_options=[-p gpu]", f"-p gpu follows from {SLURM}.partition"),
        (f"{SLURM}.signal_seconds=1", "must be at least 10"),
        (f"{SLURM}.partitoin=gpu", "did you mean partition?"),
    ],
)
def test_wrong_keys_are_refused(override: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(ROOT / CONFIG), "--launcher", "slurm", override]) == 2
    assert message in capsys.readouterr().err


def test_without_sbatch_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["train", str(ROOT / CONFIG), "--launcher", "slurm"]) == 2
    assert "squeue is not installed here" in capsys.readouterr().err
    assert os.listdir() == []
