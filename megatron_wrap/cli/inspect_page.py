"""The summary and the page of `megatron-wrap inspect-data`, from an `Inspection`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_wrap.config import RunConfig
from megatron_wrap.data.inspect.inspection import Counts, Finding, Inspected, Inspection, histogram, ordered, segments
from megatron_wrap.data.inspect.mistakes import MISTAKES, advice_of
from megatron_wrap.data.inspect.samples import SampleSelection
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.report import charts
from megatron_wrap.report.page import Cell, Item, Page, visible

_LONGEST_TEXT = 20_000
"""Characters of a sample on the page."""


def facts(sample: Inspected) -> list[str]:
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
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    findings = ordered(inspection.findings)
    lines += ["", "findings:" if findings else "no mistakes found"]
    for finding in findings:
        mistake = MISTAKES[finding.key]
        sign = "!" if mistake.serious else "-"
        lines.append(
            f"  {sign} {_amount(finding, inspection.counts)}: {mistake.title}; {advice_of(finding.key, config)}"
        )
        lines += [f"      {visible(row)}" for row in finding.rows]
    return "\n".join(lines)


def build_page(
    inspection: Inspection, selection: SampleSelection, config: RunConfig, split: str, tokenizer: Any
) -> str:
    """The HTML of the page."""
    total, shares = selection.total, selection.epoch_shares
    page = Page(
        f"Data of {config.name}: {split}",
        f"{config.flow.flow_key}, seq_length {inspection.seq_length:,}, tokenizer {config.data.tokenizer or 'none'}",
    )
    page.tiles(_numbers(inspection, total))
    _add_findings(page, inspection, config)
    _add_tokens(page, inspection, config.train.micro_batch_size)
    if len(inspection.by_source) > 1:
        page.heading("Sources")
        names = (
            "source",
            "share of an epoch",
            "samples",
            "trained tokens",
            "other tokens",
            "truncated",
            "samples left out",
        )
        page.table(
            names, [[name, _share(shares, name), *_row(counts)] for name, counts in inspection.by_source.items()]
        )
    page.heading("Samples")
    page.paragraph("Highlighted: trained. Struck out: removed by truncation. The arrow keys turn pages.")
    items = [
        Item(sample.where(), [sample.source, *facts(sample)], _texts(sample, tokenizer), sample.mistakes)
        for sample in inspection.shown
    ]
    labels = [key for key in MISTAKES if any(key in sample.mistakes for sample in inspection.shown)]
    page.items(items, [("", f"all {len(items):,} shown here"), *((key, MISTAKES[key].title) for key in labels)])
    return page.html()


def _add_findings(page: Page, inspection: Inspection, config: RunConfig) -> None:
    page.heading("Mistakes")
    findings = ordered(inspection.findings)
    if not findings:
        page.paragraph("None of the usual ones.")
        return
    rows: list[list[str | Cell]] = []
    for finding in findings:
        mistake = MISTAKES[finding.key]
        amount = Cell(_amount(finding, inspection.counts), "alarm" if mistake.serious else "notice")
        description = Cell(f"{mistake.title}\n{advice_of(finding.key, config)}", "title")
        rows.append([amount, description, Cell("\n".join(finding.rows), "soft")])
    page.table(("samples", "what, and what to do", "first rows"), rows, is_stacked=True)


def _add_tokens(page: Page, inspection: Inspection, micro_batch_size: int) -> None:
    counts = inspection.counts
    page.heading("Tokens")
    parts = [("trained", counts.trained, "share-mark"), ("other", counts.other, "share")]
    page.figure(charts.shares([*parts, ("cut off", counts.cut, "share-gone")]))
    page.heading("Lengths before truncation")
    page.figure(charts.histogram(*histogram(inspection.whole_lengths), limit=inspection.seq_length))
    page.table(("tokens of a sequence", ""), [[name, Cell(value, "number")] for name, value in _lengths(inspection)])
    page.heading("Real tokens among those that the model computes")
    shares = inspection.efficiencies(micro_batch_size)
    names = {
        "padded to the longest of a micro-batch": f" of {micro_batch_size}",
        "packed": f" to {inspection.seq_length:,}",
    }
    page.table(
        ("layout", "share"),
        [[name + names.get(name, ""), Cell(f"{share:.1%}", "number")] for name, share in shares.items()],
    )


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


def _share(shares: Mapping[str, float], source: str) -> Cell:
    return Cell(f"{shares[source]:.1%}" if source in shares else "", "number")


def _row(counts: Counts) -> list[str | Cell]:
    values = (counts.samples, counts.trained, counts.other, counts.truncated, counts.dropped)
    return [Cell(f"{value:,}", "number") for value in values]


def _amount(finding: Finding, counts: Counts) -> str:
    return f"{finding.count:,} ({finding.count / max(1, counts.samples + counts.dropped):.1%})"


def _texts(sample: Inspected, tokenizer: Any) -> list[list[tuple[str, str]]]:
    """The runs of each sequence, at most `_LONGEST_TEXT` characters of each."""
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
