"""Lines of steps and evaluations on the console."""

import pytest

from megatron_wrap.utils.console_lines import MAX_LENGTH, ConsoleLines

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


ON_GPU = {"loss_scale": 65536.0, "params_norm": 1234.5, "num_zeros_in_grad": 17, "elapsed_time": 12.34}
ON_GPU |= {"tokens_per_second": 1_234_567.0, "tflops": 412.34, "memory_max": 71.26}
METRICS = "loss 5.1234 | accuracy 0.7500 | num_pairs 8 | grad_norm 1.02 | lr 3.0e-4"


@pytest.mark.parametrize(
    ("train_iters", "metrics", "line"),
    [
        (100, STEP, f"iteration 12/100 | {METRICS} | 512 ms | 12.3k tokens/s"),
        (None, {**STEP, **ON_GPU}, f"iteration 12 | {METRICS} | loss_scale 65536 | 12.3 s | 1.23M tokens/s"),
    ],
)
def test_the_line_of_a_step(train_iters, metrics, line):
    assert ConsoleLines(train_iters).step(metrics) == line


def test_an_evaluation_is_a_line_for_each_set():
    lines = ConsoleLines(100).evaluation(
        20, {"eval/a/loss": 4.5, "eval/a/perplexity": 90.017, "eval/b/loss": 1.0, "eval/b/rewards/margins": 0.25}
    )
    assert lines == [
        "iteration 20/100 | eval a | loss 4.5000 | perplexity 90.02",
        "iteration 20/100 | eval b | loss 1.0000 | rewards/margins 0.2500",
    ]


def test_zeros_appear_once_they_have_changed():
    lines = ConsoleLines()
    assert lines.step({"loss": 0.0, "own": 0.0}) == "loss 0.0000"
    assert lines.evaluation(1, {"eval/a/loss": 1.0, "eval/a/own": 0.0}) == ["iteration 1 | eval a | loss 1.0000"]
    assert lines.step({"loss": 0.0, "own": 2.0}) == "loss 0.0000 | own 2"
    assert lines.step({"loss": 0.0, "own": 0.0}) == "loss 0.0000 | own 0"


def test_counts_are_named_and_agree_in_number():
    line = ConsoleLines().step({"loss": 1.0, "skipped_iterations": 1, "skipped_samples": 1200})
    assert line == "loss 1.0000 | 1 iteration skipped | 1,200 samples left out"


def test_a_flow_s_patterns_select_and_order_its_metrics():
    metrics = {"iteration": 3, "loss": 1.0, "logps/a": 1.5, "rewards/b": 2.5, "rewards/c": 3.5, "grad_norm": 1.0}
    of_flow = ConsoleLines(of_flow=("rewards/*", "absent"))
    assert of_flow.step(metrics) == "iteration 3 | loss 1.0000 | rewards/b 2.500 | rewards/c 3.500 | grad_norm 1"
    metrics = {"eval/set/loss": 1.0, "eval/set/logps/a": 1.5, "eval/set/rewards/c": 3.5}
    assert of_flow.evaluation(3, metrics) == ["iteration 3 | eval set | loss 1.0000 | rewards/c 3.500"]


def test_a_line_that_is_too_long_omits_the_last_metrics():
    metrics = {**STEP, "tflops": 412.0, **{f"a_long_name_of_a_metric_{number}": 0.5 for number in range(3)}}
    line = ConsoleLines(100).step(metrics)
    assert len(line) <= MAX_LENGTH
    assert line == ConsoleLines(100).step(STEP)  # its two metrics come first
    assert "TFLOP" not in line
    assert line.endswith("12.3k tokens/s")


def test_chosen_metrics_replace_the_default_ones():
    lines = ConsoleLines(100, chosen=("tokens*", "own", "consumed_samples", "loss"))
    assert lines.step({**STEP, "own": 0.0}) == (
        "iteration 12/100 | 12.3k tokens/s | tokens_per_second_per_device 6173 | own 0 | consumed_samples 96 | "
        "loss 5.1234"
    )
    assert lines.evaluation(12, {"eval/set/loss": 1.0, "eval/set/own": 2.0, "eval/set/other": 1.0}) == [
        "iteration 12/100 | eval set | own 2 | loss 1.0000"
    ]
    assert ConsoleLines(chosen=("own",)).evaluation(1, {"eval/set/loss": 1.0}) == [
        "iteration 1 | eval set | loss 1.0000"
    ]


def test_a_pattern_without_metric_is_a_warning_with_the_closest_name():
    (warning,) = ConsoleLines(chosen=("perplexity", "grad_nrom", "loss")).unmatched(STEP)
    assert "grad_nrom" in warning
    assert "did you mean grad_norm?" in warning


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        ({"loss": float("nan"), "own": float("inf"), "grad_norm": float("nan")}, "loss nan | own inf | grad_norm nan"),
        ({"loss": 1.5e-7, "own": -2.0}, "loss 1.5000e-7 | own -2"),
        ({"loss": 2.5e6, "own": -123456.0}, "loss 2.5000e6 | own -1.235e5"),
        ({"loss": 0.0, "learning_rate": 0.0}, "loss 0.0000 | lr 0"),
        ({"learning_rate": 9.96e-6}, "lr 1.0e-5"),
        ({"elapsed_time": 0.00512, "tokens_per_second": 999.7}, "5.12 ms | 1.00k tokens/s"),
        ({"elapsed_time": 0.9996, "tokens_per_second": 99.96}, "1.00 s | 100 tokens/s"),
        ({"grad_norm": 9.999, "own": 3.25}, "own 3.250 | grad_norm 10.0"),
        ({}, ""),
    ],
)
def test_extreme_values_are_readable(metrics, line):
    assert ConsoleLines().step(metrics) == line
