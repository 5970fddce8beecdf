"""Methods of `MegatronWrap` that train: a step in one call, or in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wrap.errors import TrainingError

if TYPE_CHECKING:
    from megatron_wrap.config import RunConfig
    from megatron_wrap.core.records import RunRecords
    from megatron_wrap.engine.open_step import StepWeights
    from megatron_wrap.engine.state import StepReport, TrainingState


class TrainingVerbs:
    """Mixin of `MegatronWrap`, which defines the attributes declared here."""

    config: RunConfig
    save: Callable[[], Path]
    _records: RunRecords

    if TYPE_CHECKING:

        @property
        def iteration(self) -> int:
            """Number of steps taken."""

        @property
        def train_iters(self) -> int:
            """Number of steps of the run."""

        def _trainable(self) -> TrainingState: ...

    def train(self, batch: Sequence[Any] | None = None) -> dict[str, float]:
        """One optimizer step, and a save at each `save_interval`. Collective.

        Args:
            batch: `global_batch_size` samples, on every rank or only on global rank 0 while the others pass None.

        Returns:
            The step's metrics, the same on every rank; docs/metrics.md has their names and units.

        Raises:
            TrainingError: the run has taken all `train_iters` steps; or the loss or the gradient norm is not finite,
                and no state was changed.
            DataError: the batch has another size.
        """
        from megatron_wrap.engine.split_step import refuse_open_step
        from megatron_wrap.engine.step import train_step

        state = self._before_last_step()
        refuse_open_step(state, "wrap.train")
        return self._taken(train_step(state, batch))

    def count_weights(self, batches: Sequence[Sequence[Any]] | None) -> StepWeights:
        """The loss weights, and the statistics that the flow declares, of a step that is passed in parts. Collective.

        With them `forward_backward` of each part, then `optimizer_step`, take the step that `train` of all samples
        would take.

        Args:
            batches: the parts in their order, `global_batch_size` samples together; on every rank, or only on global
                rank 0 with None on the others.

        Returns:
            For `forward_backward`; `weights` has the weight of each loss term over the whole step.

        Raises:
            DataError: the parts have another number of samples together.
        """
        from megatron_wrap.engine.split_step import count_weights

        return count_weights(self._before_last_step(), batches)

    def forward_backward(self, batch: Sequence[Any] | None, *, step_weights: StepWeights) -> None:
        """Compute the gradients of the next part of a step, and add them to those of the parts before. Collective.

        Args:
            batch: one of the parts that `count_weights` got, in their order; on every rank, or only on global rank 0
                with None on the others.
            step_weights: what `count_weights` returned.

        Raises:
            TrainingError: `step_weights` are of another step. DataError: the part has another size. After an error the
                step begins again with its first part.
        """
        from megatron_wrap.engine.split_step import forward_backward

        forward_backward(self._before_last_step(), batch, step_weights)

    def optimizer_step(self) -> dict[str, float]:
        """Reduce the gradients of all parts of a step, update the parameters, and save as `train` does. Collective.

        Returns:
            The metrics of the whole step, as those of `train`.

        Raises:
            TrainingError: a part is missing; or as `train`.
        """
        from megatron_wrap.engine.split_step import optimizer_step

        return self._taken(optimizer_step(self._trainable()))

    def log_last_metrics(self) -> None:
        """Pass the last step's metrics to the metric loggers, and print a line each `log_interval` iterations."""
        self._records.log_last()

    def _before_last_step(self) -> TrainingState:
        state = self._trainable()
        if self.iteration >= self.train_iters:
            raise TrainingError(
                f"iteration {self.iteration} of megatron_lm.train.common.train_iters {self.train_iters} is done; write "
                "the loop as `while wrap.iteration < wrap.train_iters`, or raise train_iters"
            )
        return state

    def _taken(self, report: StepReport) -> dict[str, float]:
        state = self._trainable()
        if state.reference is not None:
            state.reference.follow(state.chunks, self.iteration)
        self._records.step_taken(report)
        interval = self.config.train.save_interval
        if interval and self.config.train.save and self.iteration % interval == 0:
            # metrics first: a run killed in between repeats the step, and the duplicate line is dropped
            self._records.write_last()
            self.save()
        return dict(report.metrics)
