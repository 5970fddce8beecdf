"""CUDA graphs of the layers train as the layers themselves, on one GPU, under tensor, data, context and expert
parallelism.
Where a rank hangs, the stacks of all its threads are printed after `LIMIT` seconds, and it ends."""

import faulthandler
import sys
import time
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import numpy
from _implementations import IMPLEMENTATIONS
from _started import started

CONFIG = Path(__file__).parents[2] / "scripts/benchmark/overhead.yaml"
LIMIT = 40
EXPERTS = {
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 128,
    "moe_shared_expert_intermediate_size": 128,
    "moe_aux_loss_coeff": 0.01,
    "moe_router_dtype": "fp32",
    "qk_layernorm": "true",
}


def overrides(implementation: str, graphs: bool, *more: str, axis: str = "tensor_model") -> list[str]:
    """Of a run in bf16 over all processes of an axis: tensor_model (with sequence parallelism), context, data or
    expert_model, where the layers have experts."""
    arch = "megatron_lm.model.arch"
    if axis == "expert_model":
        more += tuple(f"{arch}.{name}={value}" for name, value in EXPERTS.items())
        more += ("megatron_wrap.logger.add_expert_load_to_metrics=true",)
    if axis == "tensor_model" and implementation == "torch":  # chosen with graphs alone, and it adds in another order
        more += ("megatron_lm.model.parallel.tp_comm_overlap=true",)
    return [
        *(
            []
            if axis == "data"
            else [f"megatron_lm.model.parallel.{axis}_parallel_size={torch.distributed.get_world_size()}"]
        ),
        f"{arch}.transformer_impl={implementation}",
        f"{arch}.cuda_graph_impl={'local' if graphs else 'none'}",
        "megatron_lm.train.dtype.__select__=bf16",
        "megatron_lm.train.learning-rate.lr_warmup_iters=1",  # the first step keeps the weights
        *more,
    ]


def phase(name: str) -> None:
    """Print where this rank is."""
    print(f"{time.strftime('%X')} rank {torch.distributed.get_rank()}: {name}", file=sys.stderr, flush=True)


def train(implementation: str, graphs: bool, axis: str) -> dict:
    """Losses of steps with an evaluation of fewer rows between them, the steps' metrics of routers, seconds of the last
    step, and the gradients of a batch with the first weights, by the local parameter's name. With graphs, the first
    step captures and the others, and these gradients, replay."""
    from megatron_wrap.engine.step import gradients_of_batch

    faulthandler.dump_traceback_later(LIMIT, exit=True)
    phase(f"{implementation}, graphs {graphs}")
    with started(CONFIG, overrides(implementation, graphs, axis=axis)) as wrap:
        tokens = numpy.random.default_rng(3).integers(0, 4096, (wrap.global_batch_size, 257))
        samples = [{"input_ids": row.tolist(), "loss_mask": [1] * 257} for row in tokens]
        losses, routed = [], []
        for step in range(4):
            phase(f"step {step + 1}")
            begun = time.perf_counter()
            metrics = wrap.train(samples)
            seconds = time.perf_counter() - begun
            losses.append(metrics["loss"])
            routed.append([value for name, value in metrics.items() if "experts/" in name or "balancing" in name])
            if step == 0:
                phase("gradients")
                gradients_of_batch(wrap.state, samples)
                gradients = {
                    name: parameter.main_grad.float().cpu().numpy()
                    for name, parameter in wrap.state.chunks[0].named_parameters()
                }
            if step in (0, 1):
                phase("evaluation")
                losses.append(wrap.evaluate({"some": samples[:3]})["eval/some/loss"])
        captured = [
            runner.fwd_graph is not None and runner.bwd_graph is not None
            for module in wrap.state.chunks[0].modules()
            for runner in getattr(module, "cudagraph_runners", [])
        ]
        assert all(captured)
        assert len(captured) == (wrap.config.arch.num_layers if graphs else 0)
        phase("close")
    phase("closed")
    faulthandler.cancel_dump_traceback_later()
    return {"losses": losses, "routed": routed, "seconds": seconds, "gradients": gradients}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("size", "axis"),
    [
        (1, "data"),
        (1, "expert_model"),
        *(pytest.param(2, axis, marks=pytest.mark.gpus(2)) for axis in ("tensor_model", "data", "expert_model")),
    ],
)
def test_graphs_train_as_the_layers_themselves(size, axis, implementation, ranks):
    check(ranks(size), axis, implementation)


@pytest.mark.gpus(2)
def test_graphs_under_context_parallelism_train_as_the_layers_themselves(ranks):
    """Of Transformer Engine's layers they are refused."""
    check(ranks(2), "context", "torch")


def check(pool, axis, implementation):
    with_graphs, plain = (pool.run(train, implementation, graphs, axis) for graphs in (True, False))
    for ours, expected in zip(with_graphs, plain, strict=True):
        differences = {
            name: float(abs(ours["gradients"][name] - value).max() / abs(value).max())
            for name, value in expected["gradients"].items()
        }
        print("losses", ours["losses"], "without graphs", expected["losses"])
        print("seconds", ours["seconds"], "without graphs", expected["seconds"])
        print("largest difference of a gradient, relative to its largest value", max(differences.values()))
        numpy.testing.assert_allclose(ours["losses"], expected["losses"], rtol=1e-3)
        # after the first step's passes the layers run a few more times for their capture, which must not count; later,
        # a token whose scores are close may have another expert
        numpy.testing.assert_allclose(ours["routed"][0], expected["routed"][0], rtol=1e-5)
        numpy.testing.assert_allclose(ours["routed"], expected["routed"], rtol=2e-2)
        assert max(differences.values()) < 2e-2, differences


def part_of_a_run(folder: Path, steps: int) -> list[float]:
    """Losses of steps with dropout, from the last checkpoint in the folder if there is one; saves at the end."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    more = ("megatron_lm.model.arch.hidden_dropout=0.1", f"megatron_lm.train.common.save={folder}")
    with started(CONFIG, overrides("torch", True, *more)) as wrap:
        tokens = numpy.random.default_rng(3).integers(0, 4096, (6, wrap.global_batch_size, 257))
        first, losses = wrap.iteration, []
        for batch in tokens[first : first + steps]:
            samples = [{"input_ids": row.tolist(), "loss_mask": [1] * 257} for row in batch]
            losses.append(wrap.train(samples)["loss"])
        wrap.save()
    faulthandler.cancel_dump_traceback_later()
    return losses


def test_resumed_run_draws_the_same_dropout(tmp_path, ranks):
    whole, first, second = (
        ranks(1).run(part_of_a_run, tmp_path / folder, steps)[0]
        for folder, steps in (("whole", 6), ("parts", 3), ("parts", 3))
    )
    numpy.testing.assert_allclose([*first, *second], whole, rtol=1e-5)
