"""`megatron-wrap precompute`, and a run that reads what it stored."""

import json
import random
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.matrix
def test_training_reads_what_the_command_stored(command, tmp_path):
    generator = random.Random(3)
    for name, count in (("train", 6), ("validation", 3)):
        pairs = [
            {key: [generator.randrange(4096) for _ in range(9)] for key in ("prompt_ids", "chosen_ids", "rejected_ids")}
            for _ in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    common = "megatron_lm.train.common"
    arguments = [
        str(ROOT / "configs" / "tiny-llama-dpo.yaml"),
        *(f"{common}.{key}" for key in ("train_iters=2", "global_batch_size=2", "micro_batch_size=1", "save=null")),
        *(f"megatron_wrap.data.{key}" for key in ("train=train.jsonl", "validation=validation.jsonl")),
        *("megatron_lm.model.arch.vocab_size=4096", "megatron_lm.model.parallel.tensor_model_parallel_size=1"),
        "megatron_wrap.data.tokenizer=null",
        *("megatron_lm.model.parallel.sequence_parallel=false", "megatron_wrap.init.platform=cpu"),
        *("megatron_wrap.logger.output_dir=run", "megatron_wrap.models.reference={precomputed: outputs}"),
    ]

    def run(name: str) -> str:
        done = command("megatron_wrap.cli.main", name, *arguments)
        return f"{done.code}\n{done.out}{done.err}"

    assert "no precomputed outputs" in run("train")
    stored = run("precompute")
    assert stored.startswith("0\n"), stored
    assert "outputs of 9 samples: outputs" in stored
    trained = run("train")
    assert trained.startswith("0\n"), trained
    assert re.search(r"eval validation .*rewards/margins", trained)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in metrics if "rewards/margins" in line]
    assert steps[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)  # the policy is the reference
    assert len(steps) == 2
