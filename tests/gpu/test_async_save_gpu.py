"""Asynchronous saves from a GPU: the copy is page-locked, and complete before the state changes; skipped on CPUs."""

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import numpy

from megatron_wrap.checkpoint.files.writer_process import HostCopy
from megatron_wrap.core import MegatronWrap

CONFIG = Path(__file__).parents[2] / "scripts/benchmark/overhead.yaml"
STEPS = 3


def test_the_copy_is_page_locked_and_complete():
    live = [torch.randn(1 << 24, device="cuda"), torch.randn(512, 1024, device="cuda").bfloat16().t()]
    before = [tensor.cpu() for tensor in live]
    copy = HostCopy(torch.device("cuda"), processes=1)
    copies = copy.take(live)
    for tensor in live:
        tensor.zero_()
    assert copy._memory is not None
    taken = [copied.tensor(copy._memory) for copied in copies]
    assert all(tensor.is_pinned() for tensor in taken)
    assert all(torch.equal(tensor, value) for tensor, value in zip(taken, before, strict=True))
    del taken
    copy.close()


def state(wrap):
    """Weights and optimizer states on the CPU."""
    tensors = [parameter for chunk in wrap.state.chunks for parameter in chunk.parameters()]
    for part in wrap.state.optimizer.chained_optimizers:
        tensors += [
            value
            for entry in part.optimizer.state.values()
            for _, value in sorted(entry.items())
            if isinstance(value, torch.Tensor)
        ]
    return [tensor.detach().cpu().clone() for tensor in tensors]


def saved_and_loaded(folder):
    """Whether each checkpoint contains the state of its own step."""
    overrides = [
        "megatron_wrap.checkpoint.async_save=true",
        f"megatron_lm.train.common.save={folder}/checkpoints",
        f"megatron_wrap.logger.output_dir={folder}",
    ]
    tokens = numpy.random.default_rng(3).integers(0, 4096, (64, 257))
    data = [{"input_ids": row.tolist(), "loss_mask": [1] * 257} for row in tokens]
    live, paths, same = [], [], []
    with MegatronWrap(CONFIG, overrides=overrides) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        for _ in range(STEPS):
            wrap.train(data[: wrap.global_batch_size])
            paths.append(wrap.save())
            live.append(state(wrap))
        for path, expected in zip(paths, live, strict=True):
            wrap.load(path)
            loaded = state(wrap)
            same.append(all(torch.equal(tensor, saved) for tensor, saved in zip(loaded, expected, strict=True)))
    return same


def test_each_save_contains_the_state_of_its_own_step(tmp_path, ranks):
    assert ranks(1).run(saved_and_loaded, tmp_path) == [[True] * STEPS]
