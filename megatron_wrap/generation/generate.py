"""Text generation on any layout: `MegatronWrap.generate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from megatron_wrap.config.hugging_face import read_generation_config, resolve_folder
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.data.chat.encode import prompt_text, prompt_token_ids
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.errors import ConfigError, DataError
from megatron_wrap.generation.cached_model import CachedModel
from megatron_wrap.generation.sampling import SamplingRule, UniformNumbers
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.parallel.collectives import all_reduce_values, gather_objects
from megatron_wrap.platform.megatron_core.generation import whole_sequences

if TYPE_CHECKING:
    from typing import NotRequired

    from torch.distributed import ProcessGroup

    from megatron_wrap.utils.progress import WorkProgress


class Completion(TypedDict):
    """The completion of one prompt."""

    text: str | None
    """The new tokens as text without special tokens, cut before a stop string; None without a tokenizer."""
    token_ids: list[int]
    """The new tokens, including the end token if there is one."""
    finish_reason: str
    """"stop": at an end token or stop string; "length": after max_new_tokens."""
    log_probs: NotRequired[list[float]]
    """Log-probability of each new token, in nats; only if requested."""


@dataclass(frozen=True)
class StopRule:
    """The conditions that end a completion."""

    max_new_tokens: int
    token_ids: frozenset[int]
    texts: tuple[str, ...]
    tokenizer: Any

    def reason(self, new_ids: Sequence[int]) -> str | None:
        """The finish reason of a completion with these tokens; None if it is not finished."""
        if new_ids and (new_ids[-1] in self.token_ids or (self.texts and self._cut(self._text(new_ids)) is not None)):
            return "stop"
        return "length" if len(new_ids) >= self.max_new_tokens else None

    def text(self, new_ids: Sequence[int]) -> str | None:
        """The completion's text, cut before the first stop string; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        text = self._text(new_ids)
        cut = self._cut(text)
        return text if cut is None else text[:cut]

    def _text(self, new_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(new_ids), skip_special_tokens=True)

    def _cut(self, text: str) -> int | None:
        return min((text.index(stop) for stop in self.texts if stop in text), default=None)


@dataclass
class _Row:
    """One prompt and its completion so far."""

    index: int
    """Index of the prompt in the list."""
    prompt: list[int]
    numbers: UniformNumbers
    new_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


def generate(
    state: TrainingState,
    tokenizer: Any,
    prompts: Sequence[Any] | None,
    max_new_tokens: int,
    rule: SamplingRule,
    seed: int,
    stop: Sequence[str | int],
    batch_size: int,
    n: int = 1,
    log_probs: bool = False,
    caller: str = "generate",
    on_tokens: Callable[[int, list[int]], None] | None = None,
    progress: WorkProgress | None = None,
) -> list[Completion]:
    """Complete prompts by incremental decoding with a KV cache; the state is unchanged. Collective over all ranks.

    Prompts of a batch are left-padded to one length and prefilled together. Each row has the positions that it would
    have alone and does not attend to padding, with every kind of position embedding and attention. Prompts of similar
    length are batched together, which keeps the padding short; equal prompts of a batch are prefilled once.

    Args:
        prompts: see `prompt_token_ids`; on every rank, or only on global rank 0 with None on the others.
        stop: texts and token ids that end a completion, in addition to the model's end tokens.
        batch_size: completions that one replica computes at a time.
        n: completions of each prompt.
        log_probs: also return the log-probabilities of the new tokens.
        caller: name of the call in error messages.
        on_tokens: called with the index and the new tokens so far of a completion after each token, on the processes of
            the replica that computes it; replica 0 computes the first.
        progress: advanced by the completions of each batch.

    Returns:
        `n` completions for each prompt, in the order of the prompts, the same on every rank.

    Raises:
        DataError: a prompt or an argument is wrong.
    """
    _check({"max_new_tokens": (max_new_tokens, 1), "batch_size": (batch_size, 1), "n": (n, 1), "seed": (seed, 0)})
    if derived.has_value_head(state.config):
        raise ConfigError(f"{caller}: {derived.VALUE_PROVIDER} returns scores and cannot generate; use wrap.forward")
    prompts = state.sharing.share(prompts, caller)
    if isinstance(prompts, str):
        raise DataError("wrap.generate: prompts is one text; pass a list of prompts")
    ends = StopRule(max_new_tokens, *_stops(state.config.model_provider.hf_path, tokenizer, stop), tokenizer)
    token_ids = [prompt_token_ids(tokenizer, prompt, state.shape.vocab_size) for prompt in prompts]
    repeated = [prompt for prompt in token_ids for _ in range(n)]
    rows = [_Row(index, prompt, UniformNumbers(seed, index)) for index, prompt in enumerate(repeated)]
    limit = _position_limit(state.config.arch, state.config.train.seq_length)
    _check_lengths(rows, max_new_tokens, limit)
    finished: list[_Row] = []
    with state.evaluation_mode(), whole_sequences(state.chunks):
        for batch in _batches(rows, state.parallel.dp.size * batch_size):
            finished += _complete(state, batch, rule, ends, log_probs, on_tokens)
            if progress is not None:
                progress.advance(len(batch))
    return _completions(finished, ends, log_probs, state.parallel.dp.group)


def _completions(rows: list[_Row], ends: StopRule, log_probs: bool, dp_group: ProcessGroup) -> list[Completion]:
    """The completions of all replicas, in the order of the prompts. Collective over the replicas.

    Args:
        rows: this replica's, finished.
    """
    of_this_replica = [(row.index, row.new_ids, str(row.finish_reason), row.log_probs) for row in rows]
    completions = []
    ordered = sorted(of_row for of_replica in gather_objects(of_this_replica, dp_group) for of_row in of_replica)
    for _, new_ids, reason, of_tokens in ordered:
        completions.append(Completion(text=ends.text(new_ids), token_ids=new_ids, finish_reason=reason))
        if log_probs:
            completions[-1]["log_probs"] = of_tokens
    return completions


def sample_texts(
    state: TrainingState, tokenizer: Any, prompts: Sequence[Any], max_new_tokens: int = 64
) -> list[tuple[str, str]]:
    """(`prompt_text`, greedy completion) for each prompt, a text or messages; `max_new_tokens` is lowered to fit the
    model's learned positions. Collective."""
    max_new_tokens = fitting_max_new_tokens(state, tokenizer, prompts, max_new_tokens)
    caller = "evaluate(sample_prompts)"
    completions = generate(
        state, tokenizer, prompts, max_new_tokens, SamplingRule(), 0, (), len(prompts), caller=caller
    )
    return [
        (prompt_text(prompt), completion["text"] or "") for prompt, completion in zip(prompts, completions, strict=True)
    ]


def fitting_max_new_tokens(state: TrainingState, tokenizer: Any, prompts: Sequence[Any], max_new_tokens: int) -> int:
    """`max_new_tokens`, or fewer where learned positions have no room for as many after the longest prompt; at least
    1."""
    limit = _position_limit(state.config.arch, state.config.train.seq_length)
    if limit is None:
        return max_new_tokens
    longest = max(len(prompt_token_ids(tokenizer, prompt, state.shape.vocab_size)) for prompt in prompts)
    return max(1, min(max_new_tokens, limit - longest))


def _complete(
    state: TrainingState,
    batch: list[_Row],
    rule: SamplingRule,
    ends: StopRule,
    log_probs: bool,
    on_tokens: Callable[[int, list[int]], None] | None,
) -> list[_Row]:
    """Complete a batch that is spread over all replicas; returns this replica's rows.

    Expert-parallel processes exchange tokens in each forward pass, so all replicas run passes of the same shape: a
    replica with fewer rows adds fillers. With expert parallelism it also continues until all replicas are done.
    """
    dp = state.parallel.dp
    size = -(-len(batch) // dp.size)
    shares = [batch[rank * size : (rank + 1) * size] for rank in range(dp.size)]
    local = shares[dp.rank]
    rows = [*local, *[_Row(0, batch[0].prompt, UniformNumbers(0, 0), finish_reason="stop")] * (size - len(local))]
    prompts, sources = _distinct([row.prompt for row in rows])
    most = max(len(_distinct([row.prompt for row in [*share, *batch[: len(share) < size]]])[0]) for share in shares)
    prompts += [prompts[0]] * (most - len(prompts))
    longest = max(len(row.prompt) for row in batch)
    padding = [longest - len(prompt) for prompt in prompts]
    exchanges_tokens = dp.size > 1 and (state.parallel.ep.size > 1 or state.parallel.expert_tp.size > 1)
    fed = torch.tensor(
        [[0] * slots + prompt for slots, prompt in zip(padding, prompts, strict=True)], device=state.platform.device
    )
    of_chosen: list[Tensor] = []
    with CachedModel(state, padding, longest + ends.max_new_tokens - 1, sources) as model:
        for _ in range(ends.max_new_tokens):
            logits = model.next_logits(fed)
            of_rank_0 = None if logits is None or state.parallel.tp.rank else _choose(logits, rows, rule)
            chosen = model.broadcast_chosen(of_rank_0)
            if log_probs and logits is not None:
                of_chosen.append(logits.log_softmax(dim=-1).gather(1, chosen[:, None])[:, 0])
            for row, token in zip(rows, chosen.tolist(), strict=True):
                if row.finish_reason is None:
                    row.new_ids.append(token)
                    row.finish_reason = ends.reason(row.new_ids)
                    if on_tokens is not None:
                        on_tokens(row.index, row.new_ids)
            if _all_done(rows, dp.group if exchanges_tokens else None, state.platform.device):
                break
            fed = chosen[:, None]
        if log_probs:
            shared = model.broadcast_log_probs(of_chosen, ends.max_new_tokens)
            for row, values in zip(local, shared.tolist(), strict=False):
                row.log_probs = values[: len(row.new_ids)]
    return local


def _distinct(prompts: Sequence[list[int]]) -> tuple[list[list[int]], list[int]]:
    """The distinct prompts in order of appearance, and for each prompt its index in them."""
    index: dict[tuple[int, ...], int] = {}
    sources = [index.setdefault(tuple(prompt), len(index)) for prompt in prompts]
    return [list(prompt) for prompt in index], sources


def _choose(logits: Tensor, rows: list[_Row], rule: SamplingRule) -> Tensor:
    """Choose a token for each row; a finished row draws no random number."""
    drawing = [not rule.greedy and row.finish_reason is None for row in rows]
    return rule.choose(logits, [row.numbers.draw() if draws else 0.0 for row, draws in zip(rows, drawing, strict=True)])


def _all_done(rows: list[_Row], dp_group: ProcessGroup | None, device: torch.device) -> bool:
    """Whether every row is finished, on all processes of the group if there is one."""
    unfinished = float(any(row.finish_reason is None for row in rows))
    if dp_group is not None:
        (unfinished,) = all_reduce_values([unfinished], dp_group, device)
    return not unfinished


def _batches(rows: list[_Row], size: int) -> Iterator[list[_Row]]:
    """Batches of `size` rows, shortest prompts first, equal prompts adjacent."""
    by_length = sorted(rows, key=lambda row: (len(row.prompt), row.prompt))
    for start in range(0, len(rows), size):
        yield by_length[start : start + size]


def _stops(hf_path: str | None, tokenizer: Any, stop: Sequence[str | int]) -> tuple[frozenset[int], tuple[str, ...]]:
    """Token ids and texts that end a completion: those of `stop`, the tokenizer's end token and the end tokens of
    generation_config.json in the folder `hf_path`."""
    stops = [stop] if isinstance(stop, str | int) else list(stop)
    texts = tuple(text for text in stops if isinstance(text, str))
    if texts and tokenizer is None:
        raise DataError("wrap.generate: a stop text needs a tokenizer; set megatron_wrap.data.tokenizer, or pass ids")
    if "" in texts:
        raise DataError("wrap.generate: a stop text is empty; remove it")
    ids = {token for token in stops if isinstance(token, int)}
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    if hf_path is not None:
        end_tokens = read_generation_config(resolve_folder(hf_path)).get("eos_token_id")
        ids.update(end_tokens if isinstance(end_tokens, list) else [] if end_tokens is None else [end_tokens])
    return frozenset(ids), texts


def _check(numbers: Mapping[str, tuple[int, int]]) -> None:
    """Refuse a number below its limit; `numbers` has (value, limit) by name."""
    for name, (value, least) in numbers.items():
        if value < least:
            raise DataError(f"wrap.generate: {name} {value} must be at least {least}")


def _position_limit(arch: ArchConfig, seq_length: int) -> int | None:
    """Number of learned positions; None if position embeddings are computed, which sets no limit."""
    learned = arch.position_embedding_type == "learned_absolute"
    return derived.max_position_embeddings(arch, seq_length) if learned else None


def _check_lengths(rows: list[_Row], max_new_tokens: int, limit: int | None) -> None:
    for row in rows:
        if limit is not None and len(row.prompt) + max_new_tokens > limit:
            raise DataError(
                f"wrap.generate: prompt {row.index} has {counted(len(row.prompt), 'token')}, which with max_new_tokens "
                f"{max_new_tokens} is more than the model's {limit} learned positions (max_position_embeddings); "
                "shorten the prompt or lower max_new_tokens"
            )
