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
        DataError: no samples.
    """

    def __init__(self, num_samples: int, seed: int, shuffle: bool = True, part: int = 0) -> None:
        if num_samples < 1:
            raise DataError(f"the dataset has {num_samples} samples; it needs at least 1")
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle
        self.part = part
        self._cached: tuple[int, np.ndarray] | None = None

    def index(self, position: int) -> int:
        """The global index of the sample at a position of the stream over all epochs, from 0 on."""
        epoch, offset = divmod(position, self.num_samples)
        return int(self._order(epoch)[offset]) if self.shuffle else offset

    def _order(self, epoch: int) -> np.ndarray:
        """All sample indices in the order of this epoch (from 0): int64 [num_samples]."""
        if self._cached is None or self._cached[0] != epoch:
            # NumPy takes (seed, e, 0) for (seed, e)
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch, self.part]))
            # only the last one: a run stays in one epoch for a long time
            self._cached = (epoch, generator.permutation(np.arange(self.num_samples, dtype=np.int64)))
        return self._cached[1]
