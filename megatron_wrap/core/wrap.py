"""`MegatronWrap`: a run from its configuration to its end. Each method calls the functions that do the work; the
training step is in `megatron_wrap.engine.step`."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from megatron_wrap.bridge.adapters.peft_folder import adapter_base, adapter_keys, is_adapter
from megatron_wrap.bridge.loading.hub import read_run
from megatron_wrap.config import RunConfig
from megatron_wrap.config.checks.layout import check_layout
from megatron_wrap.config.defaults import CONNECTIONS, cuda_connections
from megatron_wrap.config.schema import derived
from megatron_wrap.core.local_copies import with_local_copies
from megatron_wrap.core.validation import validate
from megatron_wrap.errors import MegatronWrapError, TrainingError
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.metrics.phases import EVALUATION, SAVE, SETUP, current_phase, doing
from megatron_wrap.platform import choose_platform
from megatron_wrap.utils.dist_logger import logger
from megatron_wrap.utils.session import logger_session

if TYPE_CHECKING:
    from typing import Self

    import torch
    from torch import Tensor

    from megatron_wrap.bridge.engines.rollout_weights import RolloutWeights
    from megatron_wrap.core.run import Run
    from megatron_wrap.engine.state.state import StepWeights, TrainingState
    from megatron_wrap.generation.generate import Completion
    from megatron_wrap.parallel.launch import Processes
    from megatron_wrap.parallel.state import ParallelState
    from megatron_wrap.parallel.watch.ending import InterruptWatch
    from megatron_wrap.parallel.watch.heartbeat import Heartbeat


class MegatronWrap:
    """A run: `initialize()`, `setup_model_and_optimizer()`, then `train(batch)` and `log_last_metrics()` in your own
    loop, and `save()`.

    Args:
        config: path of the run's YAML, or an already decoded `RunConfig`.
        overrides: `a.b.c=value` strings; they take precedence over the YAML.

    The constructor only reads and validates the configuration.

    Raises:
        ConfigError, LayoutError, DataError, CheckpointError: the configuration is wrong; the message has file and line.
    """

    def __init__(self, config: str | os.PathLike[str] | RunConfig, overrides: Sequence[str] = ()) -> None:
        config = config if isinstance(config, RunConfig) else read_run(config, overrides)
        self.requested_config = with_local_copies(config)
        """The configuration as it was passed."""
        self.config = self.requested_config
        """The configuration in force. From `setup_model_and_optimizer` on, it has values for the keys that were left
        open, chosen for machine, layout and checkpoint."""
        self._reference_config = validate(self.requested_config)
        self.platform = choose_platform(self.config.init.platform)
        self.tokenizer: Any = None
        self._session = ExitStack()
        self._processes: Processes | None = None
        self._parallel: ParallelState | None = None
        self._run: Run | None = None
        self._folders = ExitStack()
        self._interrupts: InterruptWatch | None = None
        self._heartbeat: Heartbeat | None = None
        self._last_known: tuple[int | None, str] = None, SETUP
        self._adapter: str | None = "default"

    def __repr__(self) -> str:
        """Name, model, flow, layout and iteration."""
        arch, hf_path = self.config.arch, self.config.model_provider.hf_path
        model = f"{counted(arch.num_layers, 'layer')} of {arch.hidden_size}" if hf_path is None else hf_path
        layout = "not initialized" if self._parallel is None else self._parallel.layout
        where = "no model yet" if self._run is None else f"iteration {self.iteration}"
        if self._run is not None and self._run.trains:
            where += f" of {self.train_iters}"
        return f"<MegatronWrap {self.config.name}: {model}, {self.config.flow.flow_key}, {layout}, {where}>"

    @classmethod
    def from_pretrained(
        cls,
        hf_path: str | os.PathLike[str],
        config: str | os.PathLike[str],
        overrides: Sequence[str] = (),
    ) -> Self:
        """The run of `config`, started from a Hugging Face folder or hub id: its architecture, weights and tokenizer.

        The same as the override `megatron_wrap.model_provider.hf_path=HF_PATH`; `model.arch` may be omitted. The folder
        of a peft adapter sets `megatron_wrap.adapter` as well, and hf_path to the model that it names as its base.

        Raises:
            ConfigError: the folder is invalid, or a value of the YAML contradicts its config.json; the message has both
                values.
            CheckpointError: the folder is of an adapter that cannot be loaded.
        """
        adapter: list[str] = []
        if is_adapter(hf_path):
            keys = adapter_keys(hf_path).items()
            adapter = ["megatron_wrap.adapter.__select__=lora"]
            adapter += [f"megatron_wrap.adapter.{key}={json.dumps(value)}" for key, value in keys]
            hf_path = adapter_base(hf_path)
        start = f"megatron_wrap.model_provider.hf_path={json.dumps(os.fspath(hf_path))}"
        return cls(config, [*adapter, *overrides, start])

    # ---- lifecycle ----

    def initialize(self) -> None:
        """Start the platform, torch.distributed, the model-parallel groups, seeds and logging. Collective.

        Raises:
            LayoutError: the number of processes does not fit the layout.
        """
        if self._parallel is not None:
            return
        from megatron_wrap.parallel import launch

        settings = self.config.logger
        self._session = logger_session(
            rank=launch.environment_rank(),
            patch_print=settings.patch_print,
            remove_logging=settings.remove_logging,
            ignore_warning=settings.ignore_warning,
        )
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        from megatron_wrap.parallel import launch
        from megatron_wrap.parallel.state import build_parallel_state
        from megatron_wrap.parallel.watch import heartbeat
        from megatron_wrap.setup.build import seed_everything

        timeout = self.config.init.distributed_timeout_minutes
        check_layout(self.config, launch.environment_world_size())
        self.platform.install(
            {CONNECTIONS: str(cuda_connections(self.config, self.platform.machine, os.environ.get(CONNECTIONS)).value)},
            deterministic=bool(self.config.arch.upstream.get("deterministic_mode")),
        )
        self._processes = launch.start(self.platform.backend, timeout)
        self._interrupts = launch.watch_interrupts(self._interrupted)
        self._heartbeat = heartbeat.begin(self._processes.rank, self._where)
        check_layout(self.config, self._processes.world_size)
        self._parallel = build_parallel_state(self.config.parallel, derived.virtual_pipeline_size(self.config), timeout)
        seed_everything(self.config.train.seed, self.platform, self._parallel)
        logger.info_rank_0(
            f"{self.config.name}: {counted(self._processes.world_size, 'process')} on {self.platform.name} over "
            f"{self.platform.backend}, layout {self._parallel.layout}"
        )

    def setup_model_and_optimizer(self) -> None:
        """Build model, optimizer and schedule; then resume from `save`, or start from `load`, or from initial weights.

        Collective over all ranks.

        Raises:
            PlatformError: Megatron-Core cannot build this model on this platform. CheckpointError: see `load`; or
                another run holds the output folder or the checkpoint folder; or this run has failed too often without a
                new checkpoint.
        """
        from megatron_wrap.core.run_folders import count_start

        with doing(SETUP):
            run = self._set_up(training=True)
            count_start(self.config, self.iteration)
            assert self._processes is not None
            run.begin_training(self.output_dir, self._processes.local_rank, self._interrupts)

    def setup_model(self) -> None:
        """Build only the model, with the weights that training would start from, to evaluate, inspect or export it.
        Collective.

        Without gradient buffers and optimizer it needs a third of the memory or less. `train` and `save` require
        `setup_model_and_optimizer`.
        """
        with doing(SETUP):
            self._set_up(training=False)

    def _set_up(self, training: bool) -> Run:
        parallel = self._initialized()
        from megatron_wrap.checkpoint.chosen_values import decided
        from megatron_wrap.config.checks.vocabulary import model_vocab_size
        from megatron_wrap.core.run import Run
        from megatron_wrap.core.run_data import with_train_iters
        from megatron_wrap.core.run_folders import hold_folders
        from megatron_wrap.data.chat.tokenizer import run_tokenizer
        from megatron_wrap.parallel.agreement import on_rank_0
        from megatron_wrap.plan.model_parts import model_shape
        from megatron_wrap.plan.pipeline_split import with_split

        self.tokenizer = run_tokenizer(self.config.data)
        requested = self.requested_config
        vocab_size = model_vocab_size(requested.arch, self.tokenizer, requested.model_provider.hf_path)
        if training:
            config = with_train_iters(requested, parallel, self.tokenizer)
            self.config = decided(config, self.platform, parallel, vocab_size)
        else:
            self.config = with_split(
                self.config, model_shape(self.config, vocab_size), on_rank_0(lambda: self.platform.device_name)
            )
        if self._run is not None:
            self._run.close()
        self._folders.close()
        if training:
            self._folders = hold_folders(self.config)
        self._run = Run(self.config, self._reference_config, self.platform, parallel, self.tokenizer, training)
        return self._run

    def close(self) -> None:
        """End the processes that load data, close loggers, destroy the process groups that this object created, and
        undo the changes of `initialize` to the host program."""
        if self._run is not None:
            self._run.close()
            self._run = None
        self._folders.close()
        if self._parallel is not None:
            from megatron_wrap.parallel.state import destroy_parallel_state

            destroy_parallel_state()
            self._parallel = None
            # model, hooks, optimizer and process groups form reference cycles
            gc.collect()
        if self._processes is not None:
            from megatron_wrap.parallel import launch

            launch.stop(self._processes)
            self._processes = None
        if self._interrupts is not None:
            self._interrupts.close()
            self._interrupts = None
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
        self.platform.uninstall()
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, KeyboardInterrupt | SystemExit):
            self._forget_starts()
        if isinstance(error, KeyboardInterrupt):
            if self._interrupts is not None:
                self._interrupts.close()
            message = self._interrupted()
            if self._run is not None:
                self._run.checkpoints.leave_uploads()
            if self._processes is None or self._processes.world_size == 1:
                self.close()
            elif self._run is not None:  # the end of a process group would wait for ranks that have ended
                self._run.close()
            raise KeyboardInterrupt(message).with_traceback(trace) from None
        try:
            if self._run is not None and error is None:
                self._run.checkpoints.wait()
            elif self._run is not None and not isinstance(error, SystemExit):
                self._run.checkpoints.leave_uploads()
        finally:
            self.close()

    # ---- training ----

    def batches(self, samples: Sequence[Any] | None = None) -> Iterator[list[Any]]:
        """The remaining global batches of the run, in an order that is a function of the seed.

        Each is a list of samples as they were read, and carries this replica's micro-batches, which worker processes
        prepare ahead (`megatron_wrap.data.num_workers`). A resumed run continues with the very next sample. Every rank
        yields the same batches; with `megatron_lm.train.common.global_batch_tokens` their lengths vary.

        Args:
            samples: the training set; default: that of `megatron_wrap.data`. Workers have a copy from the first batch.

        Raises:
            DataError: a row cannot be used; the message begins with its file and row.
            TrainingError: a worker process has died.
        """
        run = self._ready()
        return run.data.batches(run.state, samples)

    def train(self, batch: Sequence[Any] | None = None) -> dict[str, float]:
        """One optimizer step, and a save every `save_interval` iterations. Collective.

        Args:
            batch: `global_batch_size` samples, on every rank or only on global rank 0 while the others pass None.

        Returns:
            The step's metrics, the same on every rank; docs/metrics.md has their names and units. After a rollback
            (`megatron_wrap.bad_steps`) `iteration` is that of the checkpoint, with loss, grad_norm and bad_steps alone.

        Raises:
            TrainingError: the run has taken all `train_iters` steps; or the loss or the gradient norm is not finite,
                and no state was changed.
            DataError: the batch has another size.
        """
        from megatron_wrap.core.after_step import after_step, refuse_further_steps, roll_back
        from megatron_wrap.engine.bad_steps import BadStep
        from megatron_wrap.engine.step import train_step

        run = self._training()
        refuse_further_steps(run.state)
        try:
            report = train_step(run.state, batch)
        except BadStep as bad:
            return roll_back(bad, run.state, run.records, run.checkpoints)
        return after_step(run, report, self.save)

    def count_weights(self, batches: Sequence[Sequence[Any]] | None) -> StepWeights:
        """Compute the loss weights, and the statistics that the flow declares, of a step that is passed in parts.
        Collective.

        Given these weights, `forward_backward` of each part and then `optimizer_step` take the same step as `train` of
        all samples.

        Args:
            batches: the parts in their order, `global_batch_size` samples together; on every rank, or only on global
                rank 0 with None on the others.

        Returns:
            The weights for `forward_backward`; `weights` contains the weight of each loss term over the whole step.

        Raises:
            DataError: the parts have another number of samples together.
        """
        from megatron_wrap.core.after_step import refuse_further_steps
        from megatron_wrap.engine.step import count_weights

        state = self._training().state
        refuse_further_steps(state)
        return count_weights(state, batches)

    def forward_backward(self, batch: Sequence[Any] | None, *, step_weights: StepWeights) -> None:
        """Compute the gradients of the next part of a step, and add them to those of the parts before. Collective.

        Args:
            batch: the next of the parts that were passed to `count_weights`; on every rank, or only on global rank 0
                with None on the others.
            step_weights: the return value of `count_weights`.

        Raises:
            TrainingError: `step_weights` belong to another step. DataError: the part has another size. After an error
                the step begins again with its first part.
        """
        from megatron_wrap.core.after_step import refuse_further_steps
        from megatron_wrap.engine.step import forward_backward

        state = self._training().state
        refuse_further_steps(state)
        forward_backward(state, batch, step_weights)

    def optimizer_step(self) -> dict[str, float]:
        """Reduce the gradients of all parts of a step, update the parameters, and save as `train` does. Collective.

        Returns:
            The metrics of the whole step, as in `train`.

        Raises:
            TrainingError: a part is missing; or as `train`.
        """
        from megatron_wrap.core.after_step import after_step, roll_back
        from megatron_wrap.engine.bad_steps import BadStep
        from megatron_wrap.engine.step import optimizer_step

        run = self._training()
        try:
            report = optimizer_step(run.state)
        except BadStep as bad:
            return roll_back(bad, run.state, run.records, run.checkpoints)
        return after_step(run, report, self.save)

    def log_last_metrics(self) -> None:
        """Pass the last step's metrics to the metric loggers, and print a line every `log_interval` iterations."""
        self._ready().records.log_last()

    def fit(self, on_step: Callable[[Self, dict[str, float]], Any] | None = None) -> dict[str, float]:
        """Train the rest of the run in one call: `batches`, `train` and `log_last_metrics` for each step, `evaluate` by
        `eval_interval` and at the end, `save` at the end where `save` is set. Collective.

        With `megatron_wrap.checkpoint.best_metric`, each evaluation by `eval_interval` and that after the last step,
        but not the one before the first step, is compared with the best one so far. A better one is saved, and its
        checkpoint is kept whatever `keep` is. With `early_stop_patience`, the run ends after that many evaluations in a
        row that are not better. A resumed run continues with the same best value and count.

        Args:
            on_step: called as `on_step(wrap, metrics)` on every rank after each step, with the metrics of `train`. If
                it returns False (None is not False) on any rank, the run ends after this step.

        Returns:
            The metrics of the last evaluation, or of the last step of this call if there are no evaluation sets; the
            same on every rank. With `best_metric`, also `best_iteration` and `best_value`, once there are any.

        Raises:
            ConfigError: the evaluation has no metric `best_metric`. TrainingError, DataError: as `train` and `batches`.
            TrainingError: no step of the run trained a token.
        """
        from megatron_wrap.core import evaluate_and_early_stop as evaluation
        from megatron_wrap.engine.bad_steps import refuse_untrained_run

        state, checkpoints = self._ready().state, self._ready().checkpoints
        steps: dict[str, float] = {}
        evaluated: dict[str, float] | None = None  # metrics of an evaluation since the last step
        if not evaluation.is_out_of_patience(state):
            for batch in self.batches():
                if self.evaluation_due:
                    evaluated = self.evaluate()
                    evaluation.compare_with_best(state, checkpoints, evaluated, self.save)
                    if evaluation.is_out_of_patience(state):
                        break
                steps, evaluated = self.train(batch), None
                self.log_last_metrics()
                if on_step is not None and evaluation.any_rank_ends(state, on_step(self, dict(steps))):
                    break
        if steps:
            refuse_untrained_run(state.progress, state.steps_without_weight)
        if evaluated is None:
            evaluated = self.evaluate()
            if self.iteration >= self.train_iters:
                evaluation.compare_with_best(state, checkpoints, evaluated, self.save)
        if self.config.train.save is not None:
            self.save()
            checkpoints.wait()
            if self.iteration >= self.train_iters:
                checkpoints.finish_uploads()
        return {**(evaluated or steps), **evaluation.best_metrics(state)}

    # ---- evaluation and generation ----

    @contextmanager
    def adapter(self, name: str | None) -> Iterator[None]:
        """A context in which `forward`, `generate` and `evaluate` compute with another adapter. Collective.

            with wrap.adapter(None):
                before = wrap.generate(prompts)

        Args:
            name: a name in `megatron_wrap.adapter.others`; "default": the trained adapter; None: the base.

        Raises:
            ConfigError: there is no such adapter.
            TrainingError: within the context, by everything that trains, saves or exports.
        """
        from megatron_wrap.evaluation.evaluate import with_adapter

        before = self._adapter
        with with_adapter(self._ready().state, name):
            self._adapter = name
            try:
                yield
            finally:
                self._adapter = before

    def evaluate(self, sets: Mapping[str, Sequence[Any] | None] | None = None) -> dict[str, float]:
        """Evaluate the objective and the flow's metrics over named evaluation sets; the state is unchanged. Collective.

        Args:
            sets: name -> samples, on every rank or only on global rank 0 with None on the others; default: the
                evaluation sets of `megatron_wrap.data`. At most `eval_iters` global batches of each set are used.

        Returns:
            `eval/NAME/loss`, `eval/NAME/METRIC` and, if the flow reports it, `eval/NAME/perplexity` for each set.
            They are also logged, and so are completions of `megatron_lm.train.common.sample_prompts`.
        """
        from megatron_wrap.core.evaluate_and_early_stop import evaluate_sets

        with doing(EVALUATION):
            run = self._ready()
            sets = run.data.evaluation_sets() if sets is None else sets
            return evaluate_sets(run.state, run.tokenizer, run.records, sets)

    @property
    def evaluation_due(self) -> bool:
        """Whether an evaluation is due by `eval_interval`: before the first step and after each interval."""
        iteration, interval = self.iteration, self.config.train.eval_interval
        return interval is not None and iteration % interval == 0

    def forward(self, samples: Sequence[Any] | None) -> list[dict[str, Tensor]]:
        """The outputs of the flow's `calculate_outputs` for each sample, without a graph. Collective.

        Returns:
            For each sample, in order, a dictionary of CPU tensors; the same on every rank.
        """
        from megatron_wrap.evaluation.evaluate import forward

        with doing(EVALUATION):
            return forward(self.state, samples)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int] | Sequence[Mapping[str, Any]]] | None,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str | int] = (),
        batch_size: int = 8,
        n: int = 1,
        log_probs: bool = False,
    ) -> list[Completion]:
        """Complete prompts with the current weights, on any layout. Collective.

        Args:
            prompts: texts, lists of messages (rendered with the chat template) or lists of token ids; on every rank, or
                only on global rank 0 with None on the others.
            max_new_tokens: maximum number of tokens of a completion.
            temperature: 0 chooses the most probable token, as transformers does with do_sample=False; otherwise logits
                are divided by it and a token is sampled.
            top_p: sample from the most probable tokens of this total probability, as in transformers; None: from all.
            top_k: sample from the k most probable tokens, as in transformers; None: from all.
            seed: seed of the sampling; None: `megatron_lm.train.common.seed`. The same seed returns the same
                completions on every layout and in every batch, so a rollout loop must pass another seed in each call.
            stop: texts and token ids that end a completion, in addition to the model's end tokens.
            batch_size: completions that a replica computes at a time; the KV cache has room for that many sequences.
            n: completions of each prompt, drawn independently. Equal prompts in a batch are processed once.
            log_probs: return the log-probability of each new token given those before it, in nats, before temperature,
                top_p and top_k; as `rollout_log_probs` of gpt_grpo when the temperature is 1.

        Returns:
            For each prompt `n` times, in order and on every rank, {"text": ..., "token_ids": [...], "finish_reason":
            "stop" or "length"}, without the prompt; with `log_probs` also "log_probs", one for each of `token_ids`. The
            text is cut before a stop text, and None without a tokenizer.

        Raises:
            DataError: a prompt or an argument is wrong.
        """
        from megatron_wrap.generation.generate import generate
        from megatron_wrap.generation.sampling import SamplingRule

        rule = SamplingRule(temperature, top_k, top_p)
        seed = self.config.train.seed if seed is None else seed
        return generate(self.state, self.tokenizer, prompts, max_new_tokens, rule, seed, stop, batch_size, n, log_probs)

    # ---- checkpoints ----

    def save(self) -> Path:
        """Save everything that a resumed run needs, into `megatron_lm.train.common.save`. Collective.

        With `megatron_wrap.checkpoint.async_save` this returns when the state is copied, and the checkpoint is written
        meanwhile; a failure is raised after a later step, by the next save or at the end of the run.

        Returns:
            The checkpoint's folder; an asynchronous one appears there when it is complete. Saving the same iteration
            again writes nothing.
        """
        run = self._training()
        with doing(SAVE):
            folder = run.checkpoints.save()
        if self.config.checkpoint.export_hf:
            from megatron_wrap.core.export import save_beside

            save_beside(run, folder)
        return folder

    def load(self, folder: str | os.PathLike[str] | None = None, weights_only: bool = False) -> None:
        """Load a checkpoint of this model, saved on any layout, and the reference model saved with it. Collective.

        Args:
            folder: a checkpoint folder (the newest checkpoint is loaded) or one checkpoint; default: `save`, else
                `load` of the configuration.
            weights_only: do not load iteration, optimizer, schedule, random generators and reference model.

        Raises:
            CheckpointError: the checkpoint is missing, in an unsupported format, or from another model.
        """
        self._with_own_adapter().checkpoints.load(folder, weights_only)

    # ---- Hugging Face folders and other engines ----

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        max_shard_size: str | int = "5GB",
        dtype: str | torch.dtype | None = None,
        family: str | None = None,
        merge: bool = False,
        keep_vision: bool = False,
    ) -> Path:
        """Write a Hugging Face folder with weights, config.json, generation_config.json and tokenizer, which
        `AutoModelForCausalLM.from_pretrained` loads, of a value model `AutoModelForSequenceClassification`. A trained
        model gets a model card, README.md. Collective.

        A run with an adapter writes adapter_config.json and adapter_model.safetensors, which peft's
        `PeftModel.from_pretrained` loads, or with `merge` the whole model.

        Args:
            folder: on a file system that all ranks share.
            max_shard_size: maximum size of a weight file, in bytes or as text such as "5GB".
            dtype: "float32", "bfloat16" or "float16"; None: that of the parameters.
            family: a model_type of transformers; None: that of hf_path, else the first that can express the
                architecture.
            merge: add the product of the adapter's factors to each weight; no effect without an adapter.
            keep_vision: copy the vision encoder of hf_path unchanged.

        Raises:
            UnsupportedModel: no family can express the architecture. CheckpointError: a rank could not write.
            ConfigError: keep_vision, and hf_path has no vision encoder.
        """
        from megatron_wrap.core.export import save_folder

        return save_folder(self._with_own_adapter(), folder, max_shard_size, dtype, family, merge, keep_vision)

    def export_weights(
        self, dtype: str | torch.dtype | None = None, family: str | None = None, adapter: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of each weight, on every rank and on its device, one at a time.

        Collective: every rank must iterate over all of them. For example to update an inference engine during training.

        Args:
            dtype: as for `save_pretrained`.
            family: as for `save_pretrained`.
            adapter: only the factors of the adapter, with peft's names; otherwise they are added to the weights.
        """
        from megatron_wrap.core.export import export_weights

        return export_weights(self._with_own_adapter().state, dtype, family, adapter)

    def weight_source(
        self, dtype: str | torch.dtype | None = None, family: str | None = None, adapter: bool = False
    ) -> RolloutWeights:
        """The weights for a rollout engine: their names, dtypes and shapes, and passes over the tensors, as
        `save_pretrained` would write them. Collective.

        The object stays valid in the whole run; each pass yields the current weights. docs/weights.md has the adapters
        for vLLM and SGLang.

        Args:
            dtype: as for `save_pretrained`.
            family: as for `save_pretrained`.
            adapter: as for `export_weights`.

        Raises:
            UnsupportedModel: no family can express the architecture.
        """
        from megatron_wrap.core.export import weight_source

        return weight_source(self._with_own_adapter().state, dtype, family, adapter)

    def push_to_hub(
        self,
        repo_id: str,
        folder: str | os.PathLike[str],
        private: bool | None = None,
        commit_message: str | None = None,
        **save_arguments: Any,
    ) -> str:
        """`save_pretrained` into `folder`, then upload it from global rank 0 through huggingface_hub. Collective.

        Args:
            repo_id: `org/name`; created if it does not exist, with the login of huggingface_hub.
            save_arguments: further arguments of `save_pretrained`.

        Returns:
            The commit's URL, on every rank.

        Raises:
            CheckpointError: on every rank, if the upload fails.
        """
        from megatron_wrap.core.export import upload_folder

        target = self.save_pretrained(folder, **save_arguments)
        return upload_folder(self._with_own_adapter(), target, repo_id, private, commit_message)

    # ---- state ----

    @property
    def iteration(self) -> int:
        """Number of steps taken, including those before a resume."""
        return self.state.progress.iteration

    @property
    def train_iters(self) -> int:
        """Number of steps of the run; if its length is set in epochs, only after the setup."""
        train = self.config.train
        if train.train_iters is None and train.train_samples is None:
            raise MegatronWrapError("train_epochs: call wrap.setup_model_and_optimizer() first, which counts the steps")
        return derived.train_iters(self.config)

    @property
    def consumed_samples(self) -> int:
        """Number of samples trained on."""
        return self.state.progress.consumed_samples

    @property
    def global_batch_size(self) -> int:
        """Samples of the next `train` call; grows during a batch size ramp-up."""
        return self.state.global_batch_size

    @property
    def output_dir(self) -> Path:
        """Folder of metrics.jsonl and the run's other records."""
        return Path(derived.output_dir(self.config))

    @property
    def state(self) -> TrainingState:
        """The run's training state, for tools that inspect it."""
        return self._ready().state

    # ---- this process in the parallel layout, after `initialize()` ----

    tp_size = property(lambda self: self._initialized().tp.size, doc="Tensor-parallel size.")
    tp_rank = property(lambda self: self._initialized().tp.rank, doc="Tensor-parallel rank of this process.")
    pp_size = property(lambda self: self._initialized().pp.size, doc="Pipeline-parallel size.")
    pp_rank = property(lambda self: self._initialized().pp.rank, doc="Pipeline stage of this process.")
    dp_size = property(lambda self: self._initialized().dp.size, doc="Data-parallel size, without CP.")
    dp_rank = property(lambda self: self._initialized().dp.rank, doc="Data-parallel rank of this process.")
    cp_size = property(lambda self: self._initialized().cp.size, doc="Context-parallel size.")
    cp_rank = property(lambda self: self._initialized().cp.rank, doc="Context-parallel rank of this process.")
    ep_size = property(lambda self: self._initialized().ep.size, doc="Expert-parallel size.")
    ep_rank = property(lambda self: self._initialized().ep.rank, doc="Expert-parallel rank of this process.")
    tp_group = property(lambda self: self._initialized().tp.group, doc="Tensor-parallel group of this process.")
    pp_group = property(lambda self: self._initialized().pp.group, doc="Pipeline-parallel group of this process.")
    dp_group = property(
        lambda self: self._initialized().dp.group, doc="Data-parallel group of this process, without CP."
    )
    cp_group = property(lambda self: self._initialized().cp.group, doc="Context-parallel group of this process.")
    ep_group = property(lambda self: self._initialized().ep.group, doc="Expert-parallel group of this process.")

    # ---- internal ----

    def _where(self) -> tuple[int | None, str]:
        """(iteration, phase) of the run under way, else the last known ones."""
        if self._run is not None:  # else the last known values: the run is set up or closed
            self._last_known = self._run.state.progress.iteration + 1, current_phase()
        return self._last_known

    def _forget_starts(self) -> None:
        from megatron_wrap.core.run_folders import forget_starts

        if self._run is not None and self._run.trains and logger.rank == 0:
            forget_starts(self.config)

    def _interrupted(self) -> str:
        return "interrupted before the run began" if self._run is None else self._run.interrupted()

    def _initialized(self) -> ParallelState:
        if self._parallel is None:
            raise MegatronWrapError("call wrap.initialize() first")
        return self._parallel

    def _ready(self) -> Run:
        if self._run is None:
            raise MegatronWrapError("call wrap.initialize() and wrap.setup_model_and_optimizer() first")
        return self._run

    def _with_own_adapter(self) -> Run:
        run = self._ready()
        if self._adapter != "default":
            raise TrainingError(
                f"within wrap.adapter({self._adapter!r}) the model only computes; leave the context to train, save, "
                "load or export"
            )
        return run

    def _training(self) -> Run:
        run = self._with_own_adapter()
        if not run.trains:
            raise MegatronWrapError("setup_model builds no optimizer; call wrap.setup_model_and_optimizer() instead")
        return run
