"""From Python files to a model that completes Python: tokenizer, tokens, GPT-2 from scratch, Hugging Face folder.

python examples/codeparrot/run.py [--config YAML] [--folder FOLDER] [--input PATH ...] [a.b.c=value ...]

Each step is a command, which the program prints. A step whose result exists is not repeated, and the training resumes.
Without --input the text is Python's standard library.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy
from completions import PROMPTS, parse_rate
from curve import write_curve

HERE = Path(__file__).parent
PROMPT = "def hello_world():"
LEFT_OUT = {"site-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "encodings", "pydoc_data"}
"""Folders of the standard library that are no part of the text: tests, tables and the text of the manual."""


def without_docstrings(tree: ast.AST) -> ast.AST:
    """The same tree without statements that are a constant alone, as docstrings are; an emptied block gets `pass`."""
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            kept = [each for each in body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return tree


def write_library(path: Path) -> None:
    """Write the code of the standard library as JSON lines, without comments and docstrings.

    They are most of the text and prose, which a model of this size does not learn within minutes. The order is random,
    so that the end, which is for validation, is like the rest. A file that is there already is kept.
    """
    if path.is_file():
        return
    library = Path(os.__file__).parent
    files = sorted(path for path in library.rglob("*.py") if not LEFT_OUT & set(path.relative_to(library).parts))
    random.Random(0).shuffle(files)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".new")
    with unfinished.open("w", encoding="utf-8") as file:
        for each in files:
            code = ast.unparse(without_docstrings(ast.parse(each.read_bytes())))
            file.write(json.dumps({"text": code + "\n"}) + "\n")
    unfinished.replace(path)


def call(*words: object) -> None:
    """Run a command in one process of this Python, with one thread; ends the program if it fails."""
    shown = [str(word) for word in words]
    print("$", " ".join(shown[:12]), *(["..."] if len(shown) > 12 else []), flush=True)
    done = subprocess.run([sys.executable, "-m", *shown], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def write_tokens(arguments: argparse.Namespace, folder: Path) -> Path:
    """Train the tokenizer and tokenize the text; returns the prefix of the files."""
    text = arguments.input or [folder / "library.jsonl"]
    if not arguments.input:
        write_library(folder / "library.jsonl")
    read = ["--input", *text, "--json-keys", arguments.json_key, "--on-bad-document", "skip"]
    wrap = "megatron_wrap.cli.main"
    if not (folder / "tokenizer/tokenizer.json").is_file():
        call(wrap, "train-tokenizer", "--vocab-size", arguments.vocab_size, "--output", folder / "tokenizer", *read)
    options = ["--tokenizer", folder / "tokenizer", "--append-eod", "--output-prefix", folder / "code"]
    call(wrap, "preprocess", *options, *read)
    return folder / f"code_{arguments.json_key}_document"


def unigram_entropy(prefix: Path, folder: Path) -> float:
    """Nats per token of a model that knows how often each token occurs, and nothing else."""
    size = len(json.loads((folder / "tokenizer/tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])
    tokens = numpy.memmap(f"{prefix}.bin", "uint16" if size < 65500 else "int32", "r")
    counts = sum(numpy.bincount(tokens[at : at + 2**24], minlength=size) for at in range(0, len(tokens), 2**24))
    shares = counts[counts > 0] / len(tokens)
    return float(-(shares * numpy.log(shares)).sum())


def train(arguments: argparse.Namespace, folder: Path, prefix: Path) -> None:
    """Train in the processes of the layout, and write what train.py writes."""
    data = "megatron_wrap.data"
    where = [f"megatron_lm.train.common.save={folder}/checkpoints", f"megatron_wrap.logger.output_dir={folder}/run"]
    where += [f"{data}.train={prefix}", f"{data}.tokenizer={folder}/tokenizer"]
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", arguments.processes]
    call(*launch, HERE / "train.py", folder, arguments.config, *where, *arguments.overrides)


def complete(folder: Path) -> str:
    """The text that transformers' pipeline writes after the prompt."""
    from transformers import pipeline

    generator = pipeline("text-generation", model=str(folder / "hf"))
    return str(generator(PROMPT, max_new_tokens=48, do_sample=False)[0]["generated_text"])


def summarize(folder: Path, entropy: float, seconds: float) -> dict[str, object]:
    """The figures of the run."""
    record = json.loads((folder / "completions.json").read_text(encoding="utf-8"))
    rates = {int(step): parse_rate(texts) for step, texts in record["completions"].items()}
    loss = record["validation_loss"]
    return {
        "validation_loss": round(loss, 4),
        "unigram_entropy": round(entropy, 4),
        "share_of_entropy": round(loss / entropy, 4),
        "completions": len(next(iter(record["completions"].values()))),
        "prompts": len(PROMPTS),
        "parse_rate_by_iteration": rates,
        "seconds": round(seconds),
    }


def main() -> None:
    """All steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", default=[], metavar="a.b.c=value", help="of the configuration")
    parser.add_argument("--config", default=str(HERE / "cpu.yaml"), help="cpu.yaml (default) or gpu.yaml")
    parser.add_argument("--processes", type=int, default=2, help="of the training on this node (default: 2)")
    parser.add_argument("--folder", default="outputs/codeparrot", help="for everything that is written")
    parser.add_argument("--input", nargs="+", help="files, patterns or folders (default: the standard library)")
    parser.add_argument("--json-key", default="text", help="the text in rows of --input (default: text)")
    parser.add_argument("--vocab-size", type=int, default=1024)
    arguments = parser.parse_intermixed_args()
    begun, folder = time.monotonic(), Path(arguments.folder)
    prefix = write_tokens(arguments, folder)
    entropy = unigram_entropy(prefix, folder)
    train(arguments, folder, prefix)
    write_curve(folder / "run/metrics.jsonl", folder / "loss.svg", entropy)
    print(f"loss curve: {folder}/loss.svg")
    print(f"pipeline('text-generation', {str(folder / 'hf')!r}):\n{complete(folder)}")
    summary = summarize(folder, entropy, time.monotonic() - begun)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
