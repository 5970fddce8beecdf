"""What a reader opens to follow six ways through the package, traced in one process on the CPU with a tiny model.

python scripts/reading_cost.py [--files]

The ways are a warm step of SFT (the third), reading a configuration, a save, a load, exporting a
Hugging Face folder, and the setup of a LoRA adapter beyond the setup of the same model without one. For each: files of
the package that are entered, functions, calls, and changes of file (calls from one file of the package into another).
`--files` lists the files of each way.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit"))
from _architecture import fragments

PACKAGE = Path(__file__).resolve().parents[1] / "megatron_wrap"
RUN = """\
megatron_lm:
  model:
    arch:
      __select__: tiny-llama
      __override__: {num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4, vocab_size: 256}
    parallel: {__select__: base}
  train:
    common: {micro_batch_size: 2, global_batch_size: 4, seq_length: 32, train_iters: 9, save: checkpoints, seed: 1}
    learning-rate: {lr: 2e-4}
    dtype: {__select__: fp32}
megatron_wrap:
  init: {platform: cpu}
  logger: {progress_bar: false, output_dir: output}
  flow: {__select__: gpt_sft}
  data: {__select__: none}
"""
ADAPTER = ("megatron_wrap.adapter.__select__=lora",)


class Way:
    """The calls of one way through the package."""

    def __init__(self) -> None:
        self.functions: Counter[tuple[str, str]] = Counter()
        """Calls of each function: (file below the package, qualified name)."""
        self.changes = 0
        """Calls whose nearest caller in the package is in another file."""

    @property
    def files(self) -> set[str]:
        """Files that were entered, relative to the package."""
        return {file for file, _ in self.functions}

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Count the calls inside."""
        root = f"{PACKAGE}/"

        def enter(frame: FrameType, event: str, _: Any) -> None:
            path = frame.f_code.co_filename
            if event != "call" or not path.startswith(root) or frame.f_code.co_name == "<module>":
                return
            self.functions[path.removeprefix(root), frame.f_code.co_qualname] += 1
            caller = frame.f_back
            while caller is not None and not caller.f_code.co_filename.startswith(root):
                caller = caller.f_back
            self.changes += caller is not None and caller.f_code.co_filename != path

        sys.setprofile(enter)
        try:
            yield
        finally:
            sys.setprofile(None)


def ways(folder: Path) -> dict[str, Way]:
    """The six ways, with a run in `folder`."""
    from megatron_wrap.core import MegatronWrap

    samples = [{"input_ids": list(range(1, 20)), "loss_mask": [1] * 19} for _ in range(36)]
    text = RUN.replace("checkpoints", f"{folder}/saved").replace("output}", f"{folder}/out}}")
    (folder / "run.yaml").write_text(text)

    def run(overrides: tuple[str, ...], setup: Way, use: Callable[[MegatronWrap], None]) -> None:
        with MegatronWrap(folder / "run.yaml", [*overrides]) as wrap:
            wrap.initialize()
            with setup.traced():
                wrap.setup_model_and_optimizer()
            use(wrap)

    def use(wrap: MegatronWrap) -> None:
        for number, batch in enumerate(wrap.batches(samples)):
            if number == 2:
                with step.traced():
                    wrap.train(batch)
                break
            wrap.train(batch)
            wrap.log_last_metrics()
        with save.traced():
            saved = wrap.save()
        with load.traced():
            wrap.load(saved)
        with export.traced():
            wrap.save_pretrained(folder / "exported")

    other = (f"megatron_lm.train.common.save={folder}/other", f"megatron_wrap.logger.output_dir={folder}/other_out")
    step, save, load, export = (Way() for _ in range(4))
    run(other, Way(), use)  # imports
    step, configuration, save, load, export, plain, adapter = (Way() for _ in range(7))
    with configuration.traced():
        MegatronWrap(folder / "run.yaml")
    run((), plain, use)
    run((f"megatron_lm.train.common.save={folder}/adapter", other[1], *ADAPTER), adapter, lambda wrap: None)
    for function in plain.functions:
        adapter.functions.pop(function, None)
    adapter.changes = max(0, adapter.changes - plain.changes)
    return {
        "a warm step": step,
        "reading a configuration": configuration,
        "a save": save,
        "a load": load,
        "export": export,
        "setup of an adapter": adapter,
    }


def main() -> None:
    """Print a line for each way, and with `--files` its files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="list the files of each way")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        traced = ways(Path(folder))
    print(f"{'way':<26}{'files':>7}{'functions':>11}{'calls':>8}{'changes of file':>17}")
    for name, way in traced.items():
        calls = sum(way.functions.values())
        print(f"{name:<26}{len(way.files):>7}{len(way.functions):>11}{calls:>8}{way.changes:>17}")
        if arguments.files:
            for file in sorted(way.files):
                print(f"  {sum(n for (path, _), n in way.functions.items() if path == file):>6}  {file}")
    print(f"{len(fragments(PACKAGE))} docstrings that do not stand by themselves; sizes: scripts/architecture.py")


if __name__ == "__main__":
    main()
