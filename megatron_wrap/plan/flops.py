"""FLOPs of a training step of a GPT: those of the matmuls that the algorithm needs, for TFLOP/s and model FLOPs
utilization.

Counts matmuls alone (2 FLOPs per multiply-add), as in Narayanan et al. 2021, "Efficient Large-Scale Language Model
Training on GPU Clusters", appendix, and in Megatron-LM's `num_floating_point_operations`
(megatron/training/training.py). These assume that everything is trained: 6 FLOPs for each weight and token, of the
forward pass, of the gradient of the weight and of that of its inputs. Here a frozen weight has no gradient, and inputs
have one only if something that they depend on is trained. Recomputation is not counted. All sizes are global, not per
rank.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from megatron_wrap.plan.model_parts import EMBEDDING, OUTPUT, ModelShape, TrainedParts, model_blocks, part_of


@dataclass(frozen=True)
class Flops:
    """FLOPs of a pass or a step over a global batch, as a function of the lengths of its sequences."""

    per_token: float
    per_square: float
    """FLOPs for each squared sequence length; in packed rows, for each squared document length."""

    def of(self, num_tokens: float, sum_of_squared_lengths: float) -> float:
        """FLOPs of a batch of `num_tokens` tokens, the sum of all lengths."""
        return self.per_token * num_tokens + self.per_square * sum_of_squared_lengths

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.per_token + other.per_token, self.per_square + other.per_square)


def forward_flops(shape: ModelShape, causal: bool = True) -> Flops:
    """FLOPs of one forward pass.

    For each token 2 h (2 d_q + 2 d_kv) + 2 h f (2, or 3 when gated) in each layer, plus 2 h V, with d_q = heads *
    channels and d_kv = groups * channels; for each squared length 4 d_q [/ 2 when causal] in each layer. In a MoE
    layer, f is topk * expert size plus the size of the shared experts, and the router adds 2 h E (which Megatron-LM
    omits). With multi-latent attention, the projections are its down- and up-projections, and 4 d_q is 2 (d_q + heads *
    value head size). A sliding window is ignored: attention counts as full. A layer with linear attention has no
    scores. A trained layer for multi-token prediction adds a layer, 2 h 2 h and 2 h V. A factor of an adapter adds 2
    for each element.

    Args:
        causal: count S^2 / 2 attention scores per sequence, like Megatron-LM (the exact number is S * (S + 1) / 2).
    """
    return _flops(shape, causal, backward=False)


def training_flops(shape: ModelShape, causal: bool = True) -> Flops:
    """FLOPs of one forward and backward pass, three times `forward_flops` if everything is trained. Arguments as there.

    A matmul with weights costs its forward pass again for the gradient of the weights, if these are trained, and for
    the gradient of its inputs, if they depend on something that is trained; attention costs it twice in the latter
    case.
    """
    return _flops(shape, causal, backward=True)


def _flops(shape: ModelShape, causal: bool, backward: bool) -> Flops:
    trained, factors = TrainedParts(shape), _factors(shape)
    per_token = per_square = 0.0
    hidden = trained.embedding
    for block in model_blocks(shape):
        hidden = hidden or (block.takes_embedding and trained.embedding)
        have_gradients: dict[str, bool] = {}
        for part in block.parts:
            name = block.prefix + part.name
            inputs = any(have_gradients[before] for before in part.after) if part.after else hidden
            have_gradients[part.name] = inputs or name in trained
            share = trained.share(name) if part.weights else 0.0
            per_token += part.weights * (1 + backward * (inputs + share))
            per_square += part.scores * (1 + 2 * backward * inputs)
            for factor in factors[name]:
                of_factor = inputs or factor.follows_trained
                per_token += factor.elements * (1 + backward * (of_factor + factor.is_trained))
        hidden = hidden or (not block.returns_logits and any(have_gradients.values()))
    return Flops(2 * per_token, 2 * per_square * (0.5 if causal else 1.0))


@dataclass(frozen=True)
class _Factor:
    elements: float
    """Number of weights that multiply each token; for experts, only those of the experts that a token chooses."""
    is_trained: bool
    follows_trained: bool
    """Whether the factor's inputs are the product with another trained factor."""


def _factors(shape: ModelShape) -> dict[str, list[_Factor]]:
    """Factors of adapters and trained rows of each part. Rows of the embedding are copied; only those of the output
    layer are multiplied."""
    factors = defaultdict[str, list[_Factor]](list)
    for parameter, elements in shape.factors.items():
        part, name = part_of(parameter)
        chosen = shape.arch.moe_router_topk / (shape.arch.num_experts or 1) if ".mlp.experts." in part else 1
        is_trained = shape.trained is None or parameter in shape.trained
        factor = _Factor(elements * chosen, is_trained, is_trained and name.startswith("lora_B_"))
        if part != EMBEDDING:
            factors[part].append(factor)
        elif shape.is_tied:
            factors[OUTPUT].append(factor)
    return factors


def tflops_per_device(flops: float, elapsed_seconds: float, num_devices: int) -> float:
    """Model TFLOP/s (1e12 FLOPs per second) per device, from the FLOPs of a step and its wall time.

    Returns 0 for an elapsed time of 0 (the clock's resolution is too coarse for the step).
    """
    return flops / elapsed_seconds / num_devices / 1e12 if elapsed_seconds > 0 else 0.0
