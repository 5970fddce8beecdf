"""Sample order that depends only on seed and position, so all ranks agree and a run resumes without sampler state."""

import numpy as np

from megatron_wrap.errors import DataError


class EpochSampler:
    """An endless stream of sample indices, epoch by epoch, with each sample once per epoch.

    The sampler has no state: a resumed run reads from position `consumed_samples`. Epoch e is the permutation by
    NumPy's PCG64 with seed (seed, e); it does not depend on ranks, batch sizes or layouts.

    Args:
        num_samples: global number of samples in the dataset.
        seed: at least 0.
        shuffle: False: the order of the file in every epoch.
        part: number of this dataset in a mixture, from 1, so that equally long datasets have different orders; the
            seed of epoch e is then (seed, e, part). 0: no mixture.

    Raises:
        DataError: no samples, or a negative seed.
    """

    def __init__(self, num_samples: int, seed: int, shuffle: bool = True, part: int = 0) -> None:
        if num_samples < 1:
            raise DataError(f"the dataset has {num_samples} samples; it needs at least 1")
        if seed < 0:
            raise DataError(f"the data seed is {seed}; it must be 0 or more")
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle
        self.part = part
        self._cached: tuple[int, np.ndarray] | None = None

    def indices(self, start: int, count: int) -> list[int]:
        """The global sample indices at stream positions start, start + 1, ..., start + count - 1.

        Args:
            start: position in the stream over all epochs, such as `consumed_samples` of the run.
            count: number of indices; may exceed an epoch.

        Raises:
            DataError: `start` or `count` is negative.
        """
        if start < 0 or count < 0:
            raise DataError(f"cannot read {count} samples from position {start}; both must be 0 or more")
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
                # NumPy takes (seed, e, 0) for (seed, e)
                order = np.random.Generator(np.random.PCG64([self.seed, epoch, self.part])).permutation(order)
            order.setflags(write=False)
            self._cached = (epoch, order)  # only the last one: a run stays in one epoch for a long time
        return self._cached[1]
