"""The facade on one process: the lifecycle of a run, its counters, records, schedule and cleanup.

Each test runs in a forked process with a group of its own.
"""

import builtins
import gc
import logging
import math
import multiprocessing
import os
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from _runs import read_rows, started, write_rows

from megatron_wrap.core import MegatronWrap
from megatron_wrap.engine.memory import KEY as LINEAR_CROSS_ENTROPY
from megatron_wrap.engine.memory import avoidable_logits_bytes, memory_advice
from megatron_wrap.engine.passes.loss import StartedReduction
from megatron_wrap.errors import DataError, FlowError, MegatronWrapError, TrainingError
from megatron_wrap.metrics.declared import ENGINE_METRICS
from megatron_wrap.platform.megatron_core.versions import router_loss_values
from megatron_wrap.utils.metric_loggers import MetricLoggerContext

pytestmark = pytest.mark.process_group

TRAIN, RATE, LOGGER = "megatron_lm.train.common", "megatron_lm.train.learning-rate", "megatron_wrap.logger"


def data(count: int = 24) -> list[dict[str, list[int]]]:
    """Tokenized samples of unequal lengths; the first token identifies the sample."""
    generator = numpy.random.default_rng(3)
    lengths = generator.integers(5, 18, count)
    return [
        {"input_ids": [index, *generator.integers(0, 60, n - 1).tolist()], "loss_mask": [0, *[1] * (n - 1)]}
        for index, n in enumerate(lengths)
    ]


# ---- lifecycle ----


def test_constructing_has_no_side_effects():
    before = os.listdir(), builtins.print, list(warnings.filters)
    MegatronWrap("run.yaml")
    assert (os.listdir(), builtins.print, list(warnings.filters)) == before
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda wrap: wrap.setup_model_and_optimizer(), r"call wrap\.initialize\(\) first"),
        (lambda wrap: wrap.tp_size, r"call wrap\.initialize\(\) first"),
        (lambda wrap: wrap.dp_group, r"call wrap\.initialize\(\) first"),
        (lambda wrap: wrap.train([]), r"call wrap\.initialize\(\) and wrap\.setup_model_and_optimizer\(\) first"),
        *(
            (call, "setup_model_and_optimizer")
            for call in (
                *(lambda wrap: wrap.iteration, lambda wrap: wrap.evaluate({}), lambda wrap: wrap.forward([])),
                *(lambda wrap: wrap.save(), lambda wrap: wrap.load("x"), lambda wrap: next(wrap.batches([]))),
                lambda wrap: wrap.log_last_metrics(),
            )
        ),
    ],
)
def test_a_call_out_of_order_names_the_call_that_must_come_first(call, message):
    wrap = MegatronWrap("run.yaml")
    with pytest.raises(MegatronWrapError, match=message):
        call(wrap)
    wrap.close()  # without initialize


def test_close_ends_a_run_and_another_can_begin():
    losses = []
    for _ in range(2):
        with started() as wrap:
            wrap.initialize()  # a second call does nothing
            sizes = (wrap.tp_size, wrap.pp_size, wrap.dp_size, wrap.cp_size, wrap.ep_size)
            ranks = (wrap.tp_rank, wrap.pp_rank, wrap.dp_rank, wrap.cp_rank, wrap.ep_rank)
            assert (sizes, ranks) == ((1,) * 5, (0,) * 5)
            assert all(
                dist.get_world_size(getattr(wrap, f"{axis}_group")) == 1 for axis in ("tp", "pp", "dp", "cp", "ep")
            )
            losses.append(wrap.train(data()[:4])["loss"])
        assert not dist.is_initialized()
        wrap.close()
        with pytest.raises(MegatronWrapError, match=r"call wrap\.initialize\(\)"):
            wrap.train(data()[:4])
    assert losses[0] == losses[1]


def test_a_model_is_built_without_searches_for_reference_cycles(monkeypatch):
    def provider(request: Any) -> Any:
        assert not gc.isenabled()
        raise FlowError("no model")

    monkeypatch.setattr("megatron_wrap.setup.model_chunks.MegatronModelProviderEntry.get_provider", lambda _: provider)
    with pytest.raises(FlowError, match="no model"), started():
        pass
    assert gc.isenabled()


def test_each_run_chooses_its_attention_kernels():
    """Megatron-Core keeps the choice in environment variables, and a later model with another choice would fail."""

    def chosen() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith("NVTE_")}

    before = chosen()
    for name in ("unfused", "auto"):
        with started(f"megatron_lm.model.arch.attention_backend={name}") as wrap:
            assert wrap.state.transformer_config.attention_backend.name == name
            assert os.environ["NVTE_FUSED_ATTN"] == str(int(name == "auto"))
        assert chosen() == before


def test_deterministic_kernels_are_those_of_the_run(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring"}
    before = {name: os.environ.get(name) for name in variables}
    losses = []
    for _ in range(2):
        with started("megatron_lm.model.arch.deterministic_mode=true") as wrap:
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert {name: os.environ[name] for name in variables} == variables
            losses.append(wrap.train(data()[:4])["loss"])
        assert not torch.are_deterministic_algorithms_enabled()
        assert {name: os.environ.get(name) for name in variables} == before
    assert losses[0] == losses[1]


def test_close_keeps_the_caller_s_process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with started() as wrap:
        wrap.train(data()[:4])
    assert dist.is_initialized()
    assert len(dist.distributed_c10d._world.pg_map) == 1


def test_the_host_program_is_changed_between_initialize_and_close_only(monkeypatch, capfd):
    monkeypatch.setenv("CONSOLE_LOG_LEVEL", "DEBUG")

    logging.getLogger().addHandler(logging.NullHandler())
    before = builtins.print, logging.getLogger().handlers[:], list(warnings.filters)
    patches = [f"{LOGGER}.{name}=true" for name in ("patch_print", "remove_logging", "ignore_warning")]
    wrap = MegatronWrap("run.yaml", overrides=patches)
    assert (builtins.print, logging.getLogger().handlers, list(warnings.filters)) == before
    wrap.initialize()
    assert builtins.print is not before[0]
    assert logging.getLogger().handlers == []
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn("hidden", FutureWarning, stacklevel=1)
    assert caught == []
    print("printed text")
    wrap.close()
    assert (builtins.print, logging.getLogger().handlers) == before[:2]
    assert [entry for entry in warnings.filters if entry in before[2]] == before[2]
    captured = capfd.readouterr()
    assert "printed text" in captured.err
    assert "printed text" not in captured.out


def test_a_failed_initialize_leaves_nothing_changed(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")  # a global batch of 4 is not divisible by 3 replicas * micro-batches of 2

    wrap = MegatronWrap("run.yaml", overrides=[f"{LOGGER}.patch_print=true"])
    real = builtins.print
    with pytest.raises(MegatronWrapError, match="3"):
        wrap.initialize()
    assert builtins.print is real
    assert not dist.is_initialized()


# ---- steps ----

STEP_NAMES = (
    "iteration loss grad_norm learning_rate loss_scale global_batch_size consumed_samples consumed_tokens num_tokens "
    "skipped_iterations bad_steps skipped_samples elapsed_time tokens_per_second tokens_per_second_per_device tflops "
    "throughput memory_allocated memory_reserved memory_max"
)


def test_metrics_of_a_step():
    with started() as wrap:
        batch = data()[:4]
        metrics = wrap.train(batch)
        tokens = sum(len(sample["input_ids"]) - 1 for sample in batch)
        assert metrics.keys() == {*STEP_NAMES.split(), "truncated_samples"}
        assert (metrics["iteration"], metrics["consumed_samples"], metrics["consumed_tokens"]) == (1, 4, tokens)
        assert (metrics["skipped_iterations"], metrics["loss_scale"]) == (0, 1.0)
        assert metrics["truncated_samples"] == sum(len(sample["input_ids"]) > 17 for sample in batch)
        assert metrics["tokens_per_second"] == pytest.approx(tokens / metrics["elapsed_time"])
        assert metrics["tflops"] == metrics["throughput"] > 0
        assert 0 < metrics["loss"] < 2 * math.log(60)
        assert (wrap.iteration, wrap.consumed_samples) == (1, 4)


def test_every_metric_of_the_engine_is_declared():
    arch = "megatron_lm.model.arch"
    losses = {"moe_router_load_balancing_type": "[aux_loss, seq_aux_loss, global_aux_loss]", "moe_z_loss_coeff": "0.1"}
    experts = {"num_experts": "2", **losses, "moe_aux_loss_coeff": "[0.1, 0.1, 0.1]"}
    switches = [f"{LOGGER}.add_{name}_to_metrics=true" for name in ("params_norm", "num_zeros_in_grad")]
    with started(*switches, *(f"{arch}.{name}={value}" for name, value in experts.items())) as wrap:
        assert wrap.train(data()[:4]).keys() == ENGINE_METRICS.keys() | {"truncated_samples"}


def test_a_model_with_more_layers_of_experts_follows_another():
    """Megatron-Core's sums of router losses have the layers of the first model of the process."""
    arch = "megatron_lm.model.arch"
    for layers in (1, 3):
        loss = [f"{arch}.moe_router_load_balancing_type=aux_loss", f"{arch}.moe_aux_loss_coeff=0.1"]
        with started(f"{arch}.num_layers={layers}", f"{arch}.num_experts=2", *loss) as wrap:
            assert 0.9 < wrap.train(data()[:4])["load_balancing_loss"] < 2
            assert len(router_loss_values()["load_balancing_loss"]) == layers
        assert router_loss_values() == {}  # they also refer to the process groups


def test_grad_norm_is_reported_without_clipping_too():
    norms = []
    for clip in (1.0, 0.0):
        with started(f"megatron_lm.train.optimizer.clip_grad={clip}") as wrap:
            norms.append(wrap.train(data()[:4])["grad_norm"])
    assert norms[0] == norms[1] > 0


@pytest.mark.parametrize(("dtype", "distributed"), [("fp32", "true"), ("bf16", "true"), ("bf16", "false")])
def test_fused_clipping_trains_alike(dtype, distributed):
    """The bits of training with a pass for clipping, which this norm needs, and one that copies to the weights."""
    trained = []
    for fused in ("false", "true"):
        optimizer = "megatron_lm.train.optimizer."
        keys = [f"{optimizer}clip_grad=0.05", f"{optimizer}fused_clipping={fused}"]
        keys.append(f"{optimizer}use_distributed_optimizer={distributed}")
        with started(*keys, f"megatron_lm.train.dtype.__select__={dtype}") as wrap:
            metrics = [wrap.train(data()[4 * step : 4 * step + 4]) for step in range(3)]
            weights = [parameter.detach().clone() for parameter in wrap.state.chunks[0].parameters()]
            adam = wrap.state.optimizer.chained_optimizers[0].optimizer
            assert len(getattr(adam, "copies", {})) == (len(weights) if fused == "true" and dtype == "bf16" else 0)
        trained.append((weights, [(each["loss"], each["grad_norm"]) for each in metrics]))
    (weights, metrics), (expected, expected_metrics) = trained
    assert metrics == expected_metrics
    assert min(norm for _, norm in metrics) > 0.05
    assert all(torch.equal(*pair) for pair in zip(weights, expected, strict=True))


@pytest.mark.parametrize(
    ("key", "order"),
    [("optimizer.fused_clipping=true", ["update", "wait"]), ("optimizer.fused_clipping=false", ["wait", "update"])],
)
def test_an_update_that_needs_no_number_of_the_host_is_queued_before_the_host_waits(key, order, monkeypatch):
    calls: list[str] = []

    def recorded(owner: Any, name: str, call: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda self, *args: (calls.append(call), original(self, *args))[1])

    with started(f"megatron_lm.train.{key}") as wrap:
        recorded(type(wrap.state.optimizer), "step_with_ready_grads", "update")
        recorded(StartedReduction, "finish", "wait")
        wrap.train(data()[:4])
    assert calls == order


def test_fused_clipping_skips_a_step_above_megatron_core_s_threshold():
    with started("megatron_lm.train.optimizer.fused_clipping=true") as wrap:
        weights = [parameter.detach().clone() for parameter in wrap.state.chunks[0].parameters()]
        for part in wrap.state.optimizer.chained_optimizers:
            part.config.grad_norm_skip_threshold = 1e-6
        assert wrap.train(data()[:4])["grad_norm"] > 1e-6
        assert all(torch.equal(*pair) for pair in zip(wrap.state.chunks[0].parameters(), weights, strict=True))


def test_a_batch_of_another_size_is_refused_and_the_run_continues():
    with started() as wrap:
        for wrong in (data()[:3], data()[:8], []):
            with pytest.raises(DataError, match=rf"global_batch_size = 4 .*{len(wrong)}"):
                wrap.train(wrong)
        with pytest.raises(DataError, match=r"wrap\.train: .*None"):
            wrap.train()
        assert wrap.train(data()[:4])["iteration"] == 1


def test_a_step_past_train_iters_is_refused_and_batches_end():
    with started(f"{TRAIN}.train_iters=2") as wrap:
        assert sum(1 for batch in wrap.batches(data()) if wrap.train(batch)) == wrap.iteration == wrap.train_iters == 2
        with pytest.raises(TrainingError, match=r"iteration 2 .*megatron_lm\.train\.common\.train_iters 2 "):
            wrap.train(data()[:4])
        assert wrap.iteration == 2


def test_a_flow_may_not_report_the_engine_s_metrics_except_the_loss():
    from megatron_wrap.flow import MegatronWrapFlowEntry, MegatronWrapGPTModelSFTFlow

    @MegatronWrapFlowEntry.register("clash")
    class Clash(MegatronWrapGPTModelSFTFlow):
        def calculate_loss(self, loss_inputs: Any, model_forward_output: Any) -> Any:
            loss = super().calculate_loss(loss_inputs, model_forward_output).loss_sum / loss_inputs["loss_mask"].sum()
            return loss, {"loss": 123.0, **({"grad_norm": 1.0} if name else {})}

    name = ""

    with started("megatron_wrap.flow.flow_key=clash") as wrap:
        assert wrap.train(data()[:4])["loss"] < 10
        assert wrap.evaluate({"set": data()[:4]})["eval/set/loss"] < 10
    name = "grad_norm"
    with (
        started("megatron_wrap.flow.flow_key=clash") as wrap,
        pytest.raises(FlowError, match=r"\['grad_norm'\].*rename"),
    ):
        wrap.train(data()[:4])


def test_metrics_missing_from_the_first_step_are_refused():
    from megatron_wrap.flow import LossOutput, MegatronWrapFlowEntry, MegatronWrapGPTModelSFTFlow

    extra: dict[str, float] = {}

    @MegatronWrapFlowEntry.register("growing")
    class Growing(MegatronWrapGPTModelSFTFlow):
        def calculate_loss(self, loss_inputs: Any, model_forward_output: Any) -> Any:
            return LossOutput(super().calculate_loss(loss_inputs, model_forward_output).loss_sum, dict(extra))

    with started("megatron_wrap.flow.flow_key=growing") as wrap:
        wrap.train(data()[:4])
        extra["new"] = 1.0
        with pytest.raises(FlowError, match=r"metrics \['new'\].*first step.*every micro-batch"):
            wrap.train(data()[:4])
        assert "eval/set/new" in wrap.evaluate({"set": data()[:4]})  # each evaluation has separate names


# ---- batches, ramp-up, schedule ----


def test_batches_are_a_permutation_of_each_epoch_and_a_resumed_run_continues_them():
    taken: dict[str, list[Any]] = {"straight": [], "resumed": []}
    for save, until in (("straight", 8), ("resumed", 3), ("resumed", 8)):
        with started(f"{TRAIN}.train_iters=8", f"{TRAIN}.save={save}", "megatron_wrap.data.num_workers=1") as wrap:
            for batch in wrap.batches(data()):
                if wrap.iteration == until:
                    break
                taken[save].append([sample["input_ids"][0] for sample in batch])
                wrap.train(batch)
            workers = multiprocessing.active_children()
            wrap.save()
            assert multiprocessing.active_children() == workers  # Megatron-Core would start one
    assert taken["resumed"] == taken["straight"]
    assert len(taken["straight"]) == 8
    first_epoch = [sample for batch in taken["straight"][:6] for sample in batch]
    assert sorted(first_epoch) == list(range(24)) != first_epoch


def test_the_global_batch_ramps_up_and_the_schedule_counts_iterations():
    """From 2 in increments of 2 over 12 samples to 8: each size takes four samples, and the full size begins after
    twelve (as in Megatron-Core 0.16's RampupBatchsizeNumMicroBatchesCalculator)."""

    ramp = [f"{TRAIN}.rampup_batch_size=[2,2,12]", f"{TRAIN}.global_batch_size=8", f"{TRAIN}.train_iters=8"]
    with started(*ramp, f"{RATE}.lr_warmup_iters=3") as wrap:
        sizes, rates = [], []
        with pytest.raises(DataError, match=r"global_batch_size = 2 .*8"):
            wrap.train(data()[:8])
        for batch in wrap.batches(data()):
            assert len(batch) == wrap.global_batch_size
            sizes.append(len(batch))
            rates.append(wrap.train(batch)["learning_rate"])
        assert sizes == [2, 2, 4, 6, 8, 8, 8, 8]
        assert wrap.consumed_samples == sum(sizes)
        # warm-up ends after its three iterations, the decay after the last
        assert rates[0] == 0.0
        assert rates[3] == pytest.approx(1e-2)
        assert wrap.state.lr_scheduler.get_lr({}) == pytest.approx(1e-3)


def test_a_run_of_samples_grows_its_batch_and_counts_its_schedule_in_samples():
    ramp = [f"{TRAIN}.rampup_batch_size=[2,2,12]", f"{TRAIN}.global_batch_size=8", f"{TRAIN}.train_iters=null"]
    rate = [f"{RATE}.lr_warmup_samples=8", f"{RATE}.lr_decay_samples=40", f"{RATE}.lr_decay_style=linear"]
    with started(*ramp, *rate, f"{TRAIN}.train_samples=50") as wrap:
        steps = [(len(batch), wrap.train(batch)["learning_rate"]) for batch in wrap.batches(data())]
    assert [size for size, _ in steps] == [2, 2, 4, 6, 8, 8, 8, 8]  # the last four samples are no whole batch
    # Megatron-Core's schedule at 0, 2, 4, 8, ... samples: up over 8, then down to the floor at 40
    expected = [
        1e-2 * at / 8 if at <= 8 else max(1e-3, 1e-2 - 9e-3 * (at - 8) / 32) for at in (0, 2, 4, 8, 14, 22, 30, 38)
    ]
    assert [rate for _, rate in steps] == pytest.approx(expected)


STYLES = {
    "constant": {},
    "linear": {},
    "cosine": {},
    "inverse-square-root": {},
    "WSD": {"lr_wsd_decay_iters": 3, "lr_wsd_decay_style": "linear"},
}


# the others are named alike and differ in Megatron-Core's own scheduler
@pytest.mark.parametrize(
    "style",
    [style if style in ("cosine", "WSD") else pytest.param(style, marks=pytest.mark.matrix) for style in STYLES],
)
def test_learning_rates_and_weight_decay_are_megatron_core_s(style):
    """Compared with Megatron-Core's scheduler, stepped in iterations."""

    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD(
        [{"params": [parameter], "wd_mult": 1.0, "lr_mult": 1.0, "max_lr": 1e-2, "min_lr": 1e-3}]
    )
    expected = OptimizerParamScheduler(
        optimizer,
        init_lr=1e-4,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=2,
        lr_decay_steps=6,
        lr_decay_style=style,
        start_wd=0.01,
        end_wd=0.1,
        wd_incr_steps=8,
        wd_incr_style="linear",
        wsd_decay_steps=STYLES[style].get("lr_wsd_decay_iters"),
        lr_wsd_decay_style=STYLES[style].get("lr_wsd_decay_style", "exponential"),
    )
    settings = {"lr_warmup_init": 1e-4, "lr_warmup_iters": 2, "lr_decay_iters": 6, "lr_decay_style": style}
    overrides = [f"{RATE}.{name}={value}" for name, value in {**settings, **STYLES[style]}.items()]
    decay = {"start_weight_decay": 0.01, "end_weight_decay": 0.1, "weight_decay_incr_style": "linear"}
    overrides += [f"megatron_lm.train.optimizer.{name}={value}" for name, value in decay.items()]
    with started(f"{TRAIN}.train_iters=8", *overrides) as wrap:
        matrices = [group for group in wrap.state.optimizer.param_groups if group["wd_mult"] == 1.0]
        for _ in range(8):
            group = optimizer.param_groups[0]
            assert [g["lr"] for g in matrices] == pytest.approx([group["lr"]] * len(matrices))
            assert matrices[0]["weight_decay"] == pytest.approx(group["weight_decay"])
            assert wrap.train(data()[:4])["learning_rate"] == pytest.approx(group["lr"])
            expected.step(increment=1)


def test_warm_up_is_a_fraction_of_the_decay():
    with started(f"{RATE}.lr_warmup_fraction=0.5", f"{RATE}.lr_decay_style=constant") as wrap:
        rates = [wrap.train(batch)["learning_rate"] for batch in wrap.batches(data())]
    assert rates == pytest.approx([0, 1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2, 1e-2])


@pytest.mark.parametrize(
    ("interval", "due"), [("2", [0, 2, 4, 6]), pytest.param("4", [0, 4], marks=pytest.mark.matrix), ("null", [])]
)
def test_an_evaluation_is_due_before_the_first_step_and_after_each_interval(interval, due):
    with started(f"{TRAIN}.eval_interval={interval}") as wrap:
        actual = [0] if wrap.evaluation_due else []
        for batch in wrap.batches(data()):
            wrap.train(batch)
            actual += [wrap.iteration] if wrap.evaluation_due else []
    assert actual == due


# ---- evaluation and forward ----


def test_evaluation_sets_by_name_and_their_limit():
    with started(f"{TRAIN}.eval_iters=2") as wrap:  # of 4 samples each
        actual = wrap.evaluate({"long": data(), "head": data()[:8], "one": data()[:1]})
        names = ("loss", "truncated_samples")
        assert list(actual) == [f"eval/{of}/{name}" for of in ("long", "head", "one") for name in names]
        assert actual["eval/long/loss"] == actual["eval/head/loss"] != actual["eval/one/loss"]
        with pytest.raises(DataError, match="'none' is empty"):
            wrap.evaluate({"none": []})
        assert wrap.forward([]) == []


def test_evaluation_sets_of_the_configuration():
    for name in ("train", "easy"):
        write_rows(f"{name}.jsonl", data())
    selected = ["megatron_wrap.data.__select__=jsonl", "megatron_wrap.data.train=train.jsonl"]
    with started(*selected, "megatron_wrap.data.validation=easy.jsonl") as wrap:
        assert [len(batch) for batch in wrap.batches() if wrap.train(batch)] == [4] * 6
        actual = wrap.evaluate()
        assert actual["eval/validation/loss"] == wrap.evaluate({"validation": data()})["eval/validation/loss"]


def test_outputs_of_a_flow_that_collates_several_sequences_of_a_sample_are_refused():
    from megatron_wrap.flow import MegatronWrapFlowEntry, MegatronWrapGPTModelSFTFlow

    @MegatronWrapFlowEntry.register("doubled")
    class Doubled(MegatronWrapGPTModelSFTFlow):
        def collate_data_micro_batch(self, iterator: Any) -> Any:
            return tuple(
                {name: torch.cat([tensor, tensor]) for name, tensor in part.items()}
                for part in super().collate_data_micro_batch(iterator)
            )

    with started("megatron_wrap.flow.flow_key=doubled") as wrap:
        wrap.train(data()[:4])
        with pytest.raises(FlowError, match=r"calculate_outputs: .*one row for each of the 2 samples"):
            wrap.forward(data()[:4])


def test_a_flow_that_breaks_its_contract_fails_before_the_model_is_built():
    from megatron_wrap.flow import MegatronWrapFlowEntry, MegatronWrapGPTModelSFTFlow

    @MegatronWrapFlowEntry.register("negative")
    class Negative(MegatronWrapGPTModelSFTFlow):
        def get_loss_weight(self, loss_inputs: Any) -> float:
            return -1.0

    write_rows("train.jsonl", data())
    selected = ["megatron_wrap.data.__select__=jsonl", "megatron_wrap.data.train=train.jsonl"]
    wrap = MegatronWrap("run.yaml", overrides=[*selected, "megatron_wrap.flow.flow_key=negative"])
    wrap.initialize()
    with pytest.raises(FlowError, match=r"Negative\.get_loss_weight.*-1\.0"):
        wrap.setup_model_and_optimizer()
    assert wrap._run is None
    wrap.close()


# ---- records ----


def test_records_of_a_resumed_run():
    """Lines of steps after the checkpoint are dropped; the resumed run appends its own."""

    reported: list[dict[str, float]] = []
    for until in (3, 6):
        with started(f"{TRAIN}.save=saved", f"{TRAIN}.save_interval=2", f"{TRAIN}.eval_interval=3") as wrap:
            assert wrap.iteration == (0 if until == 3 else 2)
            while wrap.iteration < until:
                if wrap.evaluation_due:
                    wrap.evaluate({"set": data()[:4]})
                start = 4 * wrap.iteration
                reported.append(wrap.train(data()[start : start + 4]))
                wrap.log_last_metrics()
                wrap.log_last_metrics()  # a second call adds no line
    actual = read_rows("outputs/run/metrics.jsonl")
    assert [line["iteration"] for line in actual] == [0, 1, 2, 3, 3, 4, 5, 6]
    evaluations = [line for line in actual if "loss" not in line]
    assert [set(line) for line in evaluations] == [{"iteration", "eval/set/loss", "eval/set/truncated_samples"}] * 2
    steps = [line for line in actual if "loss" in line]
    assert steps == [*reported[:2], *reported[3:]]
    assert reported[2]["loss"] == reported[3]["loss"]  # step 3, taken twice


def test_the_representation_shows_model_layout_and_iteration() -> None:
    wrap = MegatronWrap("run.yaml")
    assert repr(wrap) == "<MegatronWrap run: 1 layer of 32, gpt_sft, not initialized, no model yet>"
    with started() as wrap:
        wrap.train(data()[:4])
        assert repr(wrap) == "<MegatronWrap run: 1 layer of 32, gpt_sft, tp1 pp1 cp1 dp1, iteration 1 of 6>"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "; nothing was saved, because megatron_lm.train.common.save is null"),
        ((f"{TRAIN}.save=all",), "; there is no checkpoint yet"),
        ((f"{TRAIN}.save=all", f"{TRAIN}.save_interval=2"), "; newest checkpoint: all/iter_0000002; the same command"),
        (
            (f"{TRAIN}.save=all", f"{TRAIN}.save_interval=2", "megatron_wrap.checkpoint.resume=never"),
            "all/iter_0000002; to resume from it, set megatron_wrap.checkpoint.resume=auto",
        ),
    ],
)
def test_an_interrupt_says_where_the_run_stands_and_how_to_resume(overrides, message) -> None:
    def train() -> None:
        with started(*overrides) as wrap:
            for batch in wrap.batches(data()):
                wrap.train(batch)
                if wrap.iteration == 3:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as interrupt:
        train()
    assert "interrupted after iteration 3 of 6; " in str(interrupt.value)
    assert message in str(interrupt.value)


def test_each_step_is_recorded_for_every_log_interval(capfd):
    with started(f"{TRAIN}.log_interval=4", f"{LOGGER}.output_dir=elsewhere") as wrap:
        for batch in wrap.batches(data()):
            wrap.train(batch)
            wrap.log_last_metrics()
    assert [line["iteration"] for line in read_rows("elsewhere/metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    shown = [
        text.split("iteration ")[1].split("/")[0] for text in capfd.readouterr().err.splitlines() if " | loss " in text
    ]
    assert shown == ["4", "6"]  # each interval, and the last


def test_a_custom_metric_logger(monkeypatch):
    received: list[Any] = []

    class Mine:
        def __init__(self, context: MetricLoggerContext) -> None:
            received.append(Path(context.output_dir).name)

        def log(self, step: int, metrics: Any) -> None:
            received.append((step, metrics["loss"]))

        def close(self) -> None:
            received.append("closed")

    from megatron_wrap.utils import metric_loggers

    monkeypatch.setattr(metric_loggers, "Mine", Mine, raising=False)

    with started(f"{LOGGER}.metric_loggers=[megatron_wrap.utils.metric_loggers:Mine]") as wrap:
        loss = wrap.train(data()[:4])["loss"]
        wrap.log_last_metrics()
    assert received == ["run", (1, loss), "closed"]


def test_a_step_that_does_not_fit_into_memory_says_what_to_change(monkeypatch):
    def does_not_fit(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with started("megatron_lm.train.common.micro_batch_size=4") as wrap:
        monkeypatch.setattr(type(wrap.state.pipeline_schedule), "forward_backward", does_not_fit)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            wrap.train(data()[:4])
    first, *rest = str(caught.value).splitlines()
    assert first == "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert rest[0] == "to use less memory, the cheapest first:"
    keys = [line.split(":")[0].strip() for line in rest[1:]]
    assert keys[:3] == [
        LINEAR_CROSS_ENTROPY,
        "megatron_lm.train.common.micro_batch_size",
        "megatron_lm.train.recompute.__select__",
    ]


@pytest.mark.parametrize("is_on", [False, True])
def test_logits_that_linear_cross_entropy_would_not_store(is_on):
    """A micro-batch of 2 sequences, in fp32, and the gradient; the vocabulary is padded to a multiple of 128."""
    key = f"{LINEAR_CROSS_ENTROPY}={str(is_on).lower()}"
    with started("megatron_lm.train.common.micro_batch_size=2", key) as wrap:
        padded = -(-wrap.config.arch.vocab_size // 128) * 128
        state = wrap.state
        parts = state.config, state.parallel, state.chunks, state.shape.vocab_size
        size = avoidable_logits_bytes(*parts)
        assert size == (0 if is_on else 2 * 2 * wrap.config.train.seq_length * padded * 4)
        assert (LINEAR_CROSS_ENTROPY in memory_advice(*parts)) is not is_on
