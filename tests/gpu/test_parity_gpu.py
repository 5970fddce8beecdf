"""`check-parity --platform cuda` on the available GPUs; skipped without a GPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from megatron_wrap.testing import check_parity

ROOT = Path(__file__).parents[2]
MOCK = ROOT / "configs/tiny-llama-mock.yaml"
SFT = ROOT / "tests/distributed/layouts.yaml"
LAYOUTS = ["mbs1", "padded", "dp2", "dp2-dopt", "tp2-sp", "pp2", "pp2-vpp2", "cp2"]


def samples() -> list[dict[str, list[int]]]:
    """Tokenized samples of unequal lengths, some tokens without loss."""
    generator = random.Random(3)
    lengths = [generator.randint(12, 48) for _ in range(16)]
    return [
        {
            "input_ids": [generator.randrange(500) for _ in range(length)],
            "loss_mask": [int(generator.random() < 0.6) for _ in range(length)],
        }
        for length in lengths
    ]


@pytest.mark.parametrize("flow", ["minimal_mock", "gpt_sft"])
@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=pytest.mark.gpus(2))])
def test_built_in_flows_agree(gpus, flow):
    """Layouts with more processes than GPUs are skipped with a note; the others agree in fp32."""
    config, flow_samples = (MOCK, None) if flow == "minimal_mock" else (SFT, samples())
    report = check_parity(config, layouts=LAYOUTS, samples=flow_samples, platform="cuda")
    assert report.agrees, report.table()
    for row in report.rows:
        if row.processes > torch.cuda.device_count():
            assert f"{row.processes} processes" in row.note, row.note
            assert row.note.endswith(str(torch.cuda.device_count())), row.note
        else:
            assert row.agrees is True, report.table()


def test_incorrect_flow_is_detected(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests/distributed")
    report = check_parity(
        SFT, flow="_flow_zoo:MeanOfMeans", layouts=["mbs1"], samples=samples(), steps=1, platform="cuda"
    )
    assert not report.agrees
    assert "mean of means" in report.rows[0].note, report.table()
