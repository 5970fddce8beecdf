"""This process's position in the layout: the sizes, ranks and groups of `MegatronWrap`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron_wrap.parallel.state import ParallelState


class LayoutView:
    """Mixin of `MegatronWrap`; every property requires `initialize()` first."""

    if TYPE_CHECKING:

        def _initialized(self) -> ParallelState: ...

    tp_size = property(lambda self: self._initialized().tp.size, doc="Tensor-parallel size.")
    tp_rank = property(lambda self: self._initialized().tp.rank, doc="Tensor-parallel rank of this process.")
    pp_size = property(lambda self: self._initialized().pp.size, doc="Pipeline-parallel size.")
    pp_rank = property(lambda self: self._initialized().pp.rank, doc="Pipeline stage of this process.")
    dp_size = property(lambda self: self._initialized().dp.size, doc="Data-parallel size, without CP.")
    dp_rank = property(lambda self: self._initialized().dp.rank, doc="Data-parallel rank of this process.")
    cp_size = property(lambda self: self._initialized().cp.size, doc="Context-parallel size.")
    cp_rank = property(lambda self: self._initialized().cp.rank, doc="Context-parallel rank of this process.")
    ep_size = property(lambda self: self._initialized().ep.size, doc="Expert-parallel size.")
    ep_rank = property(lambda self: self._initialized().ep.rank, doc="Expert-parallel rank of this process.")

    @property
    def tp_group(self) -> ProcessGroup:
        """Tensor-parallel group of this process."""
        return self._initialized().tp.group

    @property
    def pp_group(self) -> ProcessGroup:
        """Pipeline-parallel group of this process."""
        return self._initialized().pp.group

    @property
    def dp_group(self) -> ProcessGroup:
        """Data-parallel group of this process, without CP."""
        return self._initialized().dp.group

    @property
    def cp_group(self) -> ProcessGroup:
        """Context-parallel group of this process."""
        return self._initialized().cp.group

    @property
    def ep_group(self) -> ProcessGroup:
        """Expert-parallel group of this process."""
        return self._initialized().ep.group
