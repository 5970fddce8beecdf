"""examples/distill: a teacher, two students, and a student that learns on its own completions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "distill"


@pytest.mark.documentation
def test_a_student_learns_from_its_teacher_and_from_its_own_completions(command, sample_data, tmp_path):
    data, train = "megatron_wrap.data.", "megatron_lm.train.common."
    overrides = (
        *(f"{data}{name}={sample_data / name}.jsonl" for name in ("train", "validation")),
        f"{data}tokenizer={sample_data / 'tokenizer'}",
        *(f"{train}{name}" for name in ("train_iters=3", "micro_batch_size=4", "global_batch_size=4", "eval_iters=1")),
    )
    words = ("train", "--on-policy", "--iterations", 2, "--output", tmp_path / "out", *overrides)
    environment = {"PYTHONPATH": f"{EXAMPLE}:{EXAMPLE.parents[1]}", "OMP_NUM_THREADS": "1"}
    ended = command(*words, environment=environment, timeout=480)
    assert ended.code == 0, ended.err
    result = re.findall(r"cross-entropy (\d+\.\d+), KL divergence from the teacher (\d+\.\d+)", ended.out + ended.err)
    assert len(result) == 2
    assert float(result[1][1]) < float(result[0][1])
    assert re.search(r"reverse KL divergence \d+\.\d+ before, \d+\.\d+ after", ended.out + ended.err)
    for name in ("teacher", "labels", "distilled", "on-policy"):
        assert (tmp_path / "out" / name / "model.safetensors").is_file()
