"""The layers of each pipeline stage, in the notation of Megatron-LM's `--pipeline-model-parallel-layout`."""

from __future__ import annotations

import re
from dataclasses import dataclass

EMBEDDING, LAYER, LOSS = "E", "t", "L"


@dataclass(frozen=True)
class PipelineLayout:
    """The transformer layers of each model chunk; the embedding is in the first chunk, output layer and loss in the
    last."""

    layers: tuple[int, ...]
    """Number of layers of each chunk in the model's order; chunk c is on stage c % num_stages."""
    num_stages: int

    @property
    def chunks_per_stage(self) -> int:
        """Model chunks on each stage; above 1 the pipeline is interleaved."""
        return len(self.layers) // self.num_stages

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Layers on each stage, first to last."""
        return tuple(sum(self.layers[stage :: self.num_stages]) for stage in range(self.num_stages))

    def __str__(self) -> str:
        """The layout in Megatron-LM's notation, such as `Et*10|t*6L`."""
        chunks = [f"{LAYER}*{count}" if count > 1 else LAYER for count in self.layers]
        return EMBEDDING + "|".join(chunks) + LOSS


def even_layout(num_layers: int, num_stages: int, chunks_per_stage: int) -> PipelineLayout | None:
    """The layout with equally many layers in each chunk; None if the number of chunks does not divide them."""
    count, rest = divmod(num_layers, num_stages * chunks_per_stage)
    return None if rest or not count else PipelineLayout((count,) * (num_stages * chunks_per_stage), num_stages)


def parse_layout(text: str, num_layers: int, num_stages: int) -> PipelineLayout:
    """Read Megatron-LM's notation: `E` embedding, `t` layer, `L` loss; `|` ends a chunk, `x*3` and `(x|)*3` repeat.

    Raises:
        ValueError: what is wrong with the text for this model, as a predicate of it.
    """
    parts = _unrolled(text).split("|")
    unknown = sorted(set("".join(parts)) - {EMBEDDING, LAYER, LOSS})
    if unknown:
        extra = "; layers of multi-token prediction are not trained" if "m" in unknown else ""
        raise ValueError(f"contains {', '.join(map(repr, unknown))}; use E, t, L, | and *{extra}")
    if len(parts) % num_stages:
        raise ValueError(f"has {len(parts)} parts, which is no multiple of pipeline_model_parallel_size {num_stages}")
    whole = "".join(parts)
    if not re.fullmatch(f"{EMBEDDING}{LAYER}*{LOSS}", whole) or EMBEDDING not in parts[0] or LOSS not in parts[-1]:
        raise ValueError("must have one E, first of all, and one L, last of all")
    layers = tuple(part.count(LAYER) for part in parts)
    if sum(layers) != num_layers:
        raise ValueError(f"has {sum(layers)} layers ({LAYER}), and num_layers is {num_layers}")
    if 0 in layers:
        raise ValueError(f"has no layer ({LAYER}) in part {layers.index(0) + 1} of {len(layers)}")
    return PipelineLayout(layers, num_stages)


def _unrolled(text: str) -> str:
    text = text.replace(",", "").replace(" ", "")
    for repeated in (r"\(([^()]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(repeated, lambda match: match[1] * min(int(match[2]), 10_000), text)
    return text
