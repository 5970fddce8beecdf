"""Adam and AdamW with the state layout of Transformer Engine's and Apex's FusedAdam, for where neither is installed.

torch keeps `step` in each parameter's state, FusedAdam in the parameter group. Megatron-Core's DistributedOptimizer
saves torch's layout but fails when it loads it (`optimizer/distrib_optimizer.py`: AssertionError, or KeyError 'step'),
on a GPU as well. With FusedAdam's layout it loads, and checkpoints go both ways between a laptop and a cluster.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_wrap.errors import PlatformError

if TYPE_CHECKING:
    from megatron_wrap.platform.replacements import Replacements

# One pass of the update needs a second copy of the parameters that it handles; this many elements bound it (256 MiB).
_ELEMENTS_AT_ONCE = 1 << 26


class GroupStepAdam(torch.optim.Optimizer):
    """Adam (arXiv:1412.6980) or AdamW (arXiv:1711.05101); the arithmetic is that of `torch.optim`'s foreach form.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: decay of the running means of the gradient and of its square.
        eps: added to the root of the second mean.
        weight_decay: decoupled from the gradient with `adam_w_mode`, else added to it.
        bias_correction: divide the means by 1 - beta^step.
        adam_w_mode: AdamW when true, Adam with L2 regularisation when false.
        ignored: what Megatron-Core passes to FusedAdam for CUDA graphs, such as `capturable`.

    State: `step` (int) in each parameter group, `exp_avg` and `exp_avg_sq` per parameter, of its shape and dtype.
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
        asked = {"exp_avg_dtype", "exp_avg_sq_dtype", "master_weights", "use_decoupled_grad"} & set(ignored)
        if asked:
            raise PlatformError(
                f"use_precision_aware_optimizer ({', '.join(sorted(asked))}) needs Transformer Engine's FusedAdam, "
                "which is not installed; switch it off or install the extra megatron-wrap[gpu]"
            )
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["params"]:
                continue  # as FusedAdam: an empty group does not count steps
            group["step"] = int(group.get("step", 0)) + 1
            for params in _portions(param for param in group["params"] if param.grad is not None):
                self._update(params, group)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for param in params:
            if "exp_avg" not in self.state[param]:
                self.state[param]["exp_avg"] = torch.zeros_like(param)
                self.state[param]["exp_avg_sq"] = torch.zeros_like(param)
        grads = [param.grad for param in params if param.grad is not None]
        means = [self.state[param]["exp_avg"] for param in params]
        squares = [self.state[param]["exp_avg_sq"] for param in params]
        beta1, beta2 = group["betas"]
        lr, decay, step = group["lr"], group["weight_decay"], group["step"]
        if decay and self.adam_w_mode:
            torch._foreach_mul_(params, 1 - lr * decay)
        elif decay:
            grads = list(torch._foreach_add(grads, params, alpha=decay))
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        correction1 = 1 - beta1**step if group["bias_correction"] else 1.0
        correction2 = 1 - beta2**step if group["bias_correction"] else 1.0
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, correction2**0.5)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_addcdiv_(params, means, denominators, -lr / correction1)


def _portions(params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Lists of at most `_ELEMENTS_AT_ONCE` elements together, a larger parameter alone."""
    portion: list[Tensor] = []
    elements = 0
    for param in params:
        if portion and elements + param.numel() > _ELEMENTS_AT_ONCE:
            yield portion
            portion, elements = [], 0
        portion.append(param)
        elements += param.numel()
    if portion:
        yield portion


def use_in_megatron(replacements: "Replacements") -> bool:
    """Make Megatron-Core take `GroupStepAdam` as its FusedAdam when it found neither Transformer Engine nor Apex.

    Imports Megatron-Core's optimizers. Returns whether it had to.
    """
    import megatron.core.optimizer as optimizers
    from megatron.core.optimizer import distrib_optimizer

    if not optimizers.USING_PYTORCH_OPTIMIZER:
        return False
    replacements.set(optimizers, "Adam", GroupStepAdam)
    replacements.set(optimizers, "USING_PYTORCH_OPTIMIZER", False)
    # These three say where `step` is kept; the distributed optimizer reads it from the group for Apex.
    replacements.set(distrib_optimizer, "Adam", GroupStepAdam)
    replacements.set(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    replacements.set(distrib_optimizer, "USING_APEX_OPTIMIZER", True)
    return True
