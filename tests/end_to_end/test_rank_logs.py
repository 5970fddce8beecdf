"""The logs of all ranks of `megatron-wrap train`, and the end of a run whose rank 1 fails first."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, sys
from megatron_wrap.core import MegatronWrap, exit_on_user_error

with exit_on_user_error(), MegatronWrap(sys.argv[1], overrides=sys.argv[2:]) as wrap:
    wrap.initialize()
    print("rank", os.environ["RANK"], "is here")
    if os.environ["RANK"] == "1":
        os.write(2, b"written by C\\n")
        raise RuntimeError("of rank 1 alone")
    wrap.setup_model_and_optimizer()
    wrap.fit()
"""


def test_the_last_lines_of_the_rank_that_failed_precede_its_name(command, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ("--script", "script.py", "--nproc-per-node", "2", "megatron_wrap.logger.output_dir=out")
    ended = command("megatron_wrap.cli.main", "train", ROOT / "tests/unit/small_run.yaml", *options)
    assert ended.code == 1, ended.err
    assert ended.out == "rank 0 is here\n"
    console, _, lines = ended.err.partition("last lines of rank 1 (out/logs/rank_1.log):\n")
    assert "of rank 1 alone" not in console
    *shown, last = lines.splitlines()
    assert shown[:2] == ["rank 1 is here", "written by C"]
    assert shown[-1].endswith("RuntimeError: of rank 1 alone")
    assert re.match(r"error: rank 1 \(process \d+ on .*\) ended with exit code 1; ", last)
    assert last.endswith("; out/logs has the messages of each rank")
    logs = {path.name: path.read_text() for path in (tmp_path / "out/logs").iterdir()}
    assert logs.keys() == {"rank_0.log", "rank_1.log"}
    assert "rank 0 is here" in logs["rank_0.log"]
    assert logs["rank_1.log"].splitlines()[1:] == shown
