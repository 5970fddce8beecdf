"""States of the random generators that a step uses."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron_wrap.platform.megatron_core.graphs import set_tracked_states, tracked_states


@dataclass(frozen=True)
class RandomStates:
    """States of Python's, numpy's, torch's, the device's and Megatron-Core's random generators. `now` takes tens of
    microseconds and does not wait for the device."""

    python: Any
    numpy: Any
    host: Tensor
    """State of torch's generator on the CPU."""
    device: Tensor | None
    """State of the GPU's generator; None without a GPU."""
    tracker: dict[str, Tensor]
    """States of Megatron-Core's generators, by name."""

    @classmethod
    def now(cls, device: torch.device) -> RandomStates:
        """The current states."""
        return cls(
            random.getstate(),
            numpy.random.get_state(legacy=True),
            torch.get_rng_state(),
            torch.cuda.get_rng_state() if device.type == "cuda" else None,
            tracked_states(),
        )

    def restore(self) -> None:
        """Set the generators to these states."""
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device)
        set_tracked_states(self.tracker)
