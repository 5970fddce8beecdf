"""Seconds to load gpt-oss-20b from the official MXFP4 format: ours and transformers with `dequantize=True`, in turn.

    python scripts/benchmark/mxfp4_folder.py FOLDER [--rounds 2] [--phases] [--profile FILE] [--tiny]

Writes a folder with random blocks and scales where there is none (13 GiB; /dev/shm measures no disk), then each way
loads it in a process of its own: bf16 weights on the device, imports and the start of CUDA not counted. With
`--phases` the parts of our load are printed, each without the parts within it; those of its threads are sums over the
threads. With `--profile` one more load of ours, which does not count, writes its longest functions and what it imports.
The last line has the seconds, and whether the first layer's dequantized experts are the same bit for bit."""

import argparse
import contextlib
import cProfile
import hashlib
import importlib
import json
import pkgutil
import pstats
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from safetensors.torch import save_file

from megatron_wrap.bridge.export.export_format import export_format
from megatron_wrap.bridge.loading.hub import read_run
from megatron_wrap.core import MegatronWrap, exit_on_user_error

CONFIG = Path(__file__).with_name("hugging_face.yaml")
VALUES, BYTES = 32, 16
"""Of a block of MXFP4."""
TINY = ("num_layers=2", "hidden_size=64", "ffn_hidden_size=32", "num_attention_heads=4", "num_query_groups=2")
DENSE = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
COMPARED = "model.layers.0.mlp.experts.down_proj"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OURS = (
    *("transformer_engine.pytorch", "megatron.core.extensions.transformer_engine"),
    *("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.models.gpt"),
    *("megatron_wrap.core.run", "megatron_wrap.core.run_folders", "megatron_wrap.checkpoint.choices"),
    *("megatron_wrap.model", "megatron_wrap.nn"),
)
"""What setup_model would import after `initialize`, with all modules of the last two."""
THEIRS = ("transformers.models.gpt_oss.modeling_gpt_oss", "transformers.integrations.mxfp4", "accelerate")
OVERRIDES = ("megatron_lm.train.dtype.__select__=bf16", f"megatron_wrap.init.platform={DEVICE}")


def make(folder: Path, tiny: bool) -> None:
    """Write the folder, a file for each layer; all layers have the same random blocks."""
    arch = ["megatron_lm.model.arch.__select__=gpt-oss-20b"]
    arch += [f"megatron_lm.model.arch.{text}" for text in (*TINY, "vocab_size=512") if tiny]
    config = export_format(read_run(str(CONFIG), arch)).config_json("bfloat16")
    folder.mkdir(parents=True)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    layers: dict[str, dict[str, torch.Tensor]] = {}
    blocks: dict[torch.Size, torch.Tensor] = {}
    for name, entry in model.state_dict().items():
        file = layers.setdefault(name.split(".")[2] if ".layers." in name else "rest", {})
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            file[name] = torch.randn(entry.shape).bfloat16() * 0.02
            continue
        experts, rows, columns = entry.shape
        if entry.shape not in blocks:
            blocks[entry.shape] = torch.randint(256, (experts, columns, rows // VALUES, BYTES), dtype=torch.uint8)
        file[name + "_blocks"] = blocks[entry.shape]
        file[name + "_scales"] = torch.randint(115, 122, (experts, columns, rows // VALUES), dtype=torch.uint8)
    for name, tensors in layers.items():
        save_file(tensors, folder / f"model-{name}.safetensors", metadata={"format": "pt"})
    index = {tensor: f"model-{name}.safetensors" for name, tensors in layers.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": DENSE}
    (folder / "config.json").write_text(json.dumps(config))


class Phases:
    """Seconds in functions of ours, without those in functions that they call and that are also listed; of threads,
    their sum."""

    FUNCTIONS = {
        "imports": ("builtins", "__import__"),
        "imports by name": ("importlib", "import_module"),
        "split of the layers": ("megatron_wrap.plan.pipeline_split", "with_split"),
        "objects from rank 0": ("megatron_wrap.parallel.agreement", "broadcast_object"),
        "settings of the model": ("megatron_wrap.engine.setup.build", "transformer_config"),
        "headers of the folder": ("megatron_wrap.engine.setup.build", "starting_weights"),
        "build the model": ("megatron_wrap.engine.setup.build", "_built"),
        "slices that are read at once": ("megatron_wrap.bridge.loading.load_weights", "_reads"),
        "wait for what is read": ("concurrent.futures", "Future.result"),
        "dequantize": ("megatron_wrap.bridge.loading.weight_folder", "dequantized"),
        "check the values": ("megatron_wrap.bridge.loading.device_reader", "DeviceReader.check_later"),
        "copy to the parameters": ("megatron_wrap.bridge.loading.load_weights", "_copy"),
        "rest of load_weights": ("megatron_wrap.engine.setup.build", "load_weights"),
        "new rows of the vocabulary": ("megatron_wrap.engine.setup.build", "fill_new_rows"),
        "rest of build_chunks": ("megatron_wrap.engine.setup.build", "build_chunks"),
        "rest of build_training_state": ("megatron_wrap.core.run", "build_training_state"),
        "describe the model": ("megatron_wrap.core.run", "describe_model"),
        "read bytes": ("megatron_wrap.bridge.loading.device_reader", "_read_into"),
        "wait for the device": ("megatron_wrap.bridge.loading.device_reader", "DeviceReader.finish"),
    }

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        """By phase; those of other threads than the one that measures have the prefix "threads: "."""
        self._lock = threading.Lock()
        self._inner = threading.local()
        self._thread = threading.current_thread()

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measure within the block; what is in no function of the list is "other"."""
        with contextlib.ExitStack() as stack:
            for label, (module, name) in self.FUNCTIONS.items():
                *owner, function = name.split(".")
                target: Any = importlib.import_module(module)
                for part in owner:
                    target = getattr(target, part)
                timed = self._timed(label, getattr(target, function))
                stack.enter_context(mock.patch.object(target, function, timed))
            started = time.perf_counter()
            yield
            total = time.perf_counter() - started
        named = sum(of_phase for label, of_phase in self.seconds.items() if not label.startswith("threads: "))
        self.seconds["other"] = total - named

    def _timed(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            outer = getattr(self._inner, "seconds", 0.0)
            self._inner.seconds = 0.0  # of the listed functions that this call calls
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                elapsed = time.perf_counter() - started
                is_caller = threading.current_thread() is self._thread
                with self._lock:
                    self.seconds[label if is_caller else f"threads: {label}"] += elapsed - self._inner.seconds
                self._inner.seconds = outer + elapsed

        return timed


@contextlib.contextmanager
def profiled(file: Path) -> Iterator[None]:
    """Write the functions of the calling thread and the modules that the block imports."""
    before, profile = set(sys.modules), cProfile.Profile()
    with profile:
        yield
    imported = Counter(".".join(name.split(".")[:2]) for name in set(sys.modules) - before)
    with file.open("w") as opened:
        opened.write("".join(f"{count} modules of {name}\n" for name, count in imported.most_common(30)))
        for order, functions in (("cumulative", 90), ("tottime", 50)):
            pstats.Stats(profile, stream=opened).sort_stats(order).print_stats(functions)


def load_ours(folder: Path, with_phases: bool, profile: Path | None) -> tuple[float, torch.Tensor]:
    """Seconds, and the compared tensor."""
    importlib.import_module("megatron_wrap.core.run")
    with MegatronWrap.from_pretrained(str(folder), CONFIG, list(OVERRIDES)) as wrap:
        wrap.initialize()
        _import(OURS, packages=OURS[-2:])
        phases = Phases()
        watched = phases.measured() if with_phases else contextlib.nullcontext()
        with watched if profile is None else profiled(profile):
            seconds = _timed(wrap.setup_model)
        for label, of_phase in sorted(phases.seconds.items(), key=lambda phase: -phase[1]):
            print(f"PHASE {label}: {of_phase:.2f} s")
        return seconds, next(tensor for name, tensor in wrap.export_weights() if name == COMPARED)


def load_theirs(folder: Path) -> tuple[float, torch.Tensor]:
    """Seconds, and the compared tensor."""
    _import(THEIRS)
    models: list[Any] = []
    settings = {"dtype": torch.bfloat16, "device_map": {"": DEVICE}}
    method = transformers.Mxfp4Config(dequantize=True)

    def load() -> None:
        models.append(transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=method, **settings))

    seconds = _timed(load)
    return seconds, models[0].get_parameter(COMPARED).detach()


def _import(modules: tuple[str, ...], packages: tuple[str, ...] = ()) -> None:
    """Import modules, and all modules of packages, as far as there are any for this device."""
    for name in modules:
        with contextlib.suppress(ImportError, OSError, RuntimeError):  # none, or one for another CUDA
            importlib.import_module(name)
    for name in packages:
        _import(
            tuple(module.name for module in pkgutil.walk_packages(importlib.import_module(name).__path__, name + "."))
        )


def _timed(load: Any) -> float:
    if DEVICE == "cuda":
        square = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
        square @ square  # starts cuBLAS
        torch.cuda.synchronize()
    started = time.perf_counter()
    load()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    """Start a process for each load, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--phases", action="store_true", help="seconds of the parts of our load")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="longest functions of one more load of ours")
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    parser.add_argument("--load", choices=("ours", "transformers"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        is_ours = arguments.load == "ours"
        ours = arguments.folder, arguments.phases, arguments.profile
        seconds, tensor = load_ours(*ours) if is_ours else load_theirs(arguments.folder)
        digest = hashlib.sha256(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
        peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
        print("LOADED " + json.dumps({"seconds": seconds, "digest": digest, "peak_gib": peak}))
        return
    if not arguments.folder.exists():
        make(arguments.folder, arguments.tiny)
    results: dict[str, list[dict[str, Any]]] = {"ours": [], "transformers": []}
    for turn in range(arguments.rounds):
        for way in list(results)[:: -1 if turn % 2 else 1]:
            command = [sys.executable, __file__, str(arguments.folder), "--load", way, *["--phases"] * arguments.phases]
            output = subprocess.run(command, capture_output=True, text=True, check=False)
            line = next((text for text in output.stdout.splitlines() if text.startswith("LOADED ")), None)
            if line is None:
                sys.exit(f"{way}: exit code {output.returncode}\n{output.stderr[-2000:]}")
            for text in output.stdout.splitlines():
                if text.startswith("PHASE "):
                    print("  " + text.removeprefix("PHASE "))
            results[way].append(json.loads(line.removeprefix("LOADED ")))
            print(f"round {turn + 1}, {way}: {results[way][-1]['seconds']:.2f} s", flush=True)
    if arguments.profile:
        command = [sys.executable, __file__, str(arguments.folder), "--load", "ours", "--profile", arguments.profile]
        subprocess.run(command, capture_output=True, check=True)
    digests = {run["digest"] for runs in results.values() for run in runs}
    seconds = {way: [round(run["seconds"], 2) for run in runs] for way, runs in results.items()}
    peaks = {way: round(max(run["peak_gib"] for run in runs), 1) for way, runs in results.items()}
    print("RESULT " + json.dumps({"seconds": seconds, "peak_gib": peaks, "same_bits": len(digests) == 1}))


if __name__ == "__main__":
    with exit_on_user_error():
        main()
