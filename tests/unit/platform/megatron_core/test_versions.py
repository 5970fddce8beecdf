"""Differences between Megatron-Core versions; one test writes a checkpoint with a process group."""

import dataclasses
import importlib.metadata
import json
import multiprocessing
import os

import pytest
import torch

from megatron_wrap.errors import CheckpointError, ConfigError, PlatformError
from megatron_wrap.platform import choose_platform
from megatron_wrap.platform.megatron_core import versions


@pytest.fixture(autouse=True)
def _installed():
    choose_platform("cpu").install()


@pytest.mark.parametrize("installed", ["0.16.1", "0.16.3", "0.19.0", "0.19.2", "0.19.2+45dd803"])
def test_supported_versions(monkeypatch, installed):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
    assert versions.check_version()[:2] == tuple(int(part) for part in installed.split(".")[:2])
    assert os.environ["NO_VCS_VERSION"] == "1"


@pytest.mark.parametrize("installed", ["0.15.3", "0.16.0", "0.17.0", "0.18.1", "0.19.0rc1", "0.20.0"])
def test_other_versions_are_refused(monkeypatch, installed):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
    with pytest.raises(
        PlatformError, match=f"megatron-core {installed} is not supported; .*>=0.16.1,<0.17 or >=0.19,<0.20"
    ):
        versions.check_version()


def test_missing_megatron_core_is_reported(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(PlatformError, match="megatron-core is not installed; pip install"):
        versions.check_version()


def test_version_is_that_of_the_imported_module():
    from megatron.core import __version__

    assert versions.version() == __version__
    assert versions.check_version() == tuple(int(part) for part in versions.version().split("."))


def test_accepts_only_fields_of_this_version():
    @dataclasses.dataclass
    class OptimizerConfig:
        lr: float = 0.0
        weight_decay: float = 0.0
        derived: int = dataclasses.field(default=0, init=False)

    assert versions.accepts(OptimizerConfig, {"lr": 0.1}) == {"lr": 0.1}
    with pytest.raises(ConfigError, match=rf"weight_decai: megatron-core {versions.version()} .* mean weight_decay\?"):
        versions.accepts(OptimizerConfig, {"weight_decai": 0.1})
    with pytest.raises(ConfigError, match="derived"):
        versions.accepts(OptimizerConfig, {"derived": 1})


def names(spec):
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    norms = [layer.input_layernorm, layer.pre_mlp_layernorm, attention.q_layernorm, attention.k_layernorm]
    return [module.__name__ for module in (*norms, attention.core_attention)]


class Norm(torch.nn.Module):
    pass


class Core(torch.nn.Module):
    pass


def test_local_layer_spec_replaces_norms_and_core_attention():
    plain = versions.local_layer_spec(normalization="RMSNorm")
    assert names(plain) == ["WrappedTorchNorm", "WrappedTorchNorm", "IdentityOp", "IdentityOp", "DotProductAttention"]
    ours = versions.local_layer_spec(normalization="RMSNorm", norm=Norm, core_attention=Core)
    assert names(ours) == ["Norm", "Norm", "IdentityOp", "IdentityOp", "Core"]
    with_norms = versions.local_layer_spec(normalization="LayerNorm", qk_layernorm=True, norm=Norm, num_experts=4)
    assert names(with_norms) == ["Norm"] * 4 + ["DotProductAttention"]
    with_l2 = versions.local_layer_spec(normalization="RMSNorm", qk_l2_norm=True, norm=Norm)
    assert names(with_l2)[2:4] == ["L2Norm", "L2Norm"]
    keys = ours.submodules.sharded_state_dict_keys_map  # Transformer Engine's names
    assert keys["input_layernorm."] == "self_attention.linear_qkv.layer_norm_"
    with pytest.raises(
        ConfigError, match=f"use_flux: megatron-core {versions.version()} has no such argument of get_gpt"
    ):
        versions.local_layer_spec(use_flux=True)


def test_te_layer_spec_passes_arguments_on(monkeypatch):
    import megatron.core.models.gpt.gpt_layer_specs as specs

    with pytest.raises(ConfigError, match=r"use_flux: .*get_gpt_layer_with_transformer_engine_spec"):
        versions.te_layer_spec(use_flux=True)
    name = "get_gpt_layer_with_transformer_engine_spec"
    monkeypatch.setattr(specs, name, lambda num_experts=None, qk_layernorm=False: (num_experts, qk_layernorm))
    assert versions.te_layer_spec(num_experts=4, qk_layernorm=True) == (4, True)


def test_results_queue_does_not_rerun_the_script():
    import megatron.core.dist_checkpointing.strategies.filesystem_async as module

    name = "get_write_results_queue" if hasattr(module, "get_write_results_queue") else "_get_write_results_queue"
    queue = getattr(module, name)()
    assert getattr(module, name)() is queue
    writer = multiprocessing.get_context("fork").Process(target=queue.put, args=("written",))
    writer.start()
    assert queue.get(timeout=20) == "written"
    writer.join()


@pytest.mark.process_group
def test_checkpoint_can_be_loaded_by_both_versions(tmp_path):
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        state = {"weight": ShardedTensor.from_rank_offsets("weight", torch.arange(6.0)), "iteration": 7}
        arguments = versions.save_arguments(async_save=False)
        assert arguments == {"async_sharded_save": False}
        dist_checkpointing.save(state, str(tmp_path), **arguments)
        had_common_file = (tmp_path / "common.pt").exists()
        assert versions.common_state_file(tmp_path) is not had_common_file
        assert not versions.common_state_file(tmp_path)
        # 0.16 reads these files
        common = torch.load(tmp_path / "common.pt", weights_only=False)
        assert common["iteration"] == 7
        metadata = json.loads((tmp_path / "metadata.json").read_text())
        assert metadata["sharded_backend"] == "torch_dist"
        assert (metadata["common_backend"], metadata["common_backend_version"]) == ("torch", 1)
        assert not list(tmp_path.glob("*.part"))
        # the installed version
        wanted = {"weight": ShardedTensor.from_rank_offsets("weight", torch.zeros(6))}
        loaded = dist_checkpointing.load(wanted, str(tmp_path))
        assert torch.equal(loaded["weight"], torch.arange(6.0))
        assert loaded["iteration"] == 7
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(CheckpointError, match=r"nothing .*metadata\.json is missing"):
        versions.common_state_file(tmp_path / "nothing")


def test_asynchronous_save_uses_the_built_in_strategy():
    import inspect

    from megatron.core import dist_checkpointing

    arguments = versions.save_arguments(async_save=True)
    known = inspect.signature(dist_checkpointing.save).parameters
    assert set(arguments) <= set(known)
    assert arguments["async_sharded_save"]
    assert arguments.get("async_strategy") == ("mcore" if "async_strategy" in known else None)


def test_gradients_are_scaled_in_place_as_megatron_core_scales_them() -> None:
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_scale

    torch.manual_seed(0)
    gradients, in_place = [torch.randn(64, 33), torch.randn(7)], [torch.zeros(64, 33), torch.zeros(7)]
    for source, target in zip(gradients, in_place, strict=True):
        target.copy_(source)
    expected = [torch.empty_like(gradient) for gradient in gradients]
    local_multi_tensor_scale(2048, None, [gradients, expected], 0.3)
    addresses = [gradient.data_ptr() for gradient in in_place]
    clip_grads.multi_tensor_applier(clip_grads.multi_tensor_scale_impl, None, [in_place, in_place], 0.3)
    assert all(map(torch.equal, in_place, expected))
    assert [gradient.data_ptr() for gradient in in_place] == addresses
    assert clip_grads.multi_tensor_scale_impl is not local_multi_tensor_scale


def test_norm_of_a_large_gradient_is_accurate() -> None:
    import torch

    from megatron_wrap.platform.megatron_core.repairs import l2_norm

    torch.manual_seed(0)
    gradients = [torch.randn(1_000_000) ** 3, torch.randn(17, 3)]
    expected = torch.cat([gradient.flatten().double() for gradient in gradients]).norm()
    norm, nothing = l2_norm(2048, None, [gradients], False)
    assert nothing is None
    assert norm.dtype == torch.float32
    assert norm.shape == (1,)
    assert abs(norm.item() / expected.item() - 1) < 1e-7
