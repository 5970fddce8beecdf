"""Names of tensors in a folder with a vision encoder, of which only the language model is read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_PUBLISHED, _TRANSFORMERS = PREFIXES = ("language_model.", "model.language_model.")
"""Prefixes of the language model's tensors, as Mistral publishes them and as transformers 5 names them."""
_VISION = r"(model\.)?(vision_tower|multi_modal_projector|visual)\..*"
LEFT_OUT: Mapping[str, str] = {
    _VISION: "the vision encoder and its projector are not loaded: the text model is trained, and exported alone, or "
    "with keep_vision together with the encoder"
}
"""Pattern (full match) of the vision encoder's tensors -> a warning for the user."""


def is_vision(name: str) -> bool:
    """Whether a tensor belongs to the vision encoder or its projector."""
    return re.fullmatch(_VISION, name) is not None


def prefix_of(names: Iterable[str]) -> str | None:
    """The prefix of the language model's tensors; None if the folder contains only a text model."""
    return next((prefix for name in names for prefix in PREFIXES if name.startswith(prefix)), None)


def text_name(name: str) -> str:
    """The name that a tensor of the folder has in a folder of the language model alone."""
    if name.startswith(_TRANSFORMERS):
        return "model." + name.removeprefix(_TRANSFORMERS)
    return name.removeprefix(_PUBLISHED)


def name_beside_vision(name: str, prefix: str) -> str:
    """The inverse of `text_name`, for the folder's prefix."""
    if prefix == _PUBLISHED:
        return _PUBLISHED + name
    return _TRANSFORMERS + name.removeprefix("model.") if name.startswith("model.") else name
