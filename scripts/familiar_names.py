"""The page of the site with the names of other libraries, from megatron_wrap/config/schema/familiar_names.yaml; added
by scripts/docs_hooks.py."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_wrap.config.schema.familiar_names import Counterpart, libraries

PREFACE = """\
# Names of other libraries

Arguments of transformers, trl and axolotl, and the key of a run's YAML for each. A message about an unknown key names
it as well, whatever the section in which the argument was written:

```console
$ megatron-wrap explain configs/tiny-llama-sft.yaml learning_rate
error: learning_rate: unknown key; transformers' learning_rate is megatron_lm.train.learning-rate.lr here
```

Three things differ for everyone who comes from a `Trainer`:

- **Batch size.** `global_batch_size` is the number of samples in an optimizer step, whatever the number of processes;
  `micro_batch_size` is the number in one forward pass of one replica. Gradient accumulation follows from both:
  `global_batch_size` / (`micro_batch_size` * data-parallel size) micro-batches. `per_device_train_batch_size: 4` with
  `gradient_accumulation_steps: 8` on 16 GPUs without model parallelism is `micro_batch_size: 4` and
  `global_batch_size: 512`.
- **Intervals** count iterations, which are optimizer steps; null disables them, and there are no strategies.
- **Selections.** An optimizer, a precision or a kind of recomputation is a file of the tree:
  `recompute: {__select__: full}` ([configuration.md](configuration.md)).
"""
SECTIONS: Mapping[str, str] = {
    "transformers": "`TrainingArguments`, arguments of earlier versions included.",
    "trl": "`SFTConfig`, `DPOConfig`, `GRPOConfig` and other configurations, `ModelConfig` and `ScriptArguments`, "
    "without the arguments of transformers.",
    "axolotl": "Keys of its YAML, without the arguments of transformers and trl.",
}


def page_text() -> str:
    """The text of the page."""
    parts = [PREFACE]
    for library, names in libraries().items():
        rows = [("argument", "our key", "what differs"), ("---",) * 3]
        rows += [row(name, counterpart) for name, counterpart in names.items()]
        table = "".join(f"| {' | '.join(cells)} |\n" for cells in rows)
        parts.append(f"## {library}\n\n{SECTIONS[library]}\n\n{table}")
    return "\n".join(parts)


def row(name: str, counterpart: Counterpart) -> tuple[str, str, str]:
    """The cells of an argument."""
    key = "none" if counterpart.key is None else f"`{counterpart.key}`"
    return f"`{name}`", key, counterpart.note.replace("|", "\\|")
