"""Loading on one process: runs given in epochs, the tokenized cache, rows that are left out, batches that are edited,
and workers that end with the run."""

import json
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _runs
import numpy
import pytest
import torch

from megatron_wrap.core import MegatronWrap
from megatron_wrap.data.order.workers import Workers
from megatron_wrap.engine.batches import loader
from megatron_wrap.errors import ConfigError, DataError, MegatronWrapError, TrainingError
from megatron_wrap.flow import LossOutput, MegatronWrapFlowEntry, MegatronWrapGPTModelSFTFlow

pytestmark = pytest.mark.process_group

TRAIN, DATA, RATE = "megatron_lm.train.common", "megatron_wrap.data", "megatron_lm.train.learning-rate"
EPOCHS = (f"{TRAIN}.train_iters=null", f"{TRAIN}.train_epochs=1.5")
BUDGET = (f"{TRAIN}.global_batch_tokens=64", "megatron_wrap.flow.packing=true", f"{DATA}.packing_window=8")


def write(count: int = 22, name: str = "train.jsonl", longest: int = 17) -> None:
    generator = numpy.random.default_rng(3)
    drawn = [generator.integers(0, 60, int(generator.integers(4, longest))).tolist() for _ in range(count)]
    _runs.write_rows(
        name, [{"input_ids": [index, *ids], "loss_mask": [1] * (1 + len(ids))} for index, ids in enumerate(drawn)]
    )


def started(*overrides: str) -> Any:
    return _runs.started(f"{DATA}.__select__=dataset", f"{DATA}.train=train.jsonl", *overrides)


def losses(*overrides: str) -> list[float]:
    with started(*overrides) as wrap:
        return [wrap.train(batch)["loss"] for batch in wrap.batches()]


# ---- ids outside the vocabulary ----


class IdsFlow(MegatronWrapGPTModelSFTFlow):
    """A flow of a user: it knows the tokens of a sample when it collates it."""

    token_id_fields = (*MegatronWrapGPTModelSFTFlow.token_id_fields, "targets")

    def prepare_sample(self, sample: Any) -> Any:
        return sample

    def collate_data_micro_batch(self, iterator: Iterator[Any]) -> Any:
        samples = [next(iterator) for _ in range(self.micro_batch_size)]
        inputs, loss_inputs = super().collate_data_micro_batch(iter(samples))
        targets = torch.full_like(loss_inputs["labels"], 1)
        for row, sample in enumerate(samples):
            targets[row, -1] = sample["target"]
        return inputs, {**loss_inputs, "targets": targets}

    def get_fields_and_seqdims(self) -> dict[str, int]:
        return {**super().get_fields_and_seqdims(), "targets": 1}


@pytest.mark.parametrize(
    ("flow", "key"), [("gpt_sft", "input_ids"), ("ids_of_a_user", "input_ids"), ("ids_of_a_user", "target")]
)
def test_the_row_with_an_id_outside_the_vocabulary_is_named(flow, key):
    """In training, in an evaluation of files and, by its index, among samples that the caller passes."""
    MegatronWrapFlowEntry.register("ids_of_a_user")(IdsFlow)
    good = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "target": 5}
    bad = {**good, key: [1, 2, 60] if key == "input_ids" else 60}
    for name, rows in (("train", [good] * 11 + [bad]), ("other", [good] * 6 + [bad])):
        _runs.write_rows(f"{name}.jsonl", rows)
    select = (f"megatron_wrap.flow.flow_key={flow}", f"{DATA}.shuffle=false", f"{DATA}.validation=other.jsonl")
    with started(*select) as wrap:
        with pytest.raises(DataError, match=r"^train\.jsonl:12: .* token id 60, .* 0 to 59"):
            [wrap.train(batch) for batch in wrap.batches()]
        with pytest.raises(DataError, match=r"^other\.jsonl:7: .* token id 60"):
            wrap.evaluate()
        for call in (wrap.train, lambda samples: wrap.evaluate({"a": samples}), wrap.forward):
            with pytest.raises(DataError, match=r"^sample 2 of a batch of 4: .* token id 60"):
                call([good, good, bad, good])


# ---- epochs ----


def test_a_run_in_epochs_equals_one_of_as_many_steps():
    write(22)  # 1.5 epochs are 33 samples, 9 batches of 4
    schedule = (f"{RATE}.lr_warmup_fraction=0.5", f"{RATE}.lr_decay_style=cosine")
    with started(*EPOCHS, *schedule) as wrap:
        rates, taken = [], []
        for batch in wrap.batches():
            taken.append(wrap.train(batch)["loss"])
            rates.append(wrap.state.lr_scheduler.get_lr({}))
        assert wrap.train_iters == wrap.config.train.train_iters == 9
        assert wrap.requested_config.train.train_iters is None
    assert taken == losses(f"{TRAIN}.train_iters=9", *schedule)
    assert rates[-1] == pytest.approx(1e-3)  # min_lr, at the end


def test_epochs_of_a_token_budget_follow_from_the_lengths(monkeypatch, capfd):
    write(22)
    monkeypatch.setattr("megatron_wrap.utils.progress._SECONDS_BETWEEN_LINES", 0.0)
    with started(*EPOCHS, *BUDGET) as wrap:
        steps = wrap.train_iters
        sizes = [len(batch) for batch in wrap.batches() if wrap.train(batch)]
        assert len(sizes) == steps
        assert sum(sizes[:-1]) < 33 <= sum(sizes)
        assert len(set(sizes)) > 1
    assert "lengths of the samples: 33 of 33 samples, 00:00 left" in capfd.readouterr().err


def test_a_token_budget_without_a_limit_of_a_micro_batch_counts_padded_ones():
    write(22)
    with started(f"{TRAIN}.global_batch_tokens=64", f"{TRAIN}.train_iters=6") as wrap:
        sizes = [len(batch) for batch in wrap.batches() if wrap.train(batch)]
    assert min(sizes) >= 4  # two micro-batches of 2 * 16 tokens
    assert max(sizes) > 4


def test_the_warm_up_is_compared_with_the_counted_steps():
    write(8)
    wrap = MegatronWrap(
        "run.yaml",
        overrides=[*EPOCHS, f"{RATE}.lr_warmup_iters=3", f"{DATA}.__select__=dataset", f"{DATA}.train=train.jsonl"],
    )
    with pytest.raises(MegatronWrapError, match="setup_model_and_optimizer"):
        _ = wrap.train_iters
    wrap.initialize()
    with pytest.raises(ConfigError, match=r"warm-up of 3 iterations .* decay of 3"):
        wrap.setup_model_and_optimizer()
    wrap.close()


# ---- the tokenized cache ----


@pytest.mark.parametrize(
    "budget", [pytest.param((), id="samples", marks=pytest.mark.matrix), pytest.param(BUDGET, id="budget")]
)
def test_a_cached_run_prepares_each_sample_once_and_has_the_same_bits(budget: tuple[str, ...]):
    calls: list[int] = []

    @MegatronWrapFlowEntry.register("counting")
    class Counting(MegatronWrapGPTModelSFTFlow):
        def prepare_sample(self, sample: Any) -> Any:
            calls.append(sample["input_ids"][0])
            return super().prepare_sample(sample)

    write(22)
    keys = (*EPOCHS, *budget, "megatron_wrap.flow.flow_key=counting")
    plain = losses(*keys)
    cached = (f"{DATA}.cache_dir=cache", *keys)
    calls.clear()
    assert losses(*cached) == plain
    assert sorted(set(calls)) == list(range(22))
    first = len(calls)  # with the trial of the flow
    calls.clear()
    assert losses(*cached) == plain
    assert len(calls) == first - 22
    Path("train.jsonl").write_text(Path("train.jsonl").read_text() + "\n")
    calls.clear()
    losses(*cached)
    assert len(calls) == first
    assert len([path for path in Path("cache").iterdir() if path.is_dir()]) == 2


def test_a_cached_mixture_has_the_bits_of_one_without_a_cache():
    write(22)
    write(9, "more.jsonl")
    mixture = f"{DATA}.train=[{{path: train.jsonl}}, {{path: more.jsonl, epochs: 2, sample_weight: 0.5}}]"
    plain = losses(*EPOCHS, *BUDGET, mixture)
    assert losses(*EPOCHS, *BUDGET, mixture, f"{DATA}.cache_dir=cache") == plain
    assert len([path for path in Path("cache").iterdir() if path.is_dir()]) == 2


# ---- rows that are left out ----


def test_rows_that_are_left_out_are_counted_and_the_first_five_logged(capfd: Any):
    write(22)
    lines = Path("train.jsonl").read_text().splitlines()
    for row in (2, 3, 5, 8, 13, 21):
        lines[row] = lines[row][:-1]
    Path("train.jsonl").write_text("\n".join(lines) + "\n")
    with started(f"{DATA}.on_bad_sample=skip", f"{TRAIN}.train_iters=4", f"{DATA}.num_workers=2") as wrap:
        counts = [wrap.train(batch)["skipped_samples"] for batch in wrap.batches()]
    assert counts[-1] >= 4
    assert counts == sorted(counts)
    with started(f"{DATA}.on_bad_sample=skip", f"{TRAIN}.train_iters=8", f"{DATA}.shuffle=false") as wrap:
        taken = [sample["input_ids"][0] for batch in wrap.batches() if wrap.train(batch) for sample in batch]
    assert taken[:16] == [row for row in range(22) if row not in (2, 3, 5, 8, 13, 21)]
    shown = [text for text in capfd.readouterr().err.splitlines() if "left out" in text and "train.jsonl:" in text]
    assert len(shown) == min(5, int(counts[-1])) + 5


def test_samples_longer_than_their_source_allows_are_left_out():
    write(22)
    source = f"{DATA}.train={{path: train.jsonl, max_length: 10}}"
    with started(source, f"{TRAIN}.train_iters=3") as wrap:
        batches = [batch for batch in wrap.batches() if wrap.train(batch)]
        assert max(len(sample["input_ids"]) for batch in batches for sample in batch) <= 11
        assert wrap.state.progress.skipped_samples > 0


# ---- the user's hands on a batch ----


def test_an_edited_batch_is_prepared_again():
    write(22)
    with started(f"{TRAIN}.train_iters=1", f"{DATA}.num_workers=1") as wrap:
        batch = next(wrap.batches())
        for sample in batch:
            sample["loss_mask"] = [0] * len(sample["loss_mask"])
        assert wrap.train(batch)["skipped_iterations"] == 1


def test_the_next_batch_is_received_while_the_host_waits_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    write(22)
    received: list[float] = []
    monkeypatch.setattr(loader, "_LONGEST_DELAY", 60.0)
    following = Workers.next
    monkeypatch.setattr(Workers, "next", lambda workers: (received.append(time.monotonic()), following(workers))[1])
    with started(f"{DATA}.num_workers=1") as wrap:
        batches = wrap.batches()
        batch = next(batches)
        time.sleep(0.1)
        assert len(received) == 1
        wrap.train(batch)
        ended = time.monotonic()
        while len(received) < 2:
            assert time.monotonic() < ended + 20
            time.sleep(0.01)
        next(batches)
        time.sleep(0.1)
        assert len(received) == 2
    assert time.monotonic() < ended + 20  # the end does not wait for the thread


def test_ten_batches_in_a_row_without_a_trained_token_are_one_error():
    write(22)
    with started(f"{TRAIN}.train_iters=30") as wrap:
        batch = next(wrap.batches())
        untrained = [{**sample, "loss_mask": [0] * len(sample["loss_mask"])} for sample in batch]
        for samples in [*[untrained] * 9, batch, *[untrained] * 9]:
            wrap.train(samples)
        weights = [parameter.clone() for chunk in wrap.state.chunks for parameter in chunk.parameters()]
        for _ in range(2):
            with pytest.raises(TrainingError, match="no token of iteration 20 is trained"):
                wrap.train(untrained)
            assert wrap.iteration == 19
        after = [parameter for chunk in wrap.state.chunks for parameter in chunk.parameters()]
        assert all(map(torch.equal, weights, after))
        assert math.isfinite(wrap.train(batch)["loss"])


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.matrix), 1])
def test_the_error_of_a_non_finite_loss_names_file_and_row(workers: int):
    @MegatronWrapFlowEntry.register(f"overflowing{workers}")
    class Overflowing(MegatronWrapGPTModelSFTFlow):
        """The row that ends with 59, 59, 59 has an infinite loss."""

        def calculate_loss(self, loss_inputs: Any, model_forward_output: torch.Tensor) -> LossOutput:
            bad = (loss_inputs["labels"] == 59).sum(dim=1).amax() >= 3
            loss = super().calculate_loss(loss_inputs, model_forward_output).loss_sum
            return LossOutput(loss * float("inf") if bad else loss)

    write(22)
    lines = Path("train.jsonl").read_text().splitlines()
    lines[13] = json.dumps({"input_ids": [1, 2, 59, 59, 59], "loss_mask": [1] * 5})
    Path("train.jsonl").write_text("\n".join(lines) + "\n")
    keys = (f"{DATA}.num_workers={workers}", f"megatron_wrap.flow.flow_key=overflowing{workers}")
    with (
        started(f"{TRAIN}.train_iters=6", *keys) as wrap,
        pytest.raises(TrainingError, match=r"sample \d of a batch of 4 \(train\.jsonl:14\), .* is the loss"),
    ):
        [wrap.train(batch) for batch in wrap.batches()]


def test_the_first_batch_without_a_trained_token_can_be_refused():
    write(22)
    with started("megatron_wrap.bad_steps.max_without_loss=1") as wrap:
        batch = next(wrap.batches())
        with pytest.raises(TrainingError, match=r"no token of iteration 1 is trained: all loss weights of its batch"):
            wrap.train([{**sample, "loss_mask": [0] * len(sample["loss_mask"])} for sample in batch])


def test_the_losses_that_spikes_are_compared_with_are_resumed():
    write(22)
    keys = (f"{TRAIN}.train_iters=14", f"{TRAIN}.save=saved", "megatron_wrap.bad_steps.spike_threshold=50")
    with started(*keys, "megatron_wrap.bad_steps.spike_window=10") as wrap:
        taken = [wrap.train(batch)["loss"] for batch in wrap.batches()]
        wrap.save()
    with started(*keys, "megatron_wrap.bad_steps.spike_window=10") as wrap:
        assert wrap.state.progress.recent_losses == taken[4:]


def test_batches_continue_after_steps_on_samples_of_the_caller():
    """As before workers: the order of samples is a function of the number of samples consumed."""
    write(22)
    with started(f"{TRAIN}.train_iters=6", f"{DATA}.num_workers=1") as wrap:
        straight = [[sample["input_ids"][0] for sample in batch] for batch in wrap.batches() if wrap.train(batch)]
    with started(f"{TRAIN}.train_iters=6", f"{DATA}.num_workers=1") as wrap:
        batches = wrap.batches()
        first = next(batches)
        wrap.train(first)
        wrap.train([first[0]] * 4)
        assert [sample["input_ids"][0] for sample in next(batches)] == straight[2]
        assert [sample["input_ids"][0] for sample in next(wrap.batches())] == straight[2]


# ---- workers and the run ----


def test_workers_end_with_the_run_and_their_death_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    write(22)
    process_ids: list[int] = []

    class Recorded(Workers):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            process_ids[:] = [worker.process.pid for worker in self._workers]

    monkeypatch.setattr(loader, "Workers", Recorded)
    with started(f"{DATA}.num_workers=2") as wrap:
        batches = wrap.batches()
        wrap.train(next(batches))
        begun = time.monotonic()
    assert time.monotonic() - begun < 10
    assert len(process_ids) == 2
    for process_id in process_ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)
    with started(f"{DATA}.num_workers=1") as wrap:
        batches = wrap.batches()
        wrap.train(next(batches))
        os.kill(process_ids[0], signal.SIGKILL)
        with pytest.raises(TrainingError, match=r"worker process \d+ .*SIGKILL"):
            [wrap.train(batch) for batch in batches]


def test_a_flow_s_own_error_keeps_its_type():
    @MegatronWrapFlowEntry.register("refusing")
    class Refusing(MegatronWrapGPTModelSFTFlow):
        def prepare_sample(self, sample: Any) -> Any:
            if sample["input_ids"][0] == 9:
                raise DataError("no nine")
            return super().prepare_sample(sample)

    write(22)
    with (
        started(f"{DATA}.num_workers=1", "megatron_wrap.flow.flow_key=refusing") as wrap,
        pytest.raises(DataError, match=r"^train\.jsonl:10: no nine$"),
    ):
        [wrap.train(batch) for batch in wrap.batches()]
