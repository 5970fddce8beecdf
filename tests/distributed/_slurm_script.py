"""A training script that records its steps; in a job's first attempt it waits after iteration 4 for a file `go`."""

import os
import sys
import time
from pathlib import Path

import _ray_runs as runs

from megatron_wrap.core import MegatronWrap, exit_on_user_error


def wait(wrap: MegatronWrap) -> None:
    """Until the test has sent its signal."""
    first = os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
    while first and wrap.iteration == 4 and not (folder / "go").exists():
        time.sleep(0.05)


with exit_on_user_error(), MegatronWrap(sys.argv[1], overrides=sys.argv[2:]) as wrap:
    folder = Path(wrap.config.logger.output_dir or "")
    wrap.initialize()
    wrap.setup_model_and_optimizer()
    runs.train(wrap, folder / "journal", wait)
