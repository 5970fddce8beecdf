"""`megatron-wrap new-flow NAME`: a flow in one file, its run and its parity test, to change into one's own."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
from pathlib import Path

from megatron_wrap.errors import ConfigError

_FLOW = '''\
"""CLASS: what this algorithm learns, in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron_wrap.core.flow import LossOutput, MegatronWrapGPTModelSFTFlow
from megatron_wrap.ops import token_log_probs


class CLASS(MegatronWrapGPTModelSFTFlow):
    """Focal loss: mean over the assistant's tokens of -(1 - p)^focus * log p, with p a label's probability.

    Samples and their collation are those of supervised fine-tuning. For others, write `collate_data_micro_batch`; each
    field of your own that is as long as the sequence has to stand in `get_fields_and_seqdims`.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(MegatronWrapGPTModelSFTFlow.Config):
        """Keys of `megatron_wrap.flow` in the YAML, read as self.flow_config.focus."""

        focus: float = 2.0
        """0 is the plain cross-entropy; the larger, the less the tokens count that the model knows already."""

    def get_loss_weight(self, loss_inputs: Mapping[str, Tensor]) -> float:
        """What the loss is a mean over, counted on the whole micro-batch: its tokens."""
        return float(loss_inputs["loss_mask"].sum())

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        """This process's share of the sum; fields are [B, S/cp], logits [B, S/cp, V/tp]. Never divide by a number of
        tokens, micro-batches or processes here: the framework does, by the weight of the whole step."""
        mask = loss_inputs["loss_mask"]
        log_probs = token_log_probs(model_forward_output, loss_inputs["labels"])
        probabilities = log_probs.exp()
        loss_sum = self.token_mean(-((1 - probabilities) ** self.flow_config.focus) * log_probs, mask)
        # a metric is a pair (sum, weight): both are added up over micro-batches and processes, then divided
        return LossOutput(loss_sum, {"probability": (self.token_mean(probabilities, mask), mask.sum())})
'''

_RUN = """\
# A small Llama with the flow of NAME.py, whose folder has to be on PYTHONPATH:
#   PYTHONPATH=FOLDER megatron-wrap train FOLDER/NAME.yaml megatron_wrap.data.__select__=jsonl \\
#     megatron_wrap.data.train=TRAIN.jsonl megatron_wrap.data.tokenizer=TOKENIZER
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
  flow:
    __select__: custom
    __override__:
      flow_key: NAME:CLASS
      focus: 2.0
"""

_TEST = '''\
"""CLASS trains alike on every parallel layout, with samples of unequal length."""

from __future__ import annotations

import random
from pathlib import Path

from megatron_wrap.testing import assert_layout_invariant

LAYOUTS = None
"""None: all. Or some, while you write: ["dp2", "tp2-sp", "cp2"]."""


def samples(count: int = 16) -> list[dict[str, list[int]]]:
    """Tokenized samples; a part of the tokens is not learned, and of one sample none is."""
    generator = random.Random(1)
    lengths = [generator.randint(12, 48) for _ in range(count)]
    return [
        {
            "input_ids": [generator.randrange(4096) for _ in range(length)],
            "loss_mask": [int(place > 0 and generator.random() < 0.7) for _ in range(length)],
        }
        for place, length in enumerate(lengths)
    ]


def test_every_layout_trains_alike():
    assert_layout_invariant(Path(__file__).parent / "NAME.yaml", samples=samples(), layouts=LAYOUTS)
'''


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the subcommand."""
    parser.add_argument("name", metavar="NAME", help="module of the flow in lower case, such as focal_loss")
    parser.add_argument("--folder", default=".", help="where to write (default: here)")


def run(arguments: argparse.Namespace) -> int:
    """Write NAME.py, NAME.yaml and test_NAME.py; an existing file is never touched."""
    name, folder = arguments.name, Path(arguments.folder)
    _check_name(name)
    flow_class = "".join(part.capitalize() for part in name.removesuffix("_flow").split("_")) + "Flow"
    contents = {f"{name}.py": _FLOW, f"{name}.yaml": _RUN, f"test_{name}.py": _TEST}
    taken = [str(folder / file) for file in contents if (folder / file).exists()]
    if taken:
        raise ConfigError(f"{', '.join(taken)}: there already; choose another name or --folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in contents.items():
            filled = text.replace("FOLDER", str(folder)).replace("NAME", name).replace("CLASS", flow_class)
            (folder / file).write_text(filled, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror})") from error
    print(f"wrote {', '.join(str(folder / file) for file in contents)}")
    print(f"its parity test: PYTHONPATH={folder} python -m pytest {folder / f'test_{name}.py'}")
    print(
        f"the same as a table: PYTHONPATH={folder} megatron-wrap check-parity {folder / f'{name}.yaml'} --samples FILE"
    )
    return 0


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} is no name for a module; use lower-case letters, digits and _, such as focal_loss")
    if importlib.util.find_spec(name) is not None:
        raise ConfigError(
            f"{name!r} is the name of a module that is installed already; choose another, such as my_{name}"
        )
