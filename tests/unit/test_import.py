"""Importing the package does no work, and the facade is found on first use."""

import importlib
import subprocess
import sys

import pytest

HEAVY = "{'torch', 'megatron', 'numpy', 'transformers', 'yaml', 'loguru', 'wandb'}"


@pytest.mark.parametrize(
    ("statement", "loaded"),
    [
        *((f"import megatron_wrap{module}", "set()") for module in ("", ".core", ".errors", ".platform", ".registry")),
        ("import megatron_wrap.metrics.declared", "set()"),
        ("from megatron_wrap.checkpoint.saved_run import find_checkpoint; find_checkpoint('nothing')", "{'yaml'}"),
    ],
)
def test_an_import_loads_nothing_heavy(statement: str, loaded: str) -> None:
    code = f"{statement}; import sys; print({HEAVY} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == loaded


def test_operations_load_without_torch_and_what_starts_the_platform_without_megatron_core() -> None:
    """Without a GPU, Megatron-Core 0.19 can be imported only after the platform is installed."""
    code = (
        "import sys, megatron_wrap.ops as ops; print({'torch', 'megatron'} & set(sys.modules)); "
        "import megatron_wrap.ops.divergence; print(all(callable(getattr(ops, name)) for name in ops.__all__), "
        "'megatron' in sys.modules); "
        "import megatron_wrap.setup.build; print('megatron.core' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["set()", "True False", "False"]


def test_the_command_line_starts_without_torch() -> None:
    code = (
        "import sys; from megatron_wrap.cli.main import main\n"
        "try: main(['--version'])\n"
        "except SystemExit as end: print(end.code, {'torch', 'megatron'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "0 set()"


def test_the_facade_is_resolved_on_first_use() -> None:
    import megatron_wrap.core
    from megatron_wrap.core import MegatronWrap
    from megatron_wrap.core.wrap import MegatronWrap as defined_there

    assert MegatronWrap is defined_there
    with pytest.raises(AttributeError, match="has no attribute 'MegatronWarp'"):
        _ = megatron_wrap.core.MegatronWarp


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("megatron_wrap.core", "MegatronWrap"),
        ("megatron_wrap.core.wrap", "MegatronWrap"),
        ("megatron_wrap.core.config", "RunConfig"),
        ("megatron_wrap.core.flow", "MegatronWrapTrainingFlowBase"),
        ("megatron_wrap.core.model", "MegatronModelProviderEntry"),
        ("megatron_wrap.utils.dist_logger", "logger"),
        ("megatron_wrap.utils.wandb_logger", "WandbLogger"),
        ("megatron_wrap.ops", "token_log_probs"),
        ("megatron_wrap.testing", "check_parity"),
    ],
)
def test_the_import_paths_that_users_rely_on(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)
