"""The number of optimizer steps of a run whose length is set in epochs."""

from __future__ import annotations

from megatron_wrap.data.order.batching import BatchPlan, BatchRule, Cursor
from megatron_wrap.data.order.sample_reader import SampleReader
from megatron_wrap.utils.progress import WorkProgress


def steps_of_epochs(epochs: float, samples_per_epoch: int, rule: BatchRule, reader: SampleReader) -> int:
    """Steps until the run has consumed `epochs` of its data; the last one may extend into the next epoch.

    With batches of a fixed number of samples, only the number of samples is needed; rows that will be left out do not
    change it, because others replace them. For batches of tokens the samples' lengths are read, which takes seconds
    with a tokenized cache.

    Args:
        epochs: above 0.
        samples_per_epoch: of the training set.
        rule: how samples form batches.
        reader: of the training set.

    Raises:
        DataError: a row cannot be used.
    """
    num_samples = max(1, round(epochs * samples_per_epoch))
    steps = done = 0
    if rule.budget is None:
        while done < num_samples:
            done += rule.samples_at(done)
            steps += 1
        return steps
    plan = BatchPlan(reader, rule, Cursor())
    with WorkProgress("lengths of the samples", num_samples, "sample") as progress:
        while done < num_samples:
            planned = plan.next()
            reader.forget(planned.positions)
            count = len(planned.positions) + len(planned.bad_rows)
            progress.advance(min(count, num_samples - done))
            done += count
            steps += 1
    return steps
