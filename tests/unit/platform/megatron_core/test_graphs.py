"""CUDA graphs of Megatron-Core's layers without capturing them, which tests/gpu/test_layer_graphs_gpu.py does."""

from types import SimpleNamespace

import pytest
import torch

from megatron_wrap.platform import choose_platform

choose_platform("cpu").install()

from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402
from megatron.core.transformer import cuda_graphs  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402

from megatron_wrap.platform.megatron_core import graphs  # noqa: E402
from megatron_wrap.platform.megatron_core.undoable_changes import Replacements  # noqa: E402


@pytest.fixture
def repaired():
    with Replacements() as replacements:
        graphs.repair(replacements)
        yield


@pytest.fixture
def tracker(monkeypatch):
    """Megatron-Core's random generators as with CUDA graphs: the generators themselves."""
    kind = tensor_parallel.random.CudaRNGStatesTracker
    tracker = kind.__new__(kind)
    tracker.states_ = {"one": torch.Generator().manual_seed(5), "two": torch.Generator().manual_seed(6)}
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    return tracker


def draw(tracker):
    return [torch.rand(3, generator=generator).tolist() for generator in tracker.states_.values()]


def test_generators_are_saved_as_tensors_and_continue_from_them(tracker):
    objects = dict(tracker.states_)
    saved = graphs.tracked_states()
    assert all(isinstance(state, torch.Tensor) for state in saved.values())
    expected = draw(tracker)
    assert draw(tracker) != expected
    graphs.set_tracked_states(saved)
    assert tracker.states_ == objects
    assert draw(tracker) == expected


def test_states_of_a_run_without_graphs_are_kept_as_they_are(tracker):
    tracker.states_ = {"one": torch.tensor([3])}
    saved = graphs.tracked_states()
    assert saved == {"one": torch.tensor([3])}
    tracker.states_ = {"one": torch.tensor([4])}
    graphs.set_tracked_states(saved)
    assert tracker.states_ == saved


def test_capture_does_not_move_the_generators(tracker, monkeypatch, repaired):
    device = torch.Generator().manual_seed(7)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: device.get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", device.set_state)
    saved = graphs.tracked_states()
    monkeypatch.setattr(cuda_graphs._CudagraphGlobalRecord, "cudagraph_record", ["a layer"])

    def capture():
        draw(tracker)
        torch.rand(2, generator=device)
        raise RuntimeError("captured")

    monkeypatch.setattr(cuda_graphs._CudagraphGlobalRecord, "create_cudagraphs", capture)
    before = device.get_state()
    with pytest.raises(RuntimeError, match="captured"):
        schedules.create_cudagraphs()
    assert torch.equal(device.get_state(), before)
    assert {name: state.tolist() for name, state in graphs.tracked_states().items()} == {
        name: state.tolist() for name, state in saved.items()
    }


class Layer(MegatronModule):
    def __init__(self):
        torch.nn.Module.__init__(self)
        self.manager = cuda_graphs.CudaGraphManager.__new__(cuda_graphs.CudaGraphManager)
        torch.nn.Module.__init__(self.manager)
        self.manager.func, self.manager.cudagraph_runners = None, []

    def __call__(self, *arguments, **named):
        return self.manager(self, arguments, named)

    def forward(self, x, factor):
        return factor * x


def test_only_training_passes_use_graphs(monkeypatch):
    monkeypatch.setattr(cuda_graphs.CudaGraphManager, "__call__", lambda *_, **__: "graph")
    with Replacements() as replacements:
        graphs.repair(replacements)
        layer = Layer()
        assert layer(2, factor=3) == "graph"
        with torch.no_grad():
            assert layer(2, factor=3) == 6
        with layer.register_forward_hook(lambda module, arguments, output: output + 1):
            assert layer(2, factor=3) == 7
        assert layer(2, factor=3) == "graph"
        layer.eval()
        assert layer(2, factor=3) == 6
        layer.manager.func = lambda x, factor: x + factor  # a graph of a part of a layer
        assert layer(2, factor=3) == 5
    assert Layer()(2, factor=3) == "graph"


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.zeros(2, 3),), {"mask": None, "number": 2}),
        ((torch.ones(2, 3),), {"number": 2, "mask": None}),
        ((torch.zeros(2, 4),), {"mask": None, "number": 2}),
        ((torch.zeros(2, 3, dtype=torch.int),), {"mask": None, "number": 2}),
        ((torch.zeros(2, 3),), {"mask": torch.zeros(1), "number": 2}),
        ((torch.zeros(2, 3),), {"mask": None, "number": 3}),
        ((torch.zeros(2, 3),), {"mask": None, "number": 2.0}),
        ((torch.zeros(2, 3),), {"mask": None}),
        ((torch.zeros(2, 3),), {"mask": None, "number": 2, "more": 1}),
        ((), {"mask": None, "number": 2}),
    ],
)
def test_arguments_are_compared_as_in_megatron_core(args, kwargs):
    runner = cuda_graphs._CudaGraphRunner.__new__(cuda_graphs._CudaGraphRunner)
    torch.nn.Module.__init__(runner)
    runner.fwd_graph_input_arg_metas = [cuda_graphs.ArgMetadata(torch.zeros(2, 3))]
    captured = {"mask": None, "number": 2}
    runner.fwd_graph_input_kwarg_metas = {name: cuda_graphs.ArgMetadata(value) for name, value in captured.items()}
    expected = runner.get_mismatch_errors(args, kwargs)
    with Replacements() as replacements:
        graphs.repair(replacements)
        assert runner.get_mismatch_errors(args, kwargs) == expected


def test_graphs_end_with_their_model(monkeypatch):
    streams = []
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: "default")
    record, reset = cuda_graphs._CudagraphGlobalRecord, []
    layer = Layer()
    runner = SimpleNamespace(fwd_graph=SimpleNamespace(reset=lambda: reset.append("forward")), bwd_graph=None)
    layer.manager.cudagraph_runners = [runner]
    monkeypatch.setattr(record, "cudagraph_created", True)
    monkeypatch.setattr(cuda_graphs.CudaGraphManager, "global_mempool", (1, 2))
    graphs.delete_graphs([torch.nn.Linear(2, 2)])
    assert record.cudagraph_created
    graphs.delete_graphs([torch.nn.Sequential(layer)])
    assert reset == ["forward"]
    assert (runner.fwd_graph, layer.manager.cudagraph_runners) == (None, [])
    assert not record.cudagraph_created
    assert cuda_graphs.CudaGraphManager.global_mempool is None
    assert streams == ["default"]


@pytest.mark.parametrize("in_parts", [False, True])
def test_parts_of_layers_keep_their_memory(monkeypatch, in_parts):
    given_away = []
    give_away = lambda tensor, inplace=True: given_away.append(tensor) or tensor  # noqa: E731
    monkeypatch.setattr(cuda_graphs, "make_weakref", give_away, raising=False)  # 0.16 does not have it
    monkeypatch.setattr(
        cuda_graphs._CudaGraphRunner, "create_bwd_graph", lambda self: cuda_graphs.make_weakref("a gradient")
    )
    with Replacements() as replacements:
        graphs.repair(replacements)
        runner = cuda_graphs._CudaGraphRunner.__new__(cuda_graphs._CudaGraphRunner)
        torch.nn.Module.__init__(runner)
        runner.base_module = torch.nn.Linear(2, 2)
        runner.base_module.is_captured_in_parts = in_parts
        runner.create_bwd_graph()
        assert given_away == ([] if in_parts else ["a gradient"])
        cuda_graphs.make_weakref("a later one")
    assert given_away[-1] == "a later one"
