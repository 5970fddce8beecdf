"""Samples, summary and page of `megatron-wrap inspect-data`, from an `Inspection`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_wrap.cli.text_table import text_table
from megatron_wrap.config import RunConfig
from megatron_wrap.config.checks.vocabulary import model_vocab_size
from megatron_wrap.data.chat.encode import ChatTokens
from megatron_wrap.data.inspect.inspection import (
    Counts,
    Inspected,
    Inspection,
    SampleSelection,
    histogram,
    ordered,
    segments,
    tokens_of,
    tokens_of_row,
)
from megatron_wrap.data.inspect.mistakes import MISTAKES, Mistake, Tokens, advice_of
from megatron_wrap.errors import ConfigError
from megatron_wrap.flow import MegatronWrapTrainingFlowBase
from megatron_wrap.flow.contract.collated import checked_fields, common_width, sequence_lengths
from megatron_wrap.flow.shared.text import ENCODED
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.report.page import Item, rendered, visible
from megatron_wrap.setup.flow import build_flow

_COLORS = {"trained": ("\x1b[30;42m", "\x1b[0m"), "cut": ("\x1b[2;9m", "\x1b[0m"), "other": ("", "")}
_SIGNS = {"trained": ("[[", "]]"), "cut": ("~~", "~~"), "other": ("", "")}
_LONGEST_TEXT = 20_000
"""Largest number of characters of a sample on the page."""


def details(sample: Inspected) -> list[str]:
    """A sample's numbers and mistakes, in words."""
    trained = sum(tokens.count("trained") for tokens in sample.sequences)
    cut = sum(tokens.count("cut") for tokens in sample.sequences)
    total = sum(len(tokens.input_ids) for tokens in sample.sequences)
    texts = [f"{counted(total, 'token')}", f"{trained:,} trained"]
    texts += [f"{cut:,} cut off"] if cut else []
    texts += [f"weight {sample.weight:g}"] if sample.weight != 1 else []
    return texts + [MISTAKES[key].title for key in sample.mistakes]


def summary(inspection: Inspection, total: int | None, config: RunConfig) -> str:
    """The table below the printed samples: counts, lengths, efficiencies, and mistakes with their first rows."""
    rows = [*_numbers(inspection, total), *_lengths(inspection)]
    rows += [
        (f"real tokens, {name}", f"{share:.1%}")
        for name, share in inspection.efficiencies(config.train.micro_batch_size).items()
    ]
    lines = [text_table(rows)]
    findings = _findings(inspection, config)
    lines += ["", "findings:" if findings else "no mistakes found"]
    for amount, mistake, advice, first_rows in findings:
        lines.append(f"  {'!' if mistake.serious else '-'} {amount}: {mistake.title}; {advice}")
        lines += [f"      {visible(row)}" for row in first_rows]
    return "\n".join(lines)


def build_page(
    inspection: Inspection, selection: SampleSelection, config: RunConfig, split: str, tokenizer: Any
) -> str:
    """The HTML of the page."""
    micro_batch_size = config.train.micro_batch_size
    tokenizer_name = config.data.tokenizer or "none"
    names = {
        "padded to the longest of a micro-batch": f" of {micro_batch_size}",
        "packed": f" to {inspection.seq_length:,}",
    }
    bin_width, bins = histogram(inspection.whole_lengths)
    samples = [
        Item(sample.where(), [sample.source, *details(sample)], _texts(sample, tokenizer), sample.mistakes)
        for sample in inspection.shown
    ]
    labels = [key for key in MISTAKES if any(key in sample.labels for sample in samples)]
    return rendered(
        Path(__file__).parent / "templates" / "inspect.html",
        title=f"Data of {config.name}: {split}",
        subtitle=f"{config.flow.flow_key}, seq_length {inspection.seq_length:,}, tokenizer {tokenizer_name}",
        numbers=_numbers(inspection, selection.total),
        findings=_findings(inspection, config),
        counts=inspection.counts,
        bin_width=bin_width,
        bins=bins,
        seq_length=inspection.seq_length,
        lengths=_lengths(inspection),
        efficiencies=[
            (name + names.get(name, ""), f"{share:.1%}")
            for name, share in inspection.efficiencies(micro_batch_size).items()
        ],
        sources=[_source(name, selection.epoch_shares, counts) for name, counts in inspection.by_source.items()],
        samples=samples,
        choices=[("", f"all {len(samples):,} shown here"), *((key, MISTAKES[key].title) for key in labels)],
    )


def _findings(inspection: Inspection, config: RunConfig) -> list[tuple[str, Mistake, str, list[str]]]:
    """(number and share of the samples, mistake, advice, first rows) of each mistake that was found."""
    counts = inspection.counts
    return [
        (
            f"{finding.count:,} ({finding.count / max(1, counts.samples + counts.dropped):.1%})",
            MISTAKES[finding.key],
            advice_of(finding.key, config),
            finding.rows,
        )
        for finding in ordered(inspection.findings)
    ]


def _numbers(inspection: Inspection, total: int | None) -> list[tuple[str, str]]:
    counts = inspection.counts
    read = counts.samples + counts.dropped
    of = "" if total == read else f" of {total:,}" if total is not None else ", from the start of a stream"
    tokens = counts.trained + counts.other
    share = f", {counts.trained / tokens:.1%}" if tokens else ""
    duplicates = inspection.findings["duplicate"].count if "duplicate" in inspection.findings else 0
    return [
        ("samples read", f"{read:,}{of}"),
        ("samples left out", f"{counts.dropped:,}"),
        ("tokens", f"{tokens:,}"),
        (f"trained tokens{share}", f"{counts.trained:,}"),
        ("truncated samples", f"{counts.truncated:,}"),
        ("tokens cut off", f"{counts.cut:,}"),
        ("duplicates", f"{duplicates:,}"),
    ]


def _lengths(inspection: Inspection) -> list[tuple[str, str]]:
    lengths = sorted(inspection.whole_lengths)
    if not lengths:
        return []
    at = [("median length", 0.5), ("90% are at most", 0.9), ("99% are at most", 0.99), ("longest", 1.0)]
    return [(name, f"{lengths[min(len(lengths) - 1, int(part * len(lengths)))]:,}") for name, part in at]


def _source(name: str, shares: Mapping[str, float], counts: Counts) -> list[str]:
    """The cells of a source in the table of sources."""
    share = f"{shares[name]:.1%}" if name in shares else ""
    numbers = (counts.samples, counts.trained, counts.other, counts.truncated, counts.dropped)
    return [name, share, *(f"{number:,}" for number in numbers)]


def _texts(sample: Inspected, tokenizer: Any) -> list[list[tuple[str, str]]]:
    """The runs of equal kind, as (text, kind), of each sequence, at most `_LONGEST_TEXT` characters of each."""
    texts = []
    for tokens in sample.sequences:
        runs: list[tuple[str, str]] = []
        room = _LONGEST_TEXT
        for text, kind in segments(tokenizer, tokens):
            if room <= 0:
                runs.append((" … the rest is not shown", "other"))
                break
            runs.append((text[:room], kind))
            room -= len(text)
        texts.append(runs)
    return texts


def encoder(config: RunConfig, tokenizer: Any) -> Callable[[Any], Sequence[Tokens]]:
    """A function from a sample to its sequences, by the run's flow in this process.

    Raises:
        ConfigError: the vocabulary size is not known.
    """
    flow = build_flow(config, tokenizer, model_vocab_size(config.arch, tokenizer, config.model_provider.hf_path))
    rule = config.flow.options.get("truncation", "right")

    def encode(sample: Any) -> Sequence[Tokens]:
        prepared = flow.prepare_sample(sample)
        encoded = prepared.get(ENCODED) if isinstance(prepared, Mapping) else None
        sequences = (encoded,) if isinstance(encoded, ChatTokens) else encoded
        if isinstance(sequences, tuple) and all(isinstance(tokens, ChatTokens) for tokens in sequences):
            return [tokens_of(tokens, flow.seq_length, rule) for tokens in sequences]
        return _collated(flow, prepared)

    return encode


def _collated(flow: MegatronWrapTrainingFlowBase, prepared: Any) -> Sequence[Tokens]:
    """The sequences of a sample that the flow collates by itself."""
    inputs, loss_inputs = checked_fields(flow, flow.collate_data_micro_batch(iter([prepared])))
    if "loss_mask" not in loss_inputs or "input_ids" not in inputs:
        raise ConfigError(
            f"{type(flow).__name__} collates no loss_mask and input_ids, so its trained tokens are not known; add "
            "loss_mask to its loss inputs"
        )
    lengths = sequence_lengths(flow, inputs, common_width(flow, inputs, loss_inputs)).tolist()
    ids, masks = inputs["input_ids"].tolist(), loss_inputs["loss_mask"].tolist()
    labels = loss_inputs["labels"].tolist() if "labels" in loss_inputs else [None] * len(lengths)
    return [tokens_of_row(*row) for row in zip(ids, masks, labels, lengths, strict=True)]


def shown(sample: Inspected, tokenizer: Any, in_color: bool) -> str:
    """A sample for the terminal: trained tokens in color or in [[ ]], truncated ones struck out or in ~~ ~~."""
    lines = [f"{sample.where()}  {', '.join(details(sample))}"]
    for tokens in sample.sequences:
        marks = _COLORS if in_color else _SIGNS
        runs = ((*marks[kind], visible(text)) for text, kind in segments(tokenizer, tokens))
        lines.append("".join(f"{begin}{text}{end}" for begin, end, text in runs))
    return "\n".join([*lines, ""])
