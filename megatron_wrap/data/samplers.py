"""The order of the samples: a function of seed and position alone, so ranks agree and a run resumes without state."""

import numpy as np

from megatron_wrap.errors import DataError


class EpochSampler:
    """An endless stream of sample indices, one epoch after the other, each sample once per epoch.

    Nothing is advanced: a run resumes by asking from `consumed_samples` on. Epoch e is the permutation that NumPy's
    PCG64, seeded with (seed, e), makes of all samples; it knows nothing of ranks, batch sizes or layouts.

    Args:
        num_samples: samples in the data set, the global count.
        seed: at least 0.
        shuffle: False gives the file's order in every epoch.

    Raises:
        DataError: no samples, or a negative seed.
    """

    def __init__(self, num_samples: int, seed: int, shuffle: bool = True) -> None:
        if num_samples < 1:
            raise DataError(f"cannot sample from {num_samples} samples; the data set must hold at least 1")
        if seed < 0:
            raise DataError(f"the data seed is {seed}; it must be 0 or more")
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle
        self._cached: tuple[int, np.ndarray] | None = None

    def indices(self, start: int, count: int) -> list[int]:
        """The global sample indices at stream positions start, start + 1, ..., start + count - 1.

        Args:
            start: position in the stream, counted over all epochs; `consumed_samples` of the run.
            count: how many; more than one epoch is fine.

        Raises:
            DataError: `start` or `count` is negative.
        """
        if start < 0 or count < 0:
            raise DataError(f"positions of the sample stream begin at 0; asked for {count} from {start}")
        taken: list[int] = []
        while len(taken) < count:
            epoch, offset = divmod(start + len(taken), self.num_samples)
            end = min(offset + count - len(taken), self.num_samples)
            taken.extend(self.epoch(epoch)[offset:end].tolist())
        return taken

    def epoch(self, epoch: int) -> np.ndarray:
        """All sample indices in the order of this epoch (from 0): int64 [num_samples], read-only."""
        if self._cached is None or self._cached[0] != epoch:
            order = np.arange(self.num_samples, dtype=np.int64)
            if self.shuffle:
                order = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(order)
            order.setflags(write=False)
            self._cached = (epoch, order)  # the last one only: a run asks for one epoch for a long time
        return self._cached[1]
