"""What training an adapter keeps: nothing for frozen weights but the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

CONFIG = Path(__file__).parents[2] / "scripts" / "benchmark" / "overhead.yaml"
HIDDEN, FFN, LAYERS, TOKENS = 32, 88, 2, 2 * 16
SETTINGS = (
    "megatron_wrap.adapter.__select__=lora",
    "megatron_wrap.adapter.r=4",
    "megatron_lm.train.dtype.__select__=bf16",
    f"megatron_lm.model.arch.hidden_size={HIDDEN}",
    f"megatron_lm.model.arch.ffn_hidden_size={FFN}",
    f"megatron_lm.model.arch.num_layers={LAYERS}",
    "megatron_lm.model.arch.vocab_size=64",
    "megatron_lm.train.common.micro_batch_size=2",
    "megatron_lm.train.common.global_batch_size=2",
    "megatron_lm.train.common.seq_length=16",
    "megatron_wrap.init.platform=cpu",
)


def kept_in_a_step(adapter: tuple[str, ...], outputs: str) -> dict[str, Any]:
    """Sizes of what a run keeps for its parameters, and shapes of what one step's forward pass keeps."""
    from megatron_wrap.core import MegatronWrap

    with MegatronWrap(CONFIG, [*SETTINGS, *adapter, f"megatron_wrap.logger.output_dir={outputs}"]) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        chunk, optimizer = wrap.state.chunks[0], wrap.state.optimizer
        parameters = list(chunk.parameters())
        memory = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        saved: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in memory:
                saved[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that no other tensor takes its memory
            return tensor

        ids = numpy.random.default_rng(0).integers(0, 64, (2, 17)).tolist()
        samples = [{"input_ids": row, "loss_mask": [1] * 17} for row in ids]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            wrap.train(samples)
        frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        states = [state for part in optimizer.optimizer.state.values() for state in part.values()]
        return {
            "trained": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            "gradient_buffers": sum(buffer.grad_data.numel() for buffer in chunk.buffers),
            "masters": sum(p.numel() for group in optimizer.param_groups for p in group["params"]),
            "states": sum(state.numel() for state in states if torch.is_tensor(state) and state.dim()),
            "gradients": [p for p in frozen if p.grad is not None or getattr(p, "main_grad", None) is not None],
            "saved": [tuple(tensor.shape) for tensor in saved.values() if tensor.numel() >= TOKENS * HIDDEN],
        }


def test_frozen_weights_have_no_gradient_no_fp32_copy_and_no_optimizer_state(ranks, tmp_path) -> None:
    kept = ranks(1).run(kept_in_a_step, (), str(tmp_path))[0]
    assert kept["gradient_buffers"] == kept["masters"] == kept["trained"] > 0
    assert kept["states"] == 2 * kept["trained"]
    assert kept["gradients"] == []


@pytest.mark.parametrize("module", ["q_proj", "down_proj"])
def test_the_inputs_of_frozen_layers_are_not_kept(ranks, module, tmp_path) -> None:
    targets = f"megatron_wrap.adapter.target_modules=[{module}]"
    saved = ranks(1).run(kept_in_a_step, (targets,), str(tmp_path))[0]["saved"]
    width = HIDDEN if module == "q_proj" else FFN
    inputs = [shape for shape in saved if shape == (TOKENS, width)]
    assert len(inputs) == LAYERS  # of the adapters: without them no layer's input is kept
    assert (TOKENS, HIDDEN + FFN - width) not in saved


def test_layers_before_the_first_adapter_keep_nothing(ranks, tmp_path) -> None:
    last = (
        "megatron_wrap.adapter.target_modules=[down_proj]",
        f"megatron_wrap.adapter.layers_to_transform=[{LAYERS - 1}]",
    )
    saved = ranks(1).run(kept_in_a_step, last, str(tmp_path))[0]["saved"]
    assert [shape for shape in saved if shape[-1] in (FFN, 2 * FFN)] == [(TOKENS, FFN)]
    assert not any(len(shape) == 4 for shape in saved)  # queries, keys and values
