"""`megatron-wrap new-flow NAME`: write a working flow, its run and its parity test, to be edited."""

from __future__ import annotations

import argparse
import importlib.util
import json
import keyword
import random
import re
import shlex
from pathlib import Path

from megatron_wrap.config.reading.tree import schema_line
from megatron_wrap.errors import ConfigError

EXAMPLES = (
    ("my_flows/focal_loss.py, its configuration, samples and test", "new-flow focal_loss --folder my_flows"),
    ("in the working directory", "new-flow my_loss"),
)

_FLOW = '''\
"""CLASS: what this algorithm trains, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron_wrap.core.flow import LossOutput, MegatronWrapGPTModelSFTFlow
from megatron_wrap.ops import token_log_probs


class CLASS(MegatronWrapGPTModelSFTFlow):
    """Focal loss: mean over the assistant's tokens of -(1 - p)^focus * log p, with p a label's probability.

    Samples and collation are those of supervised fine-tuning. For other samples, define `collate_data_micro_batch`;
    each new field with a sequence dimension must also be listed in `get_fields_and_seqdims`.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(MegatronWrapGPTModelSFTFlow.Config):
        """Keys of `megatron_wrap.flow` in the YAML, read as self.flow_config.focus."""

        focus: float = 2.0
        """0 is cross-entropy; larger values give less weight to tokens that the model already predicts."""

    # a mean over tokens is also correct if all sequences of a micro-batch are in one row; a sum over the tokens of each
    # sequence must be self.sum_per_sequence(per_token, loss_inputs)
    supports_packing = True

    def get_loss_weight(self, loss_inputs: Mapping[str, Tensor]) -> float:
        """The weight that the loss is divided by: the number of trained tokens of the whole micro-batch."""
        return float(loss_inputs["loss_mask"].sum())

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        """Sum of the loss over this process's tokens; fields are [B, S/cp], logits [B, S/cp, V/tp].

        Do not divide by a number of tokens, micro-batches or processes: the framework divides by the weight of the
        whole step.
        """
        mask = loss_inputs["loss_mask"]
        log_probs = token_log_probs(model_forward_output, loss_inputs["labels"])
        probabilities = log_probs.exp()
        loss_sum = self.token_mean(-((1 - probabilities) ** self.flow_config.focus) * log_probs, mask)
        # a metric is a pair (sum, weight): each is summed over micro-batches and processes, then they are divided
        return LossOutput(loss_sum, {"probability": (self.token_mean(probabilities, mask), mask.sum())})
'''

_RUN = """\
# A small Llama with the flow of NAME.py, on the tokenized samples of NAME.jsonl. The folder of NAME.py must be on
# PYTHONPATH. With data of your own, such as messages, and a tokenizer whose vocabulary fits the model's:
#   megatron_wrap.data.train=TRAIN.jsonl megatron_wrap.data.tokenizer=TOKENIZER
megatron_lm:
  model:
    arch:
      __select__: tiny-llama
      __override__: {vocab_size: 4096}
  train:
    common: {micro_batch_size: 2, global_batch_size: 8, seq_length: 256, train_iters: 20}
    learning-rate: {lr: 1.0e-3}
    dtype: {__select__: fp32}
megatron_wrap:
  data:
    __select__: jsonl
    __override__: {train: DATA}
  flow:
    __select__: custom
    __override__:
      flow_key: NAME:CLASS
      focus: 2.0
"""

_TEST = '''\
"""CLASS trains the same on every parallel layout, with samples of different lengths."""

from __future__ import annotations

from pathlib import Path

from megatron_wrap.testing import assert_layout_invariant

LAYOUTS = None
"""None: all. While developing, a few are faster: ["dp2", "tp2-sp", "cp2"]."""


def test_every_layout_trains_alike():
    folder = Path(__file__).parent
    data = f"megatron_wrap.data.train={folder / 'NAME.jsonl'}"
    assert_layout_invariant(folder / "NAME.yaml", overrides=[data], layouts=LAYOUTS)
'''


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    parser.add_argument("name", metavar="NAME", help="module name of the flow in lower case, such as focal_loss")
    parser.add_argument(
        "--folder", default=".", metavar="FOLDER", help="folder to write (default: the working directory)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes NAME.py, NAME.yaml, NAME.jsonl and test_NAME.py, and refuses to overwrite an existing file."""
    name, folder = arguments.name, Path(arguments.folder)
    _check_name(name)
    flow_class = "".join(part.capitalize() for part in name.removesuffix("_flow").split("_")) + "Flow"
    contents = {
        f"{name}.py": _FLOW,
        f"{name}.yaml": _RUN,
        f"{name}.jsonl": _samples(),
        f"test_{name}.py": _TEST,
    }
    taken = [str(folder / file) for file in contents if (folder / file).exists()]
    if taken:
        raise ConfigError(f"{', '.join(taken)}: exists already; choose another name or --folder")
    data = json.dumps(str(folder / f"{name}.jsonl"), ensure_ascii=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in contents.items():
            filled = text.replace("NAME", name).replace("CLASS", flow_class).replace("DATA", data)
            first_line = schema_line() if file.endswith(".yaml") else ""
            (folder / file).write_text(first_line + filled, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror})") from error
    print(f"wrote {', '.join(str(folder / file) for file in contents)}")
    path, config = shlex.quote(str(folder)), shlex.quote(str(folder / f"{name}.yaml"))
    print(f"its parity test: PYTHONPATH={path} python -m pytest {shlex.quote(str(folder / f'test_{name}.py'))}")
    print(f"the same as a table: PYTHONPATH={path} megatron-wrap check-parity {config}")
    print(f"train it: PYTHONPATH={path} megatron-wrap train {config}")
    return 0


def _samples(count: int = 32) -> str:
    """Tokenized samples as JSON lines; part of the tokens is masked out of the loss, the first sample has none."""
    generator = random.Random(1)
    lengths = [generator.randint(12, 48) for _ in range(count)]
    samples = [
        {
            "input_ids": [generator.randrange(4096) for _ in range(length)],
            "loss_mask": [int(index > 0 and generator.random() < 0.7) for _ in range(length)],
        }
        for index, length in enumerate(lengths)
    ]
    return "".join(f"{json.dumps(sample)}\n" for sample in samples)


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} is not a module name; use lower-case letters, digits and _, such as focal_loss")
    if importlib.util.find_spec(name) is not None:
        raise ConfigError(f"{name!r} is the name of an installed module; choose another, such as my_{name}")
