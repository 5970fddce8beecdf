"""Malformed inputs of a run: each is accepted, or refused with one error, without a traceback and within 30 s.

python scripts/drill/malformed_input.py --count 500 [--seed 0]

A trial damages one file of a small run with a Hugging Face model, a tokenizer, rows in every kind of file and a peft
adapter, and starts what reads it: `megatron-wrap check`, `inspect-data`, every tensor of the folder, every row. Exits
with 1 after an exception that is not an error of the user, or a trial that does not end.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _counted import run

LIMIT_SECONDS = 30
LIMIT_BYTES = 8 << 30
"""Largest number of bytes of memory that a trial may allocate."""

RUN = """\
megatron_lm:
  train:
    common: {micro_batch_size: 1, global_batch_size: 2, seq_length: 64, train_iters: 2}
    learning-rate: {lr: 2e-4}
megatron_wrap:
  model_provider: {__override__: {hf_path: model}}
  logger: {output_dir: out}
  data:
    __select__: jsonl
    __override__: {tokenizer: tokenizer, train: rows.jsonl, num_workers: 0, on_bad_sample: skip}
  flow: {__select__: gpt_sft}
"""
CHAT = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
ROWS: tuple[dict[str, Any], ...] = (
    {"messages": CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "weight": 2},
    {"messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
    {"prompt": "a", "completion": "b"},
    {"prompt": CHAT[:1], "completion": CHAT[1:]},
    {"text": "some text"},
    {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 10**6, 10**12, 10**30, 0.5, -0.0, float("nan"), float("inf"), 1e-300),
    *("", "x", "1", "\ud800", "\0", "../..", "/etc/passwd", "é" * 300, [], {}, [None], [[]], [1], ["x"], {"a": 1}),
    *({"": {}}, [[[1]]], {"type": "x"}, [0] * 300),
)
TEXTS = (
    *("", " ", "null", "[]", "{}", "1", '"x"', "{", "[" * 30_000, '{"a":' * 30_000, "\ufeff{}", "\0", "NaN"),
    *("9" * 6000, '{"a": 1, "a": 2}', "[" * 30_000 + "]" * 30_000, "x" * 70_000, "\n\n\n"),
)
BOMB = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 20))
TEMPLATES = (
    *("{{ 'a' * 10000000000 }}", "{{ 10 ** 10 ** 10 }}", "{% for a in range(99999) %}xx", "{{ messages[99].x.y }}"),
    *("{{ ''.__class__.__mro__ }}", "{% include 'x' %}", "{{ raise_exception('no') }}", "{% generation %}"),
    *("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages | tojson }}", "", "{{ 'x' | nosuch }}"),
    *("{{ '%s' % messages }}", "{{ 'a'.ljust(10 ** 11) }}", "{{ range(10 ** 9) | list }}", "{{ messages.pop() }}"),
    "{{ '{:>9999999999}'.format(1) }}",
)


def container_and_key(value: Any, generator: random.Random) -> tuple[Any, Any]:
    """(container, key) of a random value in a tree; values near its root are likelier than in proportion."""
    key = generator.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if isinstance(value[key], dict | list) and value[key] and generator.random() < 0.7:
        return container_and_key(value[key], generator)
    return value, key


def other_value(content: Any, generator: random.Random) -> Any:
    """A copy with a few values replaced or removed."""
    content = copy.deepcopy(content)
    for _ in range(generator.choice((1, 1, 1, 2, 4))):
        if not content:
            break
        container, key = container_and_key(content, generator)
        if generator.random() < 0.2:
            del container[key]
        else:
            container[key] = copy.deepcopy(generator.choice(VALUES))
    return content


def other_bytes(content: bytes, generator: random.Random) -> bytes:
    """A copy that is truncated, or has other bytes."""
    kind = generator.randrange(4)
    if kind == 0 or not content:
        return content[: generator.randrange(len(content) + 1)]
    changed = bytearray(content)
    for _ in range(generator.choice((1, 3, 30))):
        at = generator.randrange(len(changed))
        if kind == 1:
            changed[at] = generator.randrange(256)
        elif kind == 2:
            changed[at:at] = generator.choice((b"\0", b"\xff", b"\xed\xa0\x80", b"{", b"[", b'"', b"-", b"e9"))
        else:
            del changed[at : at + generator.choice((1, 5, 50))]
            if not changed:
                break
    return bytes(changed)


def damage_json(path: Path, generator: random.Random) -> None:
    """Damage a JSON file by another value, other bytes or another text."""
    kind = generator.random()
    if kind < 0.7:
        path.write_text(json.dumps(other_value(json.loads(path.read_text("utf-8")), generator)), encoding="utf-8")
    elif kind < 0.85:
        path.write_bytes(other_bytes(path.read_bytes(), generator))
    else:
        path.write_text(generator.choice(TEXTS), encoding="utf-8")


def damage_special(path: Path, generator: random.Random) -> None:
    """Replace a file by a pipe, a folder, a link, or a huge file without content."""
    path.unlink()
    kind = generator.choice(("pipe", "folder", "nowhere", "itself", "device", "huge", "unreadable"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("huge", "unreadable"):
        path.touch(0o600 if kind == "huge" else 0)
        os.truncate(path, 1 << 30 if kind == "huge" else 10)
    else:
        path.symlink_to({"nowhere": "nothing", "itself": path.name, "device": "/dev/zero"}[kind])


def damage_yaml(folder: Path, generator: random.Random) -> str:
    """Damage the run's YAML."""
    path = folder / "run.yaml"
    kind = generator.randrange(5)
    if kind == 0:
        path.write_text(generator.choice((BOMB, "a: " + "[" * 20_000, *TEXTS)) + RUN * generator.randrange(2), "utf-8")
    elif kind == 1:
        path.write_bytes(other_bytes(RUN.encode(), generator))
    elif kind == 2:
        damage_special(path, generator)
    else:
        import yaml

        content = other_value(yaml.safe_load(RUN), generator)
        with contextlib.suppress(UnicodeEncodeError):
            path.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    return "check"


def damage_rows(folder: Path, generator: random.Random) -> str:
    """Damage the JSON lines."""
    path = folder / "rows.jsonl"
    if generator.random() < 0.1:
        damage_special(path, generator)
        return "inspect-data"
    lines = []
    for number in range(generator.choice((1, 3, 8))):
        row = copy.deepcopy(generator.choice(ROWS))
        text = json.dumps(row if number % 3 == 2 else other_value(row, generator)).encode()
        lines.append(text if generator.random() < 0.8 else other_bytes(text, generator).replace(b"\n", b""))
    if generator.random() < 0.1:
        lines.append(generator.choice(TEXTS).encode())
    path.write_bytes(b"\n".join(lines) + b"\n" * generator.randrange(2))
    return generator.choice(("inspect-data", "rows:rows.jsonl", "inspect-data:error"))


def damage_table(folder: Path, generator: random.Random) -> str:
    """Damage the rows as another kind of file: compressed, one JSON array, parquet or Arrow."""
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": f"text {number}", "messages": None} for number in range(20)] + [{"text": None, "messages": CHAT}]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = folder / f"rows{generator.choice(('.jsonl.gz', '.jsonl.zst', '.json', '.parquet', '.arrow'))}"
    if path.suffix == ".parquet":
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, path, compression=generator.choice(("none", "snappy", "zstd")))
    elif path.suffix == ".arrow":
        table = pyarrow.Table.from_pylist(rows)
        make = generator.choice((pyarrow.ipc.new_file, pyarrow.ipc.new_stream))
        with make(str(path), table.schema) as writer:
            writer.write_table(table)
    else:
        content = json.dumps(rows).encode() if path.suffix == ".json" else text
        compressed = {".gz": gzip.compress, ".zst": lambda data: pyarrow.Codec("zstd").compress(data, asbytes=True)}
        path.write_bytes(compressed.get(path.suffix, bytes)(content))
    if generator.random() < 0.15:
        damage_special(path, generator)
    elif generator.random() < 0.1:
        path.write_text(generator.choice(TEXTS), encoding="utf-8")
    else:
        path.write_bytes(other_bytes(path.read_bytes(), generator))
    return f"rows:{path.name}"


def damage_tokenizer(folder: Path, generator: random.Random) -> str:
    """Damage the tokenizer's files, or its chat template."""
    paths = sorted((folder / "tokenizer").iterdir())
    path = generator.choice(paths)
    kind = generator.random()
    if kind < 0.15:
        damage_special(path, generator)
    elif kind < 0.4:
        (folder / "tokenizer" / "chat_template.jinja").write_text(generator.choice(TEMPLATES), encoding="utf-8")
    elif path.suffix == ".json":
        damage_json(path, generator)
    else:
        path.write_bytes(other_bytes(path.read_bytes(), generator))
    return generator.choice(("check", "inspect-data"))


def damage_config(folder: Path, generator: random.Random) -> str:
    """Damage config.json or generation_config.json of the model."""
    path = folder / "model" / generator.choice(("config.json", "config.json", "generation_config.json"))
    (damage_special if generator.random() < 0.1 else damage_json)(path, generator)
    return "check"


def damage_weights(folder: Path, generator: random.Random) -> str:
    """Damage a safetensors file's header or data, or the index."""
    index, *shards = sorted((folder / "model").glob("*.safetensors*"), key=lambda path: path.suffix != ".json")
    path = generator.choice((index, *shards))
    if generator.random() < 0.15:
        damage_special(path, generator)
    elif path == index:
        damage_json(path, generator)
    else:
        damage_header(path, generator)
    return "tensors"


def damage_header(path: Path, generator: random.Random) -> None:
    """Damage the header of a safetensors file by other values, another length, or other bytes."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    kind = generator.randrange(5)
    if kind == 0:
        path.write_bytes(other_bytes(content, generator))
        return
    if kind == 1:
        length = generator.choice((0, 1, length - 1, length + 1, 1 << 40, (1 << 64) - 1, len(content) - 8))
    elif kind == 2:
        header = generator.choice(TEXTS).encode()
        length = len(header)
    elif kind == 3:
        header = json.dumps(other_value(json.loads(header), generator)).encode()
        length = len(header)
    else:
        at = generator.randrange(len(data))
        data = data[:at] + generator.randbytes(64) + data[at + 64 :]
    path.write_bytes(length.to_bytes(8, "little") + header + data)


def damage_adapter(folder: Path, generator: random.Random) -> str:
    """Damage adapter_config.json or adapter_model.safetensors of a peft folder."""
    config, weights = folder / "adapter" / "adapter_config.json", folder / "adapter" / "adapter_model.safetensors"
    path = generator.choice((config, config, weights))
    if generator.random() < 0.15:
        damage_special(path, generator)
    else:
        (damage_json if path == config else damage_header)(path, generator)
    return "adapter"


DAMAGE: dict[str, Callable[[Path, random.Random], str]] = {
    "yaml": damage_yaml,
    "rows": damage_rows,
    "tables": damage_table,
    "tokenizer": damage_tokenizer,
    "config": damage_config,
    "weights": damage_weights,
    "adapter": damage_adapter,
}
"""Kind of file -> function that damages it in a folder, and returns the name of its reader."""


def write_run(folder: Path) -> None:
    """Write the undamaged files."""
    from peft import LoraConfig, get_peft_model
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ (m['content'] or '') + eos_token }}{% endgeneration %}{% else %}{{ m['content'] + eos_token }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(tokenizer), num_key_value_heads=2))
    model.save_pretrained(folder / "model", max_shard_size="6KB")
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(model, lora)
    adapted.peft_config["default"].base_model_name_or_path = "model"
    adapted.save_pretrained(folder / "adapter")
    (folder / "run.yaml").write_text(RUN, encoding="utf-8")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")


def read_input(reader: str) -> str:
    """Read the run in the working directory; returns "read" or "refused".

    Raises:
        Exception: a failure, unless it is a `MegatronWrapError`.
    """
    from megatron_wrap.cli.main import main
    from megatron_wrap.errors import MegatronWrapError

    command, _, option = reader.partition(":")
    if command in ("check", "inspect-data"):
        overrides = [f"megatron_wrap.data.on_bad_sample={option}"] if option else []
        return "refused" if main([command, "run.yaml", *overrides]) else "read"
    try:
        {"tensors": read_tensors, "rows": lambda: read_rows(option), "adapter": read_adapter}[command]()
    except MegatronWrapError as error:
        if not str(error).strip() or "\n" in str(error):
            raise RuntimeError(f"not one line: {error!r}") from error
        return "refused"
    return "read"


def read_tensors() -> None:
    """Read every tensor that a model loads."""
    from megatron_wrap.bridge.loading.hf_path import starting_weights
    from megatron_wrap.config import load_run_config
    from megatron_wrap.config.checks.run import check_values

    config = load_run_config("run.yaml")
    check_values(config)
    weights = starting_weights(config)
    assert weights is not None
    for name, tensor in weights.tensors.items():
        weights.read(name, tuple((0, size) for size in tensor.shape))


def read_rows(path: str) -> None:
    """Read the rows of a file that are not skipped, by random access and as a stream."""
    from megatron_wrap.config.schema.data import SourceConfig
    from megatron_wrap.data.chat.encode import encode_sample
    from megatron_wrap.data.chat.tokenizer import load_tokenizer
    from megatron_wrap.data.order.sample_reader import Preparation, SampleReader
    from megatron_wrap.data.order.sample_sets import training_stream

    tokenizer = load_tokenizer("tokenizer")
    for streaming in (False, True):
        stream = training_stream([SourceConfig(path=path, streaming=streaming)], 1, shuffle=False)
        preparation = Preparation(lambda row: encode_sample(tokenizer, row), len)
        reader = SampleReader(stream, preparation, skip_bad=True)
        for position in range(24):
            reader.problem(position)


def read_adapter() -> None:
    """Check a run that starts from an adapter, with the keys of that adapter, and read its tensors."""
    from megatron_wrap.bridge.adapters.peft_folder import adapter_base, adapter_folder, adapter_keys
    from megatron_wrap.bridge.adapters.run_adapter import run_adapter
    from megatron_wrap.config import load_run_config
    from megatron_wrap.config.checks.run import check_values

    adapter_base("adapter")
    keys = {"target_modules": ["q_proj", "v_proj"], "r": 2, **adapter_keys("adapter")}
    overrides = [f"megatron_wrap.adapter.{key}={json.dumps(value)}" for key, value in keys.items()]
    config = load_run_config("run.yaml", ["megatron_wrap.adapter.__select__=lora", *overrides])
    check_values(config)
    weights = adapter_folder(config, run_adapter(config))
    if weights is not None:
        for name, tensor in weights.tensors.items():
            weights.read(name, tuple((0, size) for size in tensor.shape))


def serve(pipe: Connection, good: Path, scratch: Path) -> None:
    """Run the trials whose seeds arrive; sends (kind, reader), then (outcome, details)."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_DATA, (used + LIMIT_BYTES, used + LIMIT_BYTES))
    while True:
        seed = pipe.recv()
        generator = random.Random(seed)
        kind = list(DAMAGE)[seed % len(DAMAGE)]
        os.chdir(scratch)
        for old in scratch.glob("trial-*"):
            shutil.rmtree(old)
        folder = scratch / f"trial-{seed}"  # another name: tokenizers are cached by their path
        shutil.copytree(good, folder)
        os.chdir(folder)
        reader = DAMAGE[kind](folder, generator)
        pipe.send((kind, reader))
        printed, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", how) for how in ("strict", "backslashreplace"))
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
                outcome = read_input(reader)
                printed.flush()
            errors.flush()
            shown = (printed.buffer.getvalue() + errors.buffer.getvalue()).decode()
            pipe.send(("traceback", shown) if "Traceback (most" in shown else (outcome, shown))
        except BaseException:
            pipe.send(("traceback", traceback.format_exc()))


class Process:
    """A process that runs trials, replaced by another one after a trial that does not end."""

    def __init__(self, good: Path, scratch: Path) -> None:
        self._arguments = good, scratch
        self._start()

    def trial(self, seed: int) -> tuple[str, str, str, str]:
        """Run a trial; returns kind, reader, outcome (read, refused, traceback or hang) and details."""
        kind = reader = "?"
        try:
            self._pipe.send(seed)
            kind, reader = self._pipe.recv()
            if self._pipe.poll(LIMIT_SECONDS):
                return (kind, reader, *self._pipe.recv())
            outcome = "hang", f"more than {LIMIT_SECONDS} s"
        except EOFError:
            outcome = "traceback", "the process died"
        self.stop()
        self._start()
        return kind, reader, *outcome

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *self._arguments), daemon=True)
        self._process.start()
        theirs.close()

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def drill(count: int, seed: int, folder: Path) -> list[str]:
    """Run `count` trials, and print a line for each kind; returns the failures."""
    write_run(folder / "good")
    process, outcomes, wrong = Process(folder / "good", folder), Counter(), []
    for number in range(count):
        trial_seed = seed * 1_000_000 + number
        kind, reader, outcome, details = process.trial(trial_seed)
        outcomes[kind, outcome] += 1
        if outcome in ("traceback", "hang"):
            wrong.append(f"trial {trial_seed}, {kind}, {reader}: {outcome}\n{details}")
    process.stop()
    names = ("refused", "read", "traceback", "hang")
    for kind in DAMAGE:
        print(f"{kind:<10}", *(f"{outcomes[kind, name]:>5} {name}" for name in names))
    return wrong


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["HF_DATASETS_CACHE"] = cache
        status = run(drill, __doc__, count=500, trials="trials")
    sys.exit(status)
