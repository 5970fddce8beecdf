"""Replays recorded routing in the passes of the pipeline schedule, and records the routing of forward passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_wrap.engine.batches.micro_batch import MicroBatch
from megatron_wrap.errors import PlatformError
from megatron_wrap.flow.contract.routing import RoutingShape
from megatron_wrap.nn.experts.expert_choice import ExpertChoice
from megatron_wrap.parallel import zigzag
from megatron_wrap.parallel.collectives import gather_objects, gather_tensors
from megatron_wrap.parallel.state import ParallelState


class RoutingReplay:
    """The routers of the policy on this process.

    Args:
        shape: of a recorded routing of the whole model.
        chunks: the policy's model chunks on this process.
        sequence_parallel: each tensor-parallel process routes its part of the tokens.
    """

    def __init__(
        self, shape: RoutingShape, chunks: Sequence[torch.nn.Module], parallel: ParallelState, sequence_parallel: bool
    ) -> None:
        from megatron_wrap.nn.experts.router import Router

        self.shape = shape
        self._tp, self._cp, self._pp = parallel.tp, parallel.cp, parallel.pp
        self._splits = sequence_parallel and parallel.tp.size > 1
        columns = {layer: column for column, layer in enumerate(shape.layers)}
        self._choices: dict[torch.nn.Module, dict[int, ExpertChoice]] = {
            chunk: {
                columns[module.layer_number - 1]: module.choice
                for module in chunk.modules()
                if isinstance(module, Router) and module.layer_number is not None
            }
            for chunk in chunks
        }
        count = sum(len(choices) for choices in self._choices.values())
        if sum(gather_objects(count, parallel.pp.group)) != len(shape.layers):
            raise PlatformError(
                "megatron_lm.train.common.router_replay needs the routers of megatron_wrap.nn.experts.router in all "
                f"{len(shape.layers)} layers with experts, and the model provider builds others; set it to disabled"
            )
        self._recorded: dict[int, list[Tensor]] | None = None

    @contextmanager
    def of_pass(self, model: torch.nn.Module, routing: Tensor | None) -> Iterator[None]:
        """Context of the forward pass of a micro-batch through a model chunk; it does nothing if the chunk is not the
        policy's.

        Args:
            routing: [B, S/cp, layers with experts, topk], or None for the routers' own selection.
        """
        choices, records = self._choices.get(model, {}), self._recorded is not None
        if routing is not None and self._splits:
            routing = routing.chunk(self._tp.size, dim=1)[self._tp.rank]
        for column, choice in choices.items():
            of_layer = None if routing is None else routing[:, :, column].transpose(0, 1).flatten(0, 1).long()
            choice.begin_pass(of_layer, records)
        try:
            yield
        finally:
            for choice in choices.values():
                choice.end_pass()
        if self._recorded is not None:
            for column, choice in choices.items():
                assert choice.recorded is not None
                self._recorded.setdefault(column, []).append(choice.recorded)

    def end_of_run(self) -> None:
        """Forget the routing of a run of the schedule, after its last micro-batch."""
        for choices in self._choices.values():
            for choice in choices.values():
                choice.forget()

    @contextmanager
    def recording(self) -> Iterator[dict[int, list[Tensor]]]:
        """Context that records the forward passes of the policy: column of a layer -> the selection of each
        micro-batch, for `rows`."""
        self._recorded = {}
        try:
            yield self._recorded
        finally:
            self._recorded = None

    def rows(self, recorded: dict[int, list[Tensor]], local: Sequence[MicroBatch]) -> list[Tensor]:
        """The recorded routing [tokens, layers with experts, topk] of each sequence of the micro-batches `local`
        without padding, of the type `shape.dtype` on the CPU. Collective over the replica.

        Args:
            recorded: of one run of the schedule over `local`, none of which is packed.
        """
        columns = sorted(recorded)
        of_stage: list[Tensor] = []  # [B, S, layers, topk] of each micro-batch
        for number, micro_batch in enumerate(local):
            if not columns:
                break
            tokens = torch.stack([recorded[column][number] for column in columns], dim=1).int()  # gloo has no int16
            by_row = tokens.unflatten(0, (-1, micro_batch.num_rows)).transpose(0, 1).contiguous()
            if self._splits:
                by_row = torch.cat(gather_tensors(by_row, self._tp.group), dim=1)
            of_stage.append(zigzag.merge(gather_tensors(by_row, self._cp.group), 1).cpu())
        by_stage = gather_objects((columns, of_stage), self._pp.group)
        order = torch.tensor([column for of_columns, _ in by_stage for column in of_columns]).argsort()
        rows = []
        for number, micro_batch in enumerate(local):
            if micro_batch.counted:
                whole = torch.cat([tensors[number] for _, tensors in by_stage if tensors], dim=2)[:, :, order]
                lengths = micro_batch.lengths.tolist()
                rows += [whole[row, :length].to(self.shape.dtype) for row, length in enumerate(lengths)]
        return rows
