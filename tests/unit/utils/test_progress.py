import fcntl
import os
import re
import struct
import subprocess
import sys
import termios

import pytest

from megatron_wrap.utils.progress import ProgressBar, format_step

STEP = {
    "iteration": 12,
    "loss": 5.12341,
    "accuracy": 0.75,
    "num_pairs": 8,
    "grad_norm": 1.0249,
    "learning_rate": 3e-4,
    "loss_scale": 1.0,
    "consumed_samples": 96,
    "consumed_tokens": 12288,
    "skipped_iterations": 0,
    "elapsed_time": 0.512,
    "tokens_per_second": 12345.6,
    "tokens_per_second_per_device": 6172.8,
    "tflops": 0.004,
    "throughput": 0.004,
    "memory_allocated": 0.0,
    "memory_reserved": 0.0,
    "memory_max": 0.0,
}


def test_console_line_of_a_step_on_cpu():
    assert format_step(STEP, train_iters=100) == (
        "iteration 12/100 | loss 5.1234 | accuracy 0.7500 | num_pairs 8 | grad_norm 1.02 | lr 3.0e-4 | 512 ms | "
        "12.3k tokens/s | skipped 0"
    )


def test_console_line_of_a_step_in_fp16_on_gpu():
    metrics = {
        **STEP,
        "loss_scale": 65536.0,
        "params_norm": 1234.5,
        "num_zeros_in_grad": 17,
        "elapsed_time": 12.34,
        "tokens_per_second": 1_234_567.0,
        "tflops": 412.34,
        "memory_max": 71.26,
        "skipped_iterations": 3,
    }
    assert format_step(metrics) == (
        "iteration 12 | loss 5.1234 | accuracy 0.7500 | num_pairs 8 | grad_norm 1.02 | params_norm 1234 | "
        "num_zeros_in_grad 17 | lr 3.0e-4 | loss_scale 65536 | 12.3 s | 1.23M tokens/s | 412 TFLOP/s per device | "
        "71.3 GiB | skipped 3"
    )


def test_console_line_of_an_evaluation():
    line = format_step({"iteration": 20, "eval/validation/loss": 4.5, "eval/validation/num_tokens": 4096}, 100)
    assert line == "iteration 20/100 | eval/validation/loss 4.5000 | eval/validation/num_tokens 4096"


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        ({"loss": float("nan"), "own": float("inf"), "grad_norm": float("nan")}, "loss nan | own inf | grad_norm nan"),
        ({"loss": 1.5e-7, "own": 0.0}, "loss 1.5000e-7 | own 0"),
        ({"loss": 2.5e6, "own": -123456.0}, "loss 2.5000e6 | own -1.235e5"),
        ({"loss": 0.0, "learning_rate": 0.0}, "loss 0.0000 | lr 0"),
        ({"learning_rate": 9.96e-6}, "lr 1.0e-5"),
        ({"elapsed_time": 0.00512, "tokens_per_second": 999.7}, "5.12 ms | 1.00k tokens/s"),
        ({"elapsed_time": 0.9996, "tokens_per_second": 99.96}, "1.00 s | 100 tokens/s"),
        ({"grad_norm": 9.999, "own": 3}, "own 3 | grad_norm 10.0"),
        ({}, ""),
    ],
)
def test_extreme_values_are_readable(metrics, line):
    assert format_step(metrics) == line


def test_bar_is_disabled_in_a_pipe_and_on_other_ranks(capsys, monkeypatch):
    with ProgressBar(10) as bar:
        bar.update(3, {"loss": 1.0})
        assert not bar.enabled
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert not ProgressBar(10).enabled


def render(text):
    """Terminal output: applies carriage returns and removes escape sequences."""
    screen = []
    for line in re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).replace("\r\n", "\n").split("\n"):
        shown = []
        for piece in line.split("\r"):
            shown[: len(piece)] = piece
        screen.append("".join(shown).rstrip())
    return screen


def test_log_lines_appear_above_the_bar_on_a_terminal():
    code = (
        "from megatron_wrap.utils.dist_logger import logger\n"
        "from megatron_wrap.utils.session import logger_session\n"
        "from megatron_wrap.utils.progress import ProgressBar\n"
        "with logger_session(), ProgressBar(6, initial=2) as bar:\n"
        "    for iteration in range(3, 7):\n"
        "        bar.update(iteration, {'loss': 0.5})\n"
        "        logger.info_rank_0(f'line {iteration}')\n"
    )
    terminal, process_end = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "CONSOLE_LOG_LEVEL")}
    done = subprocess.run([sys.executable, "-c", code], stderr=process_end, env=environment, timeout=60, check=False)
    os.close(process_end)
    output = b""
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # Linux: the other end is closed and everything has been read
            break
        if not chunk:
            break
        output += chunk
    os.close(terminal)
    assert done.returncode == 0
    lines = [line for line in render(output.decode()) if line]
    assert [re.sub(r"^\S+ \S+ ", "", line) for line in lines[:4]] == [f"INFO    line {i}" for i in range(3, 7)]
    assert len(lines) == 5
    assert re.search(r"100%\|.*\| 6/6 \[\d\d:\d\d<\d\d:\d\d, .*step.*, loss 0.5000\]", lines[4])
