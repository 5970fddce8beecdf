"""`RunConfig`, a decoded configuration: one frozen dataclass for each file or folder of the tree `configs/nest`.

A field is the one definition of a key's type, default, range (`key`) and documentation. `make config-docs` writes them
into the tree, a test fails where these differ, the site has them as a page, and `megatron-wrap explain` prints them.
A run must set a key whose field has no default.

Keys of `megatron_lm` have Megatron-LM's argument names. `upstream` contains further fields of Megatron-Core's own
dataclass.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_wrap.config.reading.tree import Origin, SetBy, schema_line
from megatron_wrap.config.reading.yaml_nodes import dump_yaml
from megatron_wrap.config.schema.data import DataConfig
from megatron_wrap.config.schema.keys import key
from megatron_wrap.config.schema.launch import KubernetesConfig, LaunchConfig, SlurmConfig
from megatron_wrap.config.schema.model import AdapterConfig, ArchConfig, ParallelConfig, ProviderConfig
from megatron_wrap.config.schema.reference_models import ReferenceModelConfig
from megatron_wrap.config.schema.training import (
    DDPConfig,
    LearningRateConfig,
    OptimConfig,
    PrecisionConfig,
    RecomputeConfig,
    TrainConfig,
)
from megatron_wrap.hidden_secrets import without_secrets


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """`megatron_wrap.init`: the platform and its collectives."""

    platform: Literal["auto", "cpu", "cuda"] = "auto"
    """cuda: GPUs over NCCL; cpu: processes over gloo; auto: cuda if a GPU is present."""
    distributed_timeout_minutes: float = key(10.0, above=0)
    """Minutes after which an unfinished collective ends the run."""
    stopped_process_seconds: float | None = key(60.0, at_least=5, null_means_off=True)
    """`megatron-wrap train` ends a run if a process on this node gives no sign of life for N seconds, because it is
    stopped, or if none makes progress in a step for N seconds and for ten times the longest earlier pause (ten minutes
    in the first steps and while data are read); it names the process that the others wait for. null: never."""


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """`megatron_wrap.logger`: metrics, and where they are written."""

    output_dir: str | None = None
    """Folder of metrics.jsonl, TensorBoard and offline wandb files; null: outputs/NAME-OF-THE-YAML."""
    patch_print: bool = False
    """Redirect print to logger.debug_all_ranks until close()."""
    remove_logging: bool = False
    """Remove the root handlers of Python's logging until close()."""
    ignore_warning: bool = True
    """Hide FutureWarning and UserWarning until close()."""
    progress_bar: bool = True
    """Show a bar with the remaining time on the terminal of rank 0; never in a pipe."""
    console_metrics: tuple[str, ...] | None = None
    """Patterns of the metrics on the console's lines, in this order, such as [loss, rewards/*, grad_norm]; of an
    evaluation the names without eval/SET/. null: those that the flow chooses, with loss, norm of the gradient, learning
    rate, time, tokens per second and memory. The metric loggers get all."""
    enable_tensorboard: bool = False
    """Write TensorBoard events (docs/report.md)."""
    tensorboard_dir: str | None = None
    """Folder of TensorBoard events; setting it enables them, as in Megatron-LM. null: with enable_tensorboard,
    tensorboard in the run's output folder."""
    tensorboard_log_interval: int = key(1, at_least=1)
    """Write a step's metrics to TensorBoard every N iterations; evaluations always."""
    tensorboard_queue_size: int = key(1000, at_least=1)
    """Maximum number of points that TensorBoard buffers; it writes them at least every 30 seconds."""
    enable_wandb: bool = False
    """Log to Weights & Biases, online if there is a key, else offline."""
    wandb_project: str | None = None
    """Project of Weights & Biases; null: megatron-wrap."""
    wandb_name: str | None = None
    """Name of the run; null: the YAML's name."""
    metric_loggers: tuple[str, ...] = ()
    """Further metric loggers: registered keys or my_package.my_module:MyLogger."""
    add_params_norm_to_metrics: bool = False
    """Report the norm of all parameters (one more pass over them)."""
    add_num_zeros_in_grad_to_metrics: bool = False
    """Count zeros in the gradient (one more pass over it)."""
    add_expert_load_to_metrics: bool = False
    """Report for each layer with experts the busiest expert's load, the router's entropy and dropped assignments (one
    more reduction)."""
    add_throughput_to_metrics: bool = True
    """Report tflops and throughput (model TFLOP/s per device)."""
    add_memory_to_metrics: bool = True
    """Report memory, GiB."""
    straggler_interval: int | None = key(100, at_least=1, null_means_off=True)
    """Every N iterations compare the times of the processes' forward passes, and log a warning that names the slowest
    one and its host if it is slower than the others by straggler_factor; null: never."""
    straggler_factor: float = key(1.5, above=1)
    """Multiple of the median of the others of its pipeline stage from which on a process counts as slow."""


@dataclass(frozen=True, kw_only=True)
class ModelsConfig:
    """`megatron_wrap.models`: the reference or teacher model of the run."""

    reference: ReferenceModelConfig | None = key(None, kind="copy, base, a mapping, or null")  # noqa: RUF009
    """copy: a frozen copy of the initial policy, for flows such as gpt_dpo; its calculate_outputs reach the loss as
    reference_*. base: the policy without its adapter. A mapping with the keys below: other weights, where they are
    stored, how they follow the policy, or precomputed outputs. null: none."""
    teacher: ReferenceModelConfig | None = key(None, kind="copy, base, a mapping, or null")  # noqa: RUF009
    """The model that gpt_distill learns from, with the same keys; its outputs reach the loss as teacher_*. A run has
    either a reference or a teacher. null: none."""

    @property
    def role(self) -> str:
        """Key of the model, reference or teacher, which is the prefix of its outputs."""
        return "reference" if self.teacher is None else "teacher"

    @property
    def reference_or_teacher(self) -> ReferenceModelConfig | None:
        """The run's reference or teacher model, if any."""
        return self.reference if self.teacher is None else self.teacher

    @property
    def path(self) -> str:
        """Dotted path of the model's key in the YAML."""
        return f"{SECTION_PATHS['models']}.{self.role}"


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """`megatron_wrap.flow`: the algorithm. Its further keys are the fields of the flow's dataclass `Config`; for
    your own flow, select custom and write them next to flow_key, under __override__."""

    flow_key: str
    """Registered flow, or my_package.my_module:MyFlow."""
    packing: bool = False
    """Concatenate the sequences of a micro-batch into a row without padding; attention and positions stay within each
    sequence."""
    options: Mapping[str, Any]
    """The flow's own keys, validated against its dataclass `Config`, if any, when the flow is imported."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """`megatron_wrap.checkpoint`: resuming, and which checkpoints are kept."""

    resume: Literal["auto", "strict", "never"] = "auto"
    """auto: resume from the newest checkpoint in train.common.save, a damaged one is renamed and the older one taken.
    strict: refuse to start if the newest is damaged. never: refuse to start if there is a checkpoint."""
    keep: int | None = key(None, at_least=1, null_means_off=True)
    """Number of newest checkpoints to keep, in addition to the best by best_metric; null: all."""
    max_starts_without_progress: int | None = key(10, at_least=1, null_means_off=True)
    """Refuse to start a run that was started N times from the same iteration, and failed or was killed each time before
    it saved a later one; null: start it each time."""
    best_metric: str | None = None
    """Metric of an evaluation set, SET/METRIC such as validation/loss, by which `wrap.fit` determines the best
    checkpoint, saves and keeps it; null: none."""
    best_metric_mode: Literal["min", "max"] = "min"
    """Whether the lowest or the highest value of best_metric is best."""
    async_save: bool = False
    """Copy the state to host memory, train on, and write the checkpoint by other processes meanwhile; at most one at a
    time."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """stop: a save that fails ends the run. continue: a failed save of save_interval or best_metric is logged, and the
    run continues until the third failure in a row."""
    staging_folder: str | None = None
    """Local folder of the checkpoints of a remote train.common.save (s3://, gs://, hf://), where they are written and
    wait for their upload; shared by all nodes. null: `checkpoints` in the output folder."""
    upload_limit_gib: float | None = key(None, above=0)
    """Size of the checkpoints that may wait for their upload, in GiB; null: three times that of the newest."""
    on_upload_limit: Literal["drop_oldest", "wait", "stop"] = "drop_oldest"
    """Action when a save would exceed upload_limit_gib. drop_oldest: it replaces the oldest that waits, with a warning.
    wait: training waits for the upload. stop: end the run with an error."""
    upload_wait_minutes: float = key(60.0, at_least=0)
    """Minutes that the end of a run waits for its uploads; what is not sent then stays in the staging folder, and the
    next start sends it."""
    export_hf: bool = False
    """Write a Hugging Face folder `hf_ITERATION` to the same folder with each checkpoint."""


@dataclass(frozen=True, kw_only=True)
class BadStepsConfig:
    """`megatron_wrap.bad_steps`: steps whose loss or gradient is not finite, spikes of the loss, and batches without a
    trained token (docs/bad-steps.md)."""

    on_bad_step: Literal["stop", "skip", "rollback"] = "stop"
    """Action at a step whose loss or gradient is not finite. stop: end the run with the cause, before the weights
    change. skip: leave the weights as they are, count the step and warn with the cause. rollback: load the newest
    checkpoint in train.common.save, and train from it without the samples of the step. An overflow under fp16's loss
    scale is not a bad step."""
    max_in_a_row: int = key(5, at_least=1)
    """Number of bad steps in a row that ends the run despite skip."""
    max_rollbacks: int = key(3, at_least=1)
    """Rollbacks of a run; the next bad step ends it despite rollback."""
    spike_threshold: float | None = key(None, above=0, null_means_off=True)
    """A loss that is this number of robust standard deviations, such as 20, above the median of the last spike_window
    losses is also a bad step; null: no loss is."""
    spike_window: int = key(100, at_least=10)
    """Losses that a spike is compared with; until there are that many, no loss is a spike."""
    max_without_loss: int = key(10, at_least=1)
    """Number of batches in a row without a trained token that ends the run; earlier ones are skipped. 1: the first
    one."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """`megatron_wrap.profile`: steps whose time is recorded and divided among kinds of work (docs/profiling.md)."""

    steps: tuple[int, ...] = ()
    """Iterations to profile, such as [10, 11, 12]; the first iteration of a run is 1."""
    output_dir: str | None = None
    """Folder of the traces and tables; null: `profile` in the run's output folder."""
    memory_snapshot: bool = True
    """On GPUs, record the allocations of the step before the profiled ones for https://pytorch.org/memory_viz."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run, decoded. `SECTION_PATHS` has the dotted path of each section in the YAML."""

    name: str
    """File name of the YAML without its ending."""
    arch: ArchConfig
    parallel: ParallelConfig
    train: TrainConfig
    learning_rate: LearningRateConfig
    optimizer: OptimConfig
    dtype: PrecisionConfig
    recompute: RecomputeConfig
    ddp: DDPConfig
    init: InitConfig
    logger: LoggerConfig
    model_provider: ProviderConfig
    adapter: AdapterConfig
    models: ModelsConfig
    flow: FlowConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    bad_steps: BadStepsConfig
    profile: ProfileConfig
    launch: LaunchConfig
    kubernetes: KubernetesConfig
    slurm: SlurmConfig
    resolved: Mapping[str, Any] = field(repr=False)
    """The whole tree as nested plain dictionaries, as it is written beside checkpoints."""
    origins: Mapping[str, Origin] = field(default_factory=dict, repr=False, compare=False)
    """Dotted path -> last line that sets its value, for messages."""
    remote_save: str | None = field(default=None, compare=False)
    """URL of the remote folder whose staging folder is `train.save`; the YAML has it as train.common.save."""
    undeclared: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    """Dotted paths that only the run's YAML sets and no file of the tree: Megatron-Core's fields, a flow's own keys."""
    policy: "RunConfig | None" = field(default=None, repr=False, compare=False)
    """Configuration of the run that a reference or teacher model with its own weights belongs to; None in a run's own
    configuration."""

    @functools.cached_property
    def record(self) -> str:
        """Text of `resolved.yaml` in each checkpoint: `resolved` without secrets as YAML, each value with its origin as
        a comment. Made once, at the first use."""
        title = f"# {self.name}, resolved by megatron-wrap: each value and the line that set it\n"
        return title + schema_line() + dump_yaml(without_secrets(self.resolved), self.origins)

    def value(self, name: str) -> Any:
        """The value of section.key, with the names of the fields."""
        section, _, key = name.partition(".")
        return getattr(getattr(self, section), key)

    def set_by(self, path: str) -> SetBy:
        """Kind of origin of the value at the dotted `path`."""
        return self.origins[path].set_by if path in self.origins else SetBy.TREE

    def located(self, path: str) -> str:
        """`file:line path` of the value at the dotted `path`, the beginning of a message about it."""
        return f"{self.origins[path].node.where} {path}" if path in self.origins else path


SECTION_PATHS: dict[str, str] = {
    "arch": "megatron_lm.model.arch",
    "parallel": "megatron_lm.model.parallel",
    "train": "megatron_lm.train.common",
    "learning_rate": "megatron_lm.train.learning-rate",
    "optimizer": "megatron_lm.train.optimizer",
    "dtype": "megatron_lm.train.dtype",
    "recompute": "megatron_lm.train.recompute",
    "ddp": "megatron_lm.misc.ddp",
    "init": "megatron_wrap.init",
    "logger": "megatron_wrap.logger",
    "model_provider": "megatron_wrap.model_provider",
    "adapter": "megatron_wrap.adapter",
    "models": "megatron_wrap.models",
    "flow": "megatron_wrap.flow",
    "data": "megatron_wrap.data",
    "checkpoint": "megatron_wrap.checkpoint",
    "bad_steps": "megatron_wrap.bad_steps",
    "profile": "megatron_wrap.profile",
    "launch": "megatron_wrap.launch.common",
    "kubernetes": "megatron_wrap.launch.kubernetes",
    "slurm": "megatron_wrap.launch.slurm",
}
"""Field of `RunConfig` -> dotted path in the tree."""

SECTION_AT = {path: section for section, path in SECTION_PATHS.items()}
"""Dotted path of a section of the YAML -> field of `RunConfig`."""

CATCH_ALL = frozenset({"upstream", "options"})
"""Fields of sections that hold the keys which no other field declares; they are no keys themselves."""

UPSTREAM: dict[str, str] = {
    "arch": "TransformerConfig",
    "optimizer": "OptimizerConfig",
    "ddp": "DistributedDataParallelConfig",
}
"""Sections that accept further keys -> the Megatron-Core dataclass whose fields these are."""
