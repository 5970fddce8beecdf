"""Platform selection, platform settings, and `Replacements`."""

import subprocess
import sys
import types

import pytest
import torch

from megatron_wrap.errors import PlatformError
from megatron_wrap.platform import choose_platform
from megatron_wrap.platform.base import machine
from megatron_wrap.platform.base.platform import Replacements
from megatron_wrap.platform.gpu.platform import CudaPlatform, _free_buffers


def test_platform_is_chosen_by_name_and_available_gpus(monkeypatch):
    assert choose_platform("cpu") is choose_platform("cpu")
    assert (choose_platform("cpu").name, choose_platform("cpu").backend) == ("cpu", "gloo")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_platform("auto") is choose_platform("cpu")
    with pytest.raises(PlatformError, match=r"platform cuda .* torch .* finds no GPU .*; choose platform cpu or auto"):
        choose_platform("cuda")
    with pytest.raises(PlatformError, match="'tpu'; choose auto, cpu or cuda"):
        choose_platform("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_platform("auto") is choose_platform("cuda")
    assert (choose_platform("cuda").name, choose_platform("cuda").backend) == ("cuda", "nccl")


def test_each_process_needs_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert CudaPlatform().device == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(PlatformError, match=r"local rank 2 .* finds 2 .*; start at most 2"):
        _ = CudaPlatform().device


def test_the_machine_has_what_is_installed(monkeypatch):
    monkeypatch.setattr(CudaPlatform, "device_name", "NVIDIA H100")
    monkeypatch.setattr(CudaPlatform, "has_transformer_engine", False)
    for triton in (None, object()):
        monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name, spec=triton: spec)
        here = CudaPlatform().machine
        assert (here.platform, here.device, here.transformer_engine) == ("cuda", "NVIDIA H100", None)
        assert here.triton == (triton is not None)


def test_transformer_engine_s_unread_gradients_are_freed(monkeypatch):
    base = types.ModuleType("transformer_engine.pytorch.module.base")
    base._dummy_wgrads = {(64, 64, torch.bfloat16): torch.empty(64, 64)}
    monkeypatch.setitem(sys.modules, base.__name__, base)
    _free_buffers()
    assert base._dummy_wgrads == {}


def test_cpu_memory_and_device():
    platform = choose_platform("cpu")
    platform.synchronize()
    platform.empty_cache()
    memory = platform.memory_gib()
    assert set(memory) == {"memory_allocated", "memory_reserved", "memory_max"}
    assert 0.05 < memory["memory_allocated"] == memory["memory_reserved"] <= memory["memory_max"] < 100
    ballast = torch.ones(2**28 // 4)  # 0.25 GiB
    more = platform.memory_gib()
    assert more["memory_allocated"] - memory["memory_allocated"] == pytest.approx(0.25, abs=0.05)
    del ballast
    assert platform.memory_gib()["memory_max"] >= memory["memory_allocated"] + 0.2
    assert platform.device == torch.device("cpu")
    assert not platform.has_transformer_engine


def test_settings_are_fields_of_transformer_config():
    choose_platform("cpu").install()
    from megatron.core.transformer.transformer_config import TransformerConfig

    for platform in (choose_platform("cpu"), CudaPlatform()):
        for pipeline_size, virtual_size in ((1, None), (2, None), (2, 2), (4, 2)):
            settings = platform.transformer_config_settings(pipeline_size, virtual_size, transformer_engine=False)
            assert set(settings) <= set(TransformerConfig.__dataclass_fields__)
            platform.refuse_unsafe(settings)


def test_p2p_communication_of_interleaved_stages_overlaps_and_is_not_batched():
    for platform in (choose_platform("cpu"), CudaPlatform()):
        for stages in (2, 4):
            settings = platform.transformer_config_settings(stages, 2, transformer_engine=False)
            assert (settings["overlap_p2p_comm"], settings["batch_p2p_comm"]) == (True, False)
        assert "batch_p2p_comm" not in platform.transformer_config_settings(2, None, transformer_engine=False)
    assert choose_platform("cpu").transformer_config_settings(2, 2, False)["deallocate_pipeline_outputs"] is False
    assert CudaPlatform().transformer_config_settings(2, 1, True) == {"deallocate_pipeline_outputs": True}
    assert CudaPlatform().transformer_config_settings(1, None, True) == {}
    with pytest.raises(PlatformError, match="transformer_engine needs a GPU"):
        choose_platform("cpu").transformer_config_settings(1, None, transformer_engine=True)


@pytest.mark.parametrize(
    ("name", "value", "refused_on_cuda"),
    [
        ("fp8", "e4m3", True),
        ("moe_grouped_gemm", True, True),
        ("cuda_graph_impl", "local", False),
        ("deallocate_pipeline_outputs", True, False),
        ("moe_token_dispatcher_type", "flex", False),
        ("optimizer_cpu_offload", True, False),
    ],
)
def test_unsafe_settings_are_refused(name, value, refused_on_cuda):
    with pytest.raises(PlatformError, match=f"{name}={value!r} does not work on platform cpu"):
        choose_platform("cpu").refuse_unsafe({"num_layers": 2, name: value})
    CudaPlatform().refuse_unsafe({name: value}, transformer_engine=True)
    if refused_on_cuda:
        with pytest.raises(PlatformError, match=f"{name}={value!r}.*without Transformer Engine; omit it or set"):
            CudaPlatform().refuse_unsafe({name: value})
    else:
        CudaPlatform().refuse_unsafe({name: value})


def test_batched_p2p_communication_between_two_interleaved_stages_is_refused_on_cpu():
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    with pytest.raises(PlatformError, match="batch_p2p_comm=True"):
        choose_platform("cpu").refuse_unsafe({**sizes, "batch_p2p_comm": True})
    with pytest.raises(PlatformError, match="overlap_p2p_comm=False"):
        choose_platform("cpu").refuse_unsafe({**sizes, "overlap_p2p_comm": False})
    choose_platform("cpu").refuse_unsafe({**sizes, "batch_p2p_comm": False, "overlap_p2p_comm": True})
    choose_platform("cpu").refuse_unsafe({**sizes, "pipeline_model_parallel_size": 4, "batch_p2p_comm": True})


def test_replacements_are_undone():
    class Base:
        def inherited(self):
            return "base"

        @classmethod
        def of_class(cls):
            return cls.__name__

    class Child(Base):
        @classmethod
        def own(cls):
            return "own"

    replacements = Replacements()
    undone = []
    replacements.set(Child, "inherited", lambda self: "replaced")
    replacements.set(Child, "own", None)
    replacements.set(Child, "added", 1)
    replacements.set(Child, "added", 2)
    replacements.callback(lambda: undone.append(Child.added))
    assert (Child().inherited(), Child.own, Child.added) == ("replaced", None, 2)
    replacements.close()
    replacements.close()
    assert (Child().inherited(), Child.own(), undone) == ("base", "own", [2])
    assert not {"inherited", "added"} & set(vars(Child))


def test_peak_memory_is_that_of_this_process_alone():
    large = "import mmap, subprocess, sys; kept = mmap.mmap(-1, 2**30); "
    large += "kept.madvise(getattr(mmap, 'MADV_HUGEPAGE', mmap.MADV_NORMAL)); "  # in a third of the time
    large += "[kept.write(bytes(2**21)) for _ in range(2**9)]; "
    small = (
        "from megatron_wrap.platform import choose_platform; print(choose_platform('cpu').memory_gib()['memory_max'])"
    )
    program = f"{large}print(subprocess.check_output([sys.executable, '-c', {small!r}], text=True))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.9
