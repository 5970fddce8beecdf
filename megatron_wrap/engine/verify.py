"""Compares a run's model with transformers: logits on real text, the output of every layer, and every weight after a
round trip. Collective over all ranks; only global rank 0 runs transformers."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import random
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.bridge.family import Family
from megatron_wrap.bridge.source import WeightSource
from megatron_wrap.bridge.start import hugging_face_source
from megatron_wrap.bridge.stream import WeightStream
from megatron_wrap.config import derived
from megatron_wrap.config.schema import RunConfig
from megatron_wrap.engine.logits import sequence_logits
from megatron_wrap.engine.state import TrainingState
from megatron_wrap.errors import CheckpointError
from megatron_wrap.model.chunks import bare_model
from megatron_wrap.model.transformer import parameter_dtype
from megatron_wrap.parallel import context
from megatron_wrap.parallel.collectives import broadcast_object, gather_objects, gather_tensors

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Model dtype -> largest absolute difference allowed, divided by the tensor's largest absolute value (at least 1)."""

_TEXTS = (json, random, statistics, textwrap, asyncio)
"""Modules of the standard library whose docstrings are the input text."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """One compared tensor. `largest` is the largest absolute difference; `relative` is `largest` divided by the largest
    absolute value of transformers' tensor (at least 1)."""

    name: str
    largest: float
    relative: float
    agrees: bool


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Result of the comparison; the same on every rank."""

    folder: str
    model_type: str
    layout: str
    dtype: str
    text: str
    """Source of the token ids."""
    tokens: int
    tolerance: float
    weights: int
    """Number of weights compared, bit for bit after conversion of the folder's dtype to the model's."""
    weight_differences: tuple[Difference, ...]
    activations: tuple[Difference, ...]
    """Outputs of the embedding and of each layer, and the logits, in the order of the model."""

    @property
    def agrees(self) -> bool:
        """Whether nothing differs."""
        return self.first_difference is None

    @property
    def first_difference(self) -> str | None:
        """The first tensor that differs, in the order of the model; None if all agree."""
        if self.weight_differences:
            first = self.weight_differences[0]
            return f"weight {first.name} differs by {first.largest:.3g} after the round trip"
        for activation in self.activations:
            if not activation.agrees:
                return (
                    f"{activation.name} is the first output that differs, by {activation.largest:.3g} "
                    f"(relative to its largest value {activation.relative:.3g}; tolerance {self.tolerance:g})"
                )
        return None

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain values."""
        head = {"agrees": self.agrees, "first_difference": self.first_difference}
        return {**head, **dataclasses.asdict(self)}

    def table(self) -> str:
        """The verdict as a table for the console."""
        width = max(len(one.name) for one in (*self.activations, *self.weight_differences))
        lines = [
            f"{self.folder} ({self.model_type}) on {self.layout} in {self.dtype}, {self.tokens} tokens of {self.text}",
            f"{'output':<{width}}  {'difference':>10}  {'relative':>10}",
        ]
        for one in self.activations:
            lines.append(
                f"{one.name:<{width}}  {one.largest:>10.3g}  {one.relative:>10.3g}  {'ok' if one.agrees else 'DIFFERS'}"
            )
        same = self.weights - len(self.weight_differences)
        lines.append(f"{same} of {self.weights} weights are the same after a round trip")
        lines += [f"{one.name:<{width}}  {one.largest:>10.3g}  DIFFERS" for one in self.weight_differences[:10]]
        lines.append("agrees with transformers" if self.agrees else f"DIFFERS: {self.first_difference}")
        return "\n".join(lines)


def verify_hugging_face(state: TrainingState, tokenizer: Any = None, length: int = 64) -> Verdict:
    """Compare the model of a run that starts from `hf_path` with transformers, before its first step. Collective.

    Args:
        tokenizer: tokenizes the text; None: random ids.
        length: maximum number of tokens of each of two sequences.

    Raises:
        CheckpointError: the run has no hf_path, or transformers cannot load it.
    """
    family, source = _starting_folder(state.config)
    dtype = parameter_dtype(state.config)
    sequences, text = _sequences(
        state.shape.vocab_size, tokenizer, min(length, state.config.arch.max_position_embeddings or length)
    )
    with _outputs_of_layers(state) as outputs:
        logits = sequence_logits(state, sequences)
    ours = {name: tensor for rank_outputs in gather_objects(dict(outputs)) for name, tensor in rank_outputs.items()}
    stream = WeightStream(
        [bare_model(chunk) for chunk in state.chunks],
        family,
        state.config.arch,
        state.parallel,
        state.platform.device,
        dtype,
    )
    weights = _compare_weights(stream, source, state.parallel.world.rank)
    verdict: Verdict | str = ""
    if state.parallel.world.rank == 0:
        try:
            theirs, their_logits = _transformers(source, dtype, sequences)
            pairs = [(name, ours[name], theirs[name]) for name in sorted(ours, key=_place_in_model) if name in theirs]
            pairs += [
                (f"logits of sequence {number}", *both)
                for number, both in enumerate(zip(logits, their_logits, strict=True))
            ]
            verdict = Verdict(
                folder=str(source.folder),
                model_type=family.model_type,
                layout=state.parallel.layout,
                dtype=str(dtype).removeprefix("torch."),
                text=text,
                tokens=sum(map(len, sequences)),
                tolerance=TOLERANCE[dtype],
                weights=len(stream.tensors),
                weight_differences=weights,
                activations=tuple(_difference(name, a, b, TOLERANCE[dtype]) for name, a, b in pairs),
            )
        except Exception as error:  # transformers may raise any; the other ranks wait in the broadcast below
            verdict = f"{source.folder}: transformers cannot run it: {type(error).__name__}: {error}"
    verdict = broadcast_object(verdict, source_rank=0)
    if isinstance(verdict, str):
        raise CheckpointError(verdict)
    return verdict


def _starting_folder(config: RunConfig) -> tuple[Family, WeightSource]:
    found = hugging_face_source(config)
    if found is None:
        raise CheckpointError(
            "there is no model to compare with: megatron_wrap.model_provider.hf_path is null; set it to the folder"
        )
    if derived.has_value_head(config):
        raise CheckpointError(f"{derived.VALUE_PROVIDER} has no logits to compare with transformers; verify gpt_model")
    return found


def _sequences(vocab_size: int, tokenizer: Any, length: int) -> tuple[list[list[int]], str]:
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocab_size, (2, length), generator=generator)
        return ids.tolist(), "random ids (there is no tokenizer)"
    text = "\n\n".join(inspect.getdoc(module) or "" for module in _TEXTS)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    cut = [ids[start : start + length] for start in (0, length)]
    return [part for part in cut if part], "the standard library's documentation"


@contextmanager
def _outputs_of_layers(state: TrainingState) -> Iterator[dict[str, Tensor]]:
    """Collect the outputs of the embedding and the layers for the first sequence: name -> [S, hidden], fp32 on the CPU.
    Only tensor- and context-parallel rank 0 of the first replica keep them."""
    parallel = state.parallel
    found: dict[str, Tensor] = {}
    split = state.transformer_config.sequence_parallel

    def collect(name: str, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if name in found or parallel.dp.rank != 0:
            return
        hidden = hidden.detach()[:, :1]
        if split:
            hidden = torch.cat(gather_tensors(hidden, parallel.tp.group))
        hidden = context.merge(gather_tensors(hidden, parallel.cp.group), 0)
        found[name] = hidden[:, 0].float().cpu()

    handles = []
    for chunk in state.chunks:
        model = bare_model(chunk)
        for layer in getattr(model.decoder, "layers", ()):
            name = f"layer {layer.layer_number - 1}"
            handles.append(layer.register_forward_hook(lambda _m, _i, out, name=name: collect(name, out)))
        if getattr(model, "pre_process", False):
            handles.append(model.embedding.register_forward_hook(lambda _m, _i, out: collect("embedding", out)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        if parallel.tp.rank or parallel.cp.rank:
            found.clear()


def _place_in_model(name: str) -> int:
    return -1 if name == "embedding" else int(name.rpartition(" ")[2])


def _transformers(
    source: WeightSource, dtype: torch.dtype, sequences: Sequence[Sequence[int]]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """transformers' outputs of the embedding and the layers for the first sequence, and the logits of all sequences, on
    the CPU."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        source.folder, dtype=dtype, attn_implementation="eager", trust_remote_code=False
    ).eval()
    layers = getattr(model.base_model, "layers", None) or model.base_model.h
    found: dict[str, Tensor] = {}

    def collect(name: str, output: Any) -> None:  # returns None: a hook's return value replaces the output
        found.setdefault(name, (output[0] if isinstance(output, tuple) else output)[0].float())

    handles = [
        layer.register_forward_hook(lambda _m, _i, out, name=f"layer {number}": collect(name, out))
        for number, layer in enumerate(layers)
    ]
    logits = []
    with torch.no_grad():
        for number, ids in enumerate(sequences):
            answer = model(torch.tensor([list(ids)]), output_hidden_states=number == 0, use_cache=False)
            logits.append(answer.logits[0].float())
            if number == 0:
                found["embedding"] = answer.hidden_states[0][0].float()
    for handle in handles:
        handle.remove()
    return found, logits


def _compare_weights(stream: WeightStream, source: WeightSource, rank: int) -> tuple[Difference, ...]:
    """The weights that differ from the folder's after a round trip, in the order of the model; on rank 0."""
    differing = []
    for tensor in stream.tensors:
        for start, block in stream.numbered_blocks(tensor, to_rank=0):
            if rank == 0 and block is not None:
                region = ((start, start + block.shape[0]), *((0, size) for size in tensor.shape[1:]))
                stored = source.read(tensor.name, region).to(block.dtype)
                if not torch.equal(stored, block):
                    largest = (stored.float() - block.float()).abs().max().item()
                    differing.append(Difference(tensor.name, largest, largest, agrees=False))
    unique = {one.name: one for one in reversed(differing)}
    return tuple(reversed(unique.values()))


def _difference(name: str, ours: Tensor, theirs: Tensor, tolerance: float) -> Difference:
    ours = ours[: theirs.shape[0]].float()  # sequences are padded to the layout's divisor
    if ours.shape != theirs.shape:
        return Difference(f"{name} (shape {tuple(ours.shape)}, not {tuple(theirs.shape)})", 0.0, 0.0, agrees=False)
    largest = (ours - theirs).abs().max().item()
    relative = largest / max(1.0, theirs.abs().max().item())
    return Difference(name, largest, relative, agrees=relative <= tolerance)  # False for nan
