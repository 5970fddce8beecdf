"""Between the steps of a run: records, the save at each `save_interval`, the rollback of a bad step, the end on
request."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from megatron_wrap.checkpoint.run_checkpoints import RunCheckpoints
from megatron_wrap.config.schema import derived
from megatron_wrap.core.records import RunRecords
from megatron_wrap.core.run import Run
from megatron_wrap.engine.bad_steps import BadStep
from megatron_wrap.engine.passes.parameters import refuse_differing_copies
from megatron_wrap.engine.state.state import StepReport, TrainingState
from megatron_wrap.errors import CheckpointError, TrainingError
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.parallel.collectives import gather_objects
from megatron_wrap.parallel.watch.stop_requests import RunStopped, StopRequests
from megatron_wrap.utils.dist_logger import logger


def refuse_further_steps(state: TrainingState) -> None:
    """Raise a TrainingError if all steps of the run are taken."""
    iteration, train_iters = state.progress.iteration, derived.train_iters(state.config)
    if iteration >= train_iters:
        raise TrainingError(
            f"iteration {iteration} of megatron_lm.train.common.train_iters {train_iters} is done; write the loop "
            "as `while wrap.iteration < wrap.train_iters`, or raise train_iters"
        )


def after_step(run: Run, report: StepReport, save: Callable[[], Path]) -> dict[str, float]:
    """Record a step, save at each `save_interval`, and end the run if that is requested; returns the step's metrics.
    Collective.

    Args:
        save: saves a checkpoint of the run.
    """
    state, train, iteration = run.state, run.state.config.train, run.state.progress.iteration
    interval = train.check_weight_hash_across_dp_replicas_interval
    if interval and iteration % interval == 0:
        refuse_differing_copies(state.chunks, state.config, state.parallel, iteration)
    if state.reference is not None:
        state.reference.follow(state.chunks, iteration)
    run.records.step_taken(report)
    run.checkpoints.poll()
    if train.save_interval and train.save and iteration % train.save_interval == 0:
        # metrics first: a run killed in between repeats the step, and the duplicate line is dropped
        run.records.write_last()
        run.checkpoints.tolerate(save)
    if report.stop_requested and run.stop is not None:
        _end_on_request(run, run.stop, save)
    return dict(report.metrics)


def _end_on_request(run: Run, stop: StopRequests, save: Callable[[], Path]) -> NoReturn:
    """Save, and end the program."""
    reason = next(reason for reason in gather_objects(stop.reason) if reason is not None)
    run.records.write_last()
    if run.state.config.train.save:
        save()
        run.checkpoints.wait()
    stop.fulfilled(reason.exit_code)
    if run.state.parallel.world.rank == 0:
        print(run.checkpoints.ended(reason.text), file=sys.stderr, flush=True)  # noqa: T201
    gather_objects(None)  # a process that ends earlier lets torchrun's agent end the others
    raise RunStopped(reason.exit_code)


def roll_back(bad: BadStep, state: TrainingState, records: RunRecords, checkpoints: RunCheckpoints) -> dict[str, float]:
    """Go back to the newest checkpoint, and leave out the samples of the bad step from then on; returns its metrics.
    Collective.

    Raises:
        TrainingError: the run cannot be rolled back, or was rolled back `max_rollbacks` times.
    """
    before, most = state.progress, state.config.bad_steps.max_rollbacks
    if before.rollbacks >= most:
        raise TrainingError(
            f"{bad}; nothing was updated; the run was rolled back {before.rollbacks} times "
            "(megatron_wrap.bad_steps.max_rollbacks); lower the learning rate, or inspect the batches"
        ) from bad
    if not bad.positions:
        raise TrainingError(
            f"{bad}; nothing was updated; its samples are not of wrap.batches, so a rollback cannot leave them "
            "out; train on wrap.batches(samples), or set megatron_wrap.bad_steps.on_bad_step to skip or stop"
        ) from bad
    try:
        checkpoints.roll_back()
    except CheckpointError as error:
        raise TrainingError(f"{bad}; nothing was updated; {error}") from bad
    state.offered = state.open_step = None
    state.steps_without_weight = 0
    state.progress.rollbacks, state.progress.bad_steps = before.rollbacks + 1, before.bad_steps + 1
    state.progress.left_out = sorted({*before.left_out, *bad.positions})
    records.rewind(state.progress.iteration)
    logger.warning_rank_0(
        f"{bad}; the run goes back to iteration {state.progress.iteration} and leaves out "
        f"{counted(len(bad.positions), 'sample')} (rollback {state.progress.rollbacks} of at most {most})"
    )
    return {"iteration": state.progress.iteration, **bad.metrics, "bad_steps": state.progress.bad_steps}
