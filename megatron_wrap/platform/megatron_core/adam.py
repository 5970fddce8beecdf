"""Adam and AdamW with the state layout of FusedAdam, used when neither Transformer Engine nor Apex is installed.

torch keeps `step` in each parameter's state, FusedAdam keeps it in the parameter group. Megatron-Core's
DistributedOptimizer can save torch's layout but not load it (`optimizer/distrib_optimizer.py`: AssertionError, or
KeyError 'step'), also on a GPU. With FusedAdam's layout, checkpoints move between a laptop and a cluster in both
directions.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_wrap.errors import PlatformError
from megatron_wrap.platform.megatron_core.undoable_changes import Replacements

# The foreach update allocates a temporary copy of the parameters it updates; this bounds the copy to 256 MiB in fp32.
_MAX_CHUNK_ELEMENTS = 1 << 26


class GroupStepAdam(torch.optim.Optimizer):
    """Adam (arXiv:1412.6980) or AdamW (arXiv:1711.05101); bitwise equal to `torch.optim` with fused on a GPU, and
    with foreach elsewhere.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: decay rates of the running averages of the gradient and of its square.
        eps: added to the square root of the second moment.
        weight_decay: decoupled from the gradient if `adam_w_mode`, else added to the gradient.
        bias_correction: divide the moments by 1 - beta^step; Megatron-Core never turns it off.
        adam_w_mode: True: AdamW; False: Adam with L2 regularization.
        ignored: FusedAdam's arguments for CUDA graphs, such as `capturable`.

    State: `step` (int) in each parameter group; `exp_avg` and `exp_avg_sq` per parameter, with its shape and dtype.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        **ignored: Any,
    ) -> None:
        unsupported = {"exp_avg_dtype", "exp_avg_sq_dtype", "master_weights", "use_decoupled_grad"} & set(ignored)
        if unsupported:
            raise PlatformError(
                f"use_precision_aware_optimizer ({', '.join(sorted(unsupported))}) needs Transformer Engine's "
                "FusedAdam, which is not installed; disable it or install the extra megatron-wrap[gpu]"
            )
        if not bias_correction:
            raise PlatformError("Adam without bias_correction needs Transformer Engine's FusedAdam")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction})
        self.adam_w_mode = adam_w_mode
        self.gradient_factor: float | Tensor = 1.0

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Make the next steps multiply the gradients by this factor as they read them; the gradients themselves stay
        unchanged.

        Args:
            factor: a number; with nan, the steps change no parameter and no state but their count, see `uncount_step`.
                A tensor, fp32 with one element on the device of the parameters, need not be known to the host yet.
        """
        self.gradient_factor = factor

    def uncount_step(self) -> None:
        """Undo the count of the last step, which changed nothing because its factor was nan."""
        for group in self.param_groups:
            if group["params"]:
                group["step"] -= 1

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; returns the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["params"]:
                continue  # like FusedAdam: an empty group does not count steps
            group["step"] = int(group.get("step", 0)) + 1
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                if "exp_avg" not in self.state[param]:
                    self.state[param]["exp_avg"] = torch.zeros_like(param)
                    self.state[param]["exp_avg_sq"] = torch.zeros_like(param)
            self._update_group(params, group)
        return loss

    def _update_group(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Update the parameters of a group, which have gradients and states."""
        factor, fused = float(self.gradient_factor), bool(params) and all(param.is_cuda for param in params)
        if math.isnan(factor):
            return
        for chunk in [params] if fused and factor == 1.0 else _chunks(params):
            self._update(chunk, group, factor, fused)

    def _update(self, params: list[Tensor], group: dict[str, Any], factor: float, fused: bool) -> None:
        """Update parameters by torch's own update; the fused kernel reads and writes each tensor once."""
        beta1, beta2 = group["betas"]
        update = adamw if self.adam_w_mode else adam
        grads = [param.grad for param in params if param.grad is not None]
        if factor != 1.0:
            grads = list(torch._foreach_mul(grads, factor))
        steps = torch.full((len(params),), float(group["step"] - 1), device=params[0].device if fused else "cpu")
        update(
            params,
            grads,
            [self.state[param]["exp_avg"] for param in params],
            [self.state[param]["exp_avg_sq"] for param in params],
            [],
            list(steps.unbind()),
            foreach=not fused,
            fused=fused,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _chunks(params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Lists of parameters with at most `_MAX_CHUNK_ELEMENTS` elements in total; a larger parameter is its own list."""
    chunk: list[Tensor] = []
    elements = 0
    for param in params:
        if chunk and elements + param.numel() > _MAX_CHUNK_ELEMENTS:
            yield chunk
            chunk, elements = [], 0
        chunk.append(param)
        elements += param.numel()
    if chunk:
        yield chunk


@contextlib.contextmanager
def another_sgd(config: Any, build: Callable[..., torch.optim.Optimizer]) -> Iterator[None]:
    """Make Megatron-Core build this optimizer in the block where its configuration selects sgd.

    Args:
        config: Megatron-Core's OptimizerConfig. All parts of a chained optimizer must share it, so it is changed in the
            block.
        build: function of the parameter groups, and of `lr`, `weight_decay` and `momentum` by name.
    """
    import megatron.core.optimizer as optimizers

    with Replacements() as replacements:
        replacements.set(optimizers, "SGD", build)
        replacements.set(config, "optimizer", "sgd")
        yield


@contextlib.contextmanager
def another_adam(adam_class: type[GroupStepAdam] | None) -> Iterator[None]:
    """Make Megatron-Core build its Adam as this class in the block; None: nothing changes."""
    with Replacements() as replacements:
        if adam_class is not None:
            _replace_adam(replacements, adam_class)
        yield


def use_in_megatron(replacements: Replacements) -> bool:
    """Replace Megatron-Core's fallback to torch's Adam by `GroupStepAdam`. Imports Megatron-Core's optimizers.

    Returns:
        False if Megatron-Core uses Transformer Engine's or Apex's FusedAdam; nothing is replaced then.
    """
    import megatron.core.optimizer as optimizers

    if not optimizers.USING_PYTORCH_OPTIMIZER:
        return False
    _replace_adam(replacements, GroupStepAdam)
    return True


def _replace_adam(replacements: Replacements, adam_class: type[GroupStepAdam]) -> None:
    import megatron.core.optimizer as optimizers
    from megatron.core.optimizer import distrib_optimizer

    replacements.set(optimizers, "Adam", adam_class)
    replacements.set(optimizers, "USING_PYTORCH_OPTIMIZER", False)
    # The distributed optimizer reads `step` from the parameter group when it believes that it uses Apex.
    replacements.set(distrib_optimizer, "Adam", adam_class)
    replacements.set(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    replacements.set(distrib_optimizer, "USING_APEX_OPTIMIZER", True)


_COPY = "_copy_main_params_to_model_params"


class _RecordedCopies(TorchDispatchMode):
    """Records pairs of a tensor and the memory that it is copied to in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.are_all = True
        """Whether the block only copied, and computed nothing else."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.pairs.append((args[1], args[0]))
        elif not func.is_view:
            self.are_all = False
        return func(*args, **(kwargs or {}))


def model_copies(part: Any) -> dict[Tensor, Tensor] | None:
    """The memory to which one of Megatron-Core's optimizers copies its parameters after a step: the model's parameters
    in half precision, or this process's shards of them. The function makes one copy to find it, so call it between
    steps.

    Returns:
        Parameter of `part.optimizer` -> contiguous memory of the same number of elements; without parameters that the
        model itself uses. None if `part` does something else, such as quantizing.
    """
    copy, gathers = getattr(part, _COPY, None), getattr(part, "ddp_config", None)
    if copy is None or getattr(gathers, "fp8_param_gather", False) or getattr(gathers, "fp4_param_gather", False):
        return None
    with torch.no_grad(), _RecordedCopies() as recorded:
        copy()
    params = {param.data_ptr(): param for group in part.optimizer.param_groups for param in group["params"]}
    copies: dict[Tensor, Tensor] = {}
    for source, target in recorded.pairs:
        if source.numel() == 0 or source.data_ptr() == target.data_ptr():
            continue
        param = params.get(source.data_ptr())
        if param is None or param.numel() != target.numel() or not (param.is_contiguous() and target.is_contiguous()):
            return None
        copies[param] = target
    return copies if recorded.are_all else None


@contextlib.contextmanager
def without_model_copies(parts: Iterable[Any]) -> Iterator[None]:
    """Keep these optimizers of Megatron-Core from copying their parameters in the block, because Adam does it."""
    with Replacements() as replacements:
        for part in parts:
            replacements.set(part, _COPY, lambda: None)
        yield
