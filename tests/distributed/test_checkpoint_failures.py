"""A failed save or load raises one clear error on every rank, and earlier checkpoints are unchanged."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import _checkpoint_runs as runs
import pytest
from _checkpoint_runs import ARCH, BF16, DISTRIBUTED, MUON, OPTIMIZER, SGD, TIED, TP2, TRAIN, in_new_processes, refusal
from _covering import quick
from _started import refusal_of, train_until

from megatron_wrap.checkpoint.files.run_folder import CheckpointStore


def _save_with_limited_files(folder: Path, limited_rank: int, largest_file: int) -> tuple[str, list[int]]:
    """Save at iteration 1, at 2 with a limit on file sizes that simulates a full disk, and at 3 without the limit."""
    with runs.started(folder, DISTRIBUTED) as wrap:
        data = runs.samples()
        wrap.train(data[:4])
        wrap.save()
        wrap.train(data[4:8])
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if wrap.dp_rank == limited_rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, unlimited[1]))
        message = refusal_of(wrap.save)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        signal.signal(signal.SIGXFSZ, before)
        left = CheckpointStore(folder).iterations()
        wrap.train(data[8:12])
        wrap.save()
    return message, left


# with 1500 bytes rank 0 fails at its first small file, with 20000 at the metadata of all tensors
@pytest.mark.parametrize(
    ("limited_rank", "largest_file"),
    [(0, 1500), pytest.param(0, 20_000, marks=pytest.mark.matrix), (1, 200_000)],
)
def test_full_disk_is_one_error_on_all_ranks(tmp_path: Path, limited_rank: int, largest_file: int) -> None:
    results = in_new_processes(2, _save_with_limited_files, tmp_path, limited_rank, largest_file)
    assert len({message for message, _ in results}) == 1
    message, left = results[0]
    assert str(tmp_path) in message
    assert "File too large" in message or "disk or the quota full" in message, message
    assert left == [1]
    assert CheckpointStore(tmp_path).iterations() == [1, 3]
    assert not list(tmp_path.glob(".iter_*"))


def _save_where_rank_0_fails(folder: Path, name: str) -> str:
    """A save in which only rank 0 fails, in the function `name` that Megatron-Core calls."""
    with runs.started(folder) as wrap:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        from megatron_wrap.checkpoint import save

        owner: Any = FileSystemWriter if name == "finish" else save
        full = mock.patch.object(owner, name, side_effect=OSError(28, "No space left on device"))
        with full if wrap.dp_rank == 0 else contextlib.nullcontext():
            message = refusal_of(wrap.save)
        wrap.train(runs.samples()[:4])
        wrap.save()
    return message


@pytest.mark.parametrize("name", quick(["finish", "save_config"], ["finish"]))
def test_a_failure_on_rank_0_only_does_not_hang_the_other_ranks(tmp_path: Path, name: str) -> None:
    messages = in_new_processes(2, _save_where_rank_0_fails, tmp_path, name)
    assert len(set(messages)) == 1
    assert "No space left on device" in messages[0]
    assert CheckpointStore(tmp_path).iterations() == [1]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, int | None]]:
    """A folder with 5 MiB, and None; or one in which that has to be pretended, and its size."""
    folder, size = tmp_path / "disk", 5 * 2**20
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        yield folder, size
        return
    yield folder, None
    subprocess.run(["umount", str(folder)], check=True)


def _save_twice(folder: Path, records: Path, pretended: int | None) -> tuple[str, list[int]]:
    """With a disk for one checkpoint: the message of the second save, and the iterations that are saved."""
    from megatron_wrap.checkpoint import save

    def free_bytes(partial: Path) -> int:
        return (pretended or 0) - sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    keys = (f"{TRAIN}.save_interval=1", "megatron_wrap.checkpoint.on_save_error=continue")
    with (
        mock.patch.object(save, "free_bytes", save.free_bytes if pretended is None else free_bytes),
        runs.started(folder, (*keys, f"megatron_wrap.logger.output_dir={records}")) as wrap,
    ):
        train_until(wrap, runs.samples(), 2)  # the second one is not saved
        return refusal_of(wrap.save), CheckpointStore(folder).iterations()


def test_a_save_that_does_not_fit_is_refused_before_it_is_written(
    small_disk: tuple[Path, int | None], tmp_path: Path
) -> None:
    folder, pretended = small_disk
    first, second = in_new_processes(2, _save_twice, folder, tmp_path, pretended)
    assert first == second
    message, left = first
    assert re.search(r"it needs 0\.00\d+ GiB, and 0\.00\d+ GiB are free there: delete files", message), message
    assert left == [1]
    assert not list(folder.glob(".iter_*"))


def _save_into_a_file(folder: Path) -> str:
    with runs.started(folder / "checkpoints", (f"megatron_wrap.logger.output_dir={folder}",)) as wrap:
        if wrap.dp_rank == 0:
            shutil.rmtree(folder / "checkpoints")  # which the run holds
            (folder / "checkpoints").write_text("a file instead of a folder")
        return refusal_of(wrap.save)


def test_a_folder_that_cannot_be_created_is_one_error(tmp_path: Path) -> None:
    messages = in_new_processes(2, _save_into_a_file, tmp_path)
    assert len(set(messages)) == 1
    assert f"{tmp_path}/checkpoints" in messages[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, ranks) -> Path:
    """Checkpoint of a plain run at iteration 2, on one rank."""
    folder = tmp_path_factory.mktemp("saved")
    ranks(1).run(runs.train, folder, (), 2, (2,))
    return folder


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((f"{ARCH}.num_layers=2",), ["num_layers was 4", "is 2 here", "decoder.layers"]),
        ((f"{ARCH}.hidden_size=128",), ["hidden_size was 64", "is 128 here", "embedding.word_embeddings.weight"]),
        ((f"{ARCH}.ffn_hidden_size=192",), ["mlp.linear_fc1.weight", "160", "192"]),
        (TIED, ["output_layer.weight"]),
        (DISTRIBUTED, ["fp32 adam", "distributed adam", "no_load_optim"]),
        (SGD, ["fp32 adam", "fp32 sgd"]),
        (MUON, ["fp32 adam", "fp32 muon"]),
        (BF16, ["fp32 adam", "half precision adam"]),
        ((f"{TRAIN}.train_iters=20",), ["override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"]),
    ],
)
def test_checkpoint_of_another_run_is_refused(saved: Path, overrides: tuple[str, ...], words: list[str], ranks) -> None:
    (message,) = ranks(1).run(refusal, saved, overrides)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((f"{ARCH}.hidden_size=128",), ["embedding.word_embeddings.weight", "384 x 64", "512 x 128"]),
        ((f"{ARCH}.num_layers=2",), ["decoder.layers.", "4 x 64 (", "2 x 64 ("]),
        (TIED, ["output_layer.weight", "384 x 64", "not in this model"]),
    ],
)
def test_without_the_saved_configuration_the_error_names_the_first_parameter(
    saved: Path, tmp_path: Path, overrides: tuple[str, ...], words: list[str], ranks
) -> None:
    _copy_as_megatron_lm_writes(saved, tmp_path)
    messages = ranks(2).run(refusal, tmp_path, (*overrides, *TP2))
    assert messages[0] == messages[1]
    assert all(word in messages[0] for word in words), messages[0]


def _copy_as_megatron_lm_writes(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)
    for extra in ("resolved.yaml", "megatron_wrap.json"):
        (target / "iter_0000002" / extra).unlink()


def test_truncated_data_files_are_one_error(saved: Path, tmp_path: Path, ranks) -> None:
    _copy_as_megatron_lm_writes(saved, tmp_path)
    for file in (tmp_path / "iter_0000002").glob("*.distcp"):
        os.truncate(file, file.stat().st_size // 2)
    messages = ranks(2).run(refusal, tmp_path, ())
    assert messages[0] == messages[1]
    assert "cannot be read" in messages[0]


def _reports(folder: Path, overrides: tuple[str, ...]) -> list[Any]:
    from megatron_wrap.checkpoint.load import load_checkpoint

    with runs.started(folder.parent / "empty", overrides) as wrap:
        state = wrap.state
        everything = load_checkpoint(state, folder)
        resumed = state.progress.iteration
        weights = load_checkpoint(state, folder / "iter_0000002", weights_only=True)
        without = load_checkpoint(state, folder, with_optimizer=False, with_rng=False)
    return [everything, resumed, weights, without]


def test_the_report_lists_what_was_loaded(saved: Path, ranks) -> None:
    (same,) = ranks(1).run(_reports, saved, ())
    everything, resumed, weights, without = same
    assert (everything.iteration, resumed, everything.skipped, everything.other_layout) == (2, 2, (), False)
    assert everything.loaded == ("weights", "optimizer and schedule", "random generators")
    assert weights.loaded == without.loaded == ("weights",)
    other = ranks(2).run(_reports, saved, TP2)[0][0]
    assert other.other_layout
    assert other.skipped == ("random generators, saved on another layout",)


def _save_often(folder: Path) -> tuple[list[int], str]:
    """Save one iteration twice in a run, and again after a load; modification times of a file, and a digest."""
    with runs.started(folder) as wrap:
        file = folder / "iter_0000001" / "common.pt"
        times = []
        wrap.train(runs.samples()[:4])
        for _ in range(2):
            wrap.save()
            times.append(file.stat().st_mtime_ns)
        wrap.load()
        wrap.save()
        times.append(file.stat().st_mtime_ns)
        return times, runs.state_digest(wrap)


def _digest(folder: Path) -> str:
    with runs.started(folder) as wrap:
        return runs.state_digest(wrap)


def test_saving_twice_is_harmless(tmp_path: Path, ranks) -> None:
    ((times, digest),) = ranks(1).run(_save_often, tmp_path)
    assert times[0] == times[1] < times[2]
    assert CheckpointStore(tmp_path).iterations() == [1]
    assert ranks(1).run(_digest, tmp_path) == [digest]


def test_without_the_optimizer_a_checkpoint_loads_into_another_kind_of_optimizer(saved: Path, ranks) -> None:
    taken = ranks(1).run(runs.train, saved, (f"{TRAIN}.no_load_optim=true", *DISTRIBUTED), 4)[0]
    expected = ranks(1).run(runs.train, saved, (f"{TRAIN}.no_load_optim=true",), 4)[0]
    assert len(taken) == 2
    assert taken[0][0] == expected[0][0]


def test_a_checkpoint_without_random_states_or_before_the_first_step_resumes(tmp_path: Path, ranks) -> None:
    overrides = (*DISTRIBUTED, f"{TRAIN}.no_save_rng=true")
    ranks(1).run(_save_at_once, tmp_path, overrides)
    assert len(ranks(1).run(runs.train, tmp_path, overrides, 2)[0]) == 2
    ranks(1).run(_save_at_once, tmp_path / "plain", (f"{OPTIMIZER}.sgd_momentum=0.0", *SGD))
    assert len(ranks(1).run(runs.train, tmp_path / "plain", (*SGD, f"{OPTIMIZER}.sgd_momentum=0.0"), 2)[0]) == 2


def _save_at_once(folder: Path, overrides: tuple[str, ...]) -> None:
    with runs.started(folder, overrides) as wrap:
        wrap.save()
        wrap.save()
