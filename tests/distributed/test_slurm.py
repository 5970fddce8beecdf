"""`--launcher slurm` on a real Slurm of this machine."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import _ray_runs as runs
import pytest
from _slurm import MISSING, Cluster, cluster, wait_for

from megatron_wrap.cli.main import main
from megatron_wrap.testing.ranks import RankPool

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: {', '.join(MISSING)}"),
]
SCRIPT, SLURM = Path(__file__).with_name("_slurm_script.py"), "megatron_wrap.launch.slurm"
WORDS = ["train", str(runs.CONFIG), "--launcher", "slurm"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes, the second of which sees another folder `here_only`."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "here_only").mkdir()
    with cluster(folder / "daemons", ("n1", "n2"), {"n2": folder / "here_only"}) as started:
        yield started


@pytest.fixture(autouse=True)
def environment(slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    root = Path(__file__).parents[2]
    for name, value in {**slurm.environment, "PYTHONPATH": f"{root}{os.pathsep}{SCRIPT.parent}"}.items():
        monkeypatch.setenv(name, value)


def submitted(capsys: pytest.CaptureFixture[str]) -> str:
    """The number of the job that was just submitted."""
    printed = capsys.readouterr().out
    number = re.search(r"job (\d+) \(tiny-llama-mock\) is submitted: \S+\nfollow it: megatron-wrap jobs", printed)
    assert number is not None, printed
    return number[1]


def test_a_job_is_asked_to_stop_queued_again_and_resumes(
    slurm: Cluster, ranks: Callable[[int], RankPool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unbroken, folder = tmp_path / "unbroken", tmp_path / "run"
    unbroken.mkdir()
    overrides = ["megatron_wrap.launch.common.gpus_per_node=2", *runs.overrides(folder)]
    assert main([*WORDS, "--script", str(SCRIPT), *overrides]) == 0
    job = submitted(capsys)
    ranks(2).run(runs.without_ray, unbroken)
    assert main([*WORDS, *overrides]) == 2
    assert f"job name tiny-llama-mock is in use by your job {job} (" in capsys.readouterr().err
    wait_for(lambda: (folder / "journal").exists() and 4 in runs.steps_of(folder / "journal"))
    assert main(["jobs"]) == 0
    assert re.search(rf"^{job} +tiny-llama-mock +RUNNING +[34] ", capsys.readouterr().out, re.MULTILINE)
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    log = folder / "logs" / f"slurm-{job}-node0.log"
    wait_for(lambda: "SIGUSR1: the run saves after this step" in log.read_text())
    (folder / "go").touch()
    assert main(["jobs", "--follow", job]) == 0
    console = capsys.readouterr().err
    assert "the run has saved; the job is queued again" in console
    assert "attempt 2" in console
    assert "attempt 3" not in console
    assert "resuming from iteration 5" in console
    expected = runs.steps_of(unbroken / "journal")
    del expected[5]  # the step after which the script was ended
    assert runs.steps_of(folder / "journal") == expected
    assert len((folder / "journal").read_text().splitlines()) == len(expected)  # none was taken twice
    assert main(["jobs"]) == 0
    assert re.search(rf"^{job} +tiny-llama-mock +COMPLETED +9 ", capsys.readouterr().out, re.MULTILINE)


def test_a_folder_that_a_node_does_not_see_ends_the_job_before_it_trains(
    slurm: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = slurm.folder.parent / "here_only"
    words = [*WORDS, "--nodes", "2", "--gpus-per-node", "1", "--wait", *runs.overrides(folder)]
    assert main(words) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: node n2 does not see the folder {folder} ")
    assert not (folder / "metrics.jsonl").exists()


def test_what_slurm_refuses_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = runs.overrides(tmp_path)
    assert main([*WORDS, f"{SLURM}.partition=cpus", *overrides]) == 2
    assert "invalid partition specified: cpus" in capsys.readouterr().err
    assert main([*WORDS, f"{SLURM}.sbatch_options=[--constraint=h100]", *overrides]) == 2
    assert re.match(r"error: sbatch fails: .*feature", capsys.readouterr().err)
    assert main(["jobs", "--cancel", "99999"]) == 2
    assert "submitted no job 99999" in capsys.readouterr().err


def test_a_job_that_waits_is_cancelled(slurm: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, f"{SLURM}.sbatch_options=[--hold]", *runs.overrides(tmp_path)]) == 0
    job = submitted(capsys)
    assert main(["jobs"]) == 0
    assert re.search(rf"^{job} +tiny-llama-mock +PENDING \(JobHeldUser\)", capsys.readouterr().out, re.MULTILINE)
    assert main(["jobs", "--cancel", "tiny-llama-mock"]) == 0
    wait_for(lambda: not slurm.run("squeue", "--noheader", f"--jobs={job}").strip(), 20)
    assert main(["jobs", "--cancel", job]) == 2
    assert "has ended: CANCELLED" in capsys.readouterr().err


def test_without_scontrol_a_job_fails_and_never_uses_localhost(
    slurm: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "--dry-run", *runs.overrides(tmp_path)]) == 0
    script = capsys.readouterr().out.partition("whose content is\n\n")[2]
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("bash", "mkdir", "rm", "date", "head", "grep"):
        (programs / name).symlink_to(f"/bin/{name}" if Path(f"/bin/{name}").exists() else f"/usr/bin/{name}")
    variables = {"PATH": str(programs), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    ended = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "error: scontrol does not name the nodes" in ended.stdout
    assert (tmp_path / "slurm" / "7.exit").read_text() == "2\n"
