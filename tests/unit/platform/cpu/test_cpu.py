"""The CPU platform: Megatron-Core's modules see its replacements, the host program does not."""

import builtins
import logging
import sys
import textwrap
import types

import pytest
import torch
from _forked import run_forked

from megatron_wrap.errors import PlatformError
from megatron_wrap.platform import choose_platform
from megatron_wrap.platform.base.platform import Replacements
from megatron_wrap.platform.cpu import platform as cpu
from megatron_wrap.platform.cpu import replaced_functions as replaced

NOTHING_IMPORTED = """
import sys
from megatron_wrap.platform import choose_platform
choose_platform("cpu").uninstall()  # another test may have installed it
imported_again = {"megatron", "megatron_wrap", "transformer_engine", "apex", "triton"}
for name in [name for name in sys.modules if name.partition(".")[0] in imported_again]:
    del sys.modules[name]
"""


@pytest.fixture
def installed():
    choose_platform("cpu").install()
    return choose_platform("cpu")


def in_megatron(code):
    """Run code with the globals of a Megatron-Core module."""
    import megatron.core.utils as module

    scope = {"__name__": module.__name__, "__builtins__": vars(module)["__builtins__"], "torch": module.torch}
    exec(textwrap.dedent(code), scope)
    return scope


def run_python(code, *path):
    """Standard output of a process that imports Megatron-Core, split into words; `path` precedes the packages."""
    program = NOTHING_IMPORTED + f"sys.path[:0] = {list(map(str, path))!r}\n" + textwrap.dedent(code)
    done = run_forked(program)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_megatron_gets_torch_without_cuda_and_the_host_is_unchanged(installed):
    import megatron.core.utils as module

    assert module.torch is not torch
    scope = in_megatron(
        """
        import torch as imported
        import torch.nn.functional as F
        from torch.cuda import current_device
        from torch import Tensor, cuda
        zeros = torch.zeros(2, device="cuda", pin_memory=True)
        index = torch.tensor([1, 0], device=torch.device("cuda", 0))
        like = torch.empty_like(zeros, device=torch.cuda.current_device())
        moved = zeros.cuda(), zeros.pin_memory(), zeros.record_stream(torch.cuda.current_stream())
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.Event().record()
        torch.cuda.synchronize()
        state = torch.cuda.get_rng_state()
        compiled = torch.compile(len), torch.compile(mode="default")(len)
        """
    )
    assert scope["imported"] is scope["torch"] is module.torch
    assert scope["F"] is torch.nn.functional
    assert scope["Tensor"] is torch.Tensor
    assert scope["current_device"]() == torch.device("cpu")
    assert not scope["cuda"].is_available()
    assert {scope[name].device.type for name in ("zeros", "index", "like")} == {"cpu"}
    assert scope["moved"] == (scope["zeros"], scope["zeros"], None)
    assert torch.equal(scope["state"], torch.get_rng_state())
    assert scope["compiled"] == (len, len)
    # the host
    assert isinstance(torch.zeros, types.BuiltinFunctionType)
    assert torch.cuda.current_device.__module__ == "torch.cuda"
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):
            torch.zeros(1).cuda()


def test_packages_are_hidden_from_megatron_only(installed, monkeypatch):
    for name in ("transformer_engine", "apex", "wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        with pytest.raises(ModuleNotFoundError, match=f"{name} is hidden"):
            in_megatron(f"import {name}")
        __import__(name)


def test_replaced_builtin_print_takes_effect_in_megatron(installed, monkeypatch):
    printed = []
    monkeypatch.setattr(builtins, "print", lambda *values: printed.append(values))
    in_megatron("print('a', 1)")
    assert printed == [("a", 1)]


def test_optimizers_compare_with_cpu_tensor_types(installed):
    import megatron.core.optimizer.clip_grads as clip_grads

    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([3.0, 0.0, 4.0])
    clip_grads.clip_grad_by_total_norm_fp32([parameter], max_norm=1.0, total_norm=5.0)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.0, 0.8]))
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    parameter.grad = torch.ones(3, dtype=torch.float64)
    with pytest.raises(AssertionError):  # the check still refuses other dtypes
        clip_grads.clip_grad_by_total_norm_fp32([parameter], max_norm=1.0, total_norm=5.0)


def test_rng_tracker_uses_the_cpu_generator(installed):
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    torch.manual_seed(5)
    outside = torch.rand(3)
    torch.manual_seed(5)
    tracker.add("heads", 77)
    with tracker.fork("heads"):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), outside)
    with tracker.fork("heads"):
        second = torch.rand(3)
    torch.manual_seed(77)
    assert torch.equal(torch.cat([first, second]), torch.cat([torch.rand(3), torch.rand(3)]))


def test_uninstall_restores_everything_and_install_works_again(installed):
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.random as random
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    build = DistributedOptimizer.__dict__["_build_model_and_main_param_groups"].__func__
    finders = len(sys.meta_path)
    assert "torch.FloatTensor" in build.__code__.co_consts
    installed.uninstall()
    installed.uninstall()
    try:
        assert random.torch is mappings.torch is torch
        assert random._get_cuda_rng_state.__module__ == random.__name__
        assert mappings._gather_along_first_dim.__module__ == mappings.__name__
        assert "torch.cuda.FloatTensor" in build.__code__.co_consts
        assert len(sys.meta_path) == finders - 1
        assert "record_stream" not in vars(torch.Tensor)
        assert in_megatron("import torch")["torch"] is torch
    finally:
        installed.install()
    assert random.torch is not torch
    assert random._get_cuda_rng_state.__module__ == replaced.__name__
    installed.install()
    assert len(sys.meta_path) == finders
    cpu.CpuPlatform().install()  # no-op: another CpuPlatform is installed
    assert len(sys.meta_path) == finders


def test_uninstall_of_a_kept_platform_restores_only_what_came_later():
    printed = run_python(
        """
        import torch
        platform = choose_platform("cpu")
        platform.keep_installed()
        platform.keep_installed()
        platform.install(deterministic=True)
        import megatron.core.tensor_parallel.random as random
        print(torch.are_deterministic_algorithms_enabled())
        platform.uninstall()
        print(torch.are_deterministic_algorithms_enabled(), random.torch is torch)
        """
    )
    assert printed == ["True", "False", "False"]


def test_unexpected_megatron_function_is_reported_with_its_version(installed):
    from megatron_wrap.platform.megatron_core.versions import version

    module = types.ModuleType("megatron.core.other")
    module._get_cuda_rng_state = lambda device, clone: None
    with pytest.raises(
        PlatformError, match=rf"megatron-core {version()} .* takes \(device, clone\), not \(device, clone,"
    ):
        replaced._patch_rng(module, lambda function: [], Replacements())
    with pytest.raises(PlatformError, match=r"has no comparison with torch\.cuda\.FloatTensor"):
        replaced._patch_type_names(types.ModuleType("megatron.core.other"), lambda function: [], Replacements())
    with pytest.raises(PlatformError, match="has no maybe_move_tensor_to_cpu"):
        replaced._patch_moe_utils(types.ModuleType("megatron.core.other"), lambda function: [], Replacements())


def test_only_known_log_noise_is_hidden(installed, log_records):
    logger = logging.getLogger("megatron.core.models.gpt.gpt_model")
    logger.warning("GPTModel IS DEPRECATED. GPTModel is only accepting critical bug fixes")
    logger.warning("something else")
    assert [record.getMessage() for record in log_records] == ["something else"]


def test_cpu_platform_on_a_machine_with_gpus_and_transformer_engine(tmp_path):
    for package in ("transformer_engine", "apex", "triton"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("loaded = True\n")
    out = run_python(
        """
        import torch
        torch.cuda.is_available = lambda: True
        torch.cuda.current_device = lambda: 3
        from megatron_wrap.platform import choose_platform
        choose_platform("cpu").install()
        import megatron.core.models.gpt, megatron.core.transformer.transformer_block as block
        assert not {"transformer_engine", "apex", "triton"} & set(sys.modules)
        assert not block.HAVE_TE and not block.torch.cuda.is_available()
        assert block.torch.cuda.current_device() == torch.device("cpu")
        assert torch.cuda.is_available() and torch.cuda.current_device() == 3
        import transformer_engine
        print(transformer_engine.loaded)
        """,
        tmp_path,
    )
    assert out == ["True"]


def test_install_after_megatron_was_imported():
    # A mock replaces 0.19's Triton kernels, which import triton.
    out = run_python(
        """
        from unittest.mock import MagicMock
        sys.modules["megatron.core.transformer.moe.ops.paged_stash"] = MagicMock()
        import torch
        import megatron.core.fusions.fused_bias_swiglu as fusions
        import megatron.core.models.gpt, megatron.core.optimizer, megatron.core.transformer.moe.token_dispatcher as moe
        compiled = fusions.swiglu
        assert hasattr(compiled, "_torchdynamo_orig_callable")
        from megatron_wrap.platform import choose_platform
        choose_platform("cpu").install()
        modules = [module for name, module in sys.modules.items() if name.startswith("megatron.")]
        print(sum(vars(module).get("torch") is torch for module in modules))
        print(fusions.swiglu is compiled._torchdynamo_orig_callable, moe.maybe_move_tensor_to_cpu.__module__)
        choose_platform("cpu").uninstall()
        print(fusions.swiglu is compiled, fusions.torch is torch, moe.maybe_move_tensor_to_cpu.__module__)
        assert "megatron.core.models.bert.bert_model" not in sys.modules
        import megatron.core.models.bert.bert_model as later
        choose_platform("cpu").install()
        print(fusions.torch is torch, later.torch is torch)
        choose_platform("cpu").uninstall()
        # once a name from Transformer Engine is bound, the platform refuses
        fusions.borrowed = type("FusedAdam", (), {"__module__": "transformer_engine.pytorch.optimizers"})
        try:
            choose_platform("cpu").install()
        except Exception as error:
            print(type(error).__name__, "fused_bias_swiglu had imported borrowed from transformer_engine" in str(error))
        """
    )
    assert out == [
        *("0", "True", "megatron_wrap.platform.cpu.replaced_functions"),
        *("True", "True", "megatron.core.transformer.moe.moe_utils"),
        *("False", "False"),
        *("PlatformError", "True"),
    ]
