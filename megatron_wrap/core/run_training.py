"""The steps of a run: each in one call or in parts, followed by its record and the save at each `save_interval`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_wrap.checkpoint.run_checkpoints import RunCheckpoints
from megatron_wrap.config.schema import derived
from megatron_wrap.core.step_reporting import RunRecords
from megatron_wrap.engine import step
from megatron_wrap.engine.bad_steps import BadStep, refuse_untrained_run
from megatron_wrap.engine.passes.parameters import refuse_differing_copies
from megatron_wrap.engine.state.state import StepReport, StepWeights, TrainingState
from megatron_wrap.errors import CheckpointError, TrainingError
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.parallel.collectives import gather_objects
from megatron_wrap.parallel.watch.stop_requests import RunStopped, StopRequests
from megatron_wrap.utils.dist_logger import logger


class RunTraining:
    """Takes steps; `MegatronWrap` has the same methods.

    Args:
        state: training state of the run, with an optimizer.
        records: records of the run, which receive each step.
        checkpoints: checkpoints of the run.
        save: saves a checkpoint.
    """

    def __init__(
        self, state: TrainingState, records: RunRecords, checkpoints: RunCheckpoints, save: Callable[[], Path]
    ) -> None:
        self._state, self._records, self._checkpoints, self._save = state, records, checkpoints, save
        self._stop: StopRequests | None = None

    def stop_on(self, requests: StopRequests) -> None:
        """End the run after the step in which any process has received a request to stop."""
        self._stop, self._state.stop_requested = requests, requests.pending

    def train(self, batch: Sequence[Any] | None) -> dict[str, float]:
        """Take one step."""
        self._refuse_further_steps()
        return self._finished(lambda: step.train_step(self._state, batch))

    def count_weights(self, batches: Sequence[Sequence[Any]] | None) -> StepWeights:
        """Loss weights and statistics of a step that is passed in parts."""
        self._refuse_further_steps()
        return step.count_weights(self._state, batches)

    def forward_backward(self, batch: Sequence[Any] | None, step_weights: StepWeights) -> None:
        """Compute the gradients of a part."""
        self._refuse_further_steps()
        step.forward_backward(self._state, batch, step_weights)

    def optimizer_step(self) -> dict[str, float]:
        """Update the weights from the gradients of all parts."""
        return self._finished(lambda: step.optimizer_step(self._state))

    def refuse_if_untrained(self) -> None:
        """Raise a TrainingError if no step of the run has trained a token."""
        refuse_untrained_run(self._state.progress, self._state.steps_without_weight)

    def _finished(self, take: Callable[[], StepReport]) -> dict[str, float]:
        try:
            report = take()
        except BadStep as bad:
            return self._rolled_back(bad)
        return self._finish(report)

    def _rolled_back(self, bad: BadStep) -> dict[str, float]:
        """Go back to the newest checkpoint, and leave out the samples of the bad step from then on. Collective."""
        state, before = self._state, self._state.progress
        most = state.config.bad_steps.max_rollbacks
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
            self._checkpoints.roll_back()
        except CheckpointError as error:
            raise TrainingError(f"{bad}; nothing was updated; {error}") from bad
        state.offered = state.open_step = None
        state.steps_without_weight = 0
        state.progress.rollbacks, state.progress.bad_steps = before.rollbacks + 1, before.bad_steps + 1
        state.progress.left_out = sorted({*before.left_out, *bad.positions})
        self._records.rewind(state.progress.iteration)
        logger.warning_rank_0(
            f"{bad}; the run goes back to iteration {state.progress.iteration} and leaves out "
            f"{counted(len(bad.positions), 'sample')} (rollback {state.progress.rollbacks} of at most {most})"
        )
        return {"iteration": state.progress.iteration, **bad.metrics, "bad_steps": state.progress.bad_steps}

    def _refuse_further_steps(self) -> None:
        iteration, train_iters = self._state.progress.iteration, derived.train_iters(self._state.config)
        if iteration >= train_iters:
            raise TrainingError(
                f"iteration {iteration} of megatron_lm.train.common.train_iters {train_iters} is done; write the loop "
                "as `while wrap.iteration < wrap.train_iters`, or raise train_iters"
            )

    def _finish(self, report: StepReport) -> dict[str, float]:
        state, train, iteration = self._state, self._state.config.train, self._state.progress.iteration
        interval = train.check_weight_hash_across_dp_replicas_interval
        if interval and iteration % interval == 0:
            refuse_differing_copies(state.chunks, state.config, state.parallel, iteration)
        if state.reference is not None:
            state.reference.follow(state.chunks, iteration)
        self._records.step_taken(report)
        self._checkpoints.poll()
        if train.save_interval and train.save and iteration % train.save_interval == 0:
            # metrics first: a run killed in between repeats the step, and the duplicate line is dropped
            self._records.write_last()
            self._checkpoints.tolerate(self._save)
        if report.stop_requested and self._stop is not None:
            self._end(self._stop)
        return dict(report.metrics)

    def _end(self, stop: StopRequests) -> NoReturn:
        """Save, and end the program."""
        reason = next(reason for reason in gather_objects(stop.reason) if reason is not None)
        self._records.write_last()
        if self._state.config.train.save:
            self._save()
            self._checkpoints.wait()
        stop.fulfilled(reason.exit_code)
        if self._state.parallel.world.rank == 0:
            print(self._checkpoints.ended(reason.text), file=sys.stderr, flush=True)  # noqa: T201
        gather_objects(None)  # a process that ends earlier lets torchrun's agent end the others
        raise RunStopped(reason.exit_code)
