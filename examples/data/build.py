"""Makes the example's data set and tokenizer: `python examples/data/build.py [--output FOLDER] [--force]`.

Writes train.jsonl, validation.jsonl, preference pairs and single answers of both, tokenizer/, the texts of train.jsonl
as text_document.bin and .idx for pretraining, and manifest.json, which is written last: a folder with a manifest is
whole. A whole folder is left as it is, also by another Python, so that a run that resumes finds the data it began with.
"""

import argparse
import hashlib
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # also when it is loaded from a file by a test, not run as a script

import bpe  # noqa: E402
import conversations  # noqa: E402
import indexed_text  # noqa: E402
import preferences  # noqa: E402

BUILD_VERSION = 4
"""Increased when the builder writes other data for the same Python; a folder of another version is built again."""
FILES = (
    "train.jsonl",
    "validation.jsonl",
    "preference-train.jsonl",
    "preference-validation.jsonl",
    "answers-train.jsonl",
    "answers-validation.jsonl",
    "text_document.bin",
    "text_document.idx",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
    "tokenizer/chat_template.jinja",
)


def build(output: Path, force: bool = False) -> tuple[dict, bool]:
    """Makes the data in `output`; returns its manifest and whether anything was written."""
    manifest = read_manifest(output)
    if manifest is not None and not force:
        return manifest, False
    output.mkdir(parents=True, exist_ok=True)
    train, validation = conversations.make_conversations()
    # Beside its destination, so that the renames below stay on one file system.
    with tempfile.TemporaryDirectory(prefix=".building-", dir=output) as temporary:
        folder = Path(temporary)
        for name, samples in (("train", train), ("validation", validation)):
            write_jsonl(folder / f"{name}.jsonl", samples)
            pairs = preferences.make_pairs(samples)
            write_jsonl(folder / f"preference-{name}.jsonl", pairs)
            write_jsonl(folder / f"answers-{name}.jsonl", preferences.make_answers(pairs))
        texts = (message["content"] for sample in train for message in sample["messages"])
        vocabulary_size = bpe.train_tokenizer(texts, folder / "tokenizer")
        answers = [sample["messages"][1]["content"] for sample in train]
        indexed_text.write_indexed(folder / "text_document", bpe.encode(answers, folder / "tokenizer"))
        manifest = {
            "build_version": BUILD_VERSION,
            "python": platform.python_version(),
            "train_conversations": len(train),
            "validation_conversations": len(validation),
            "vocabulary_size": vocabulary_size,
            "sha256": {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES},
        }
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        (output / "tokenizer").mkdir(exist_ok=True)
        (output / "manifest.json").unlink(missing_ok=True)  # from here until the last rename the folder is not whole
        for name in (*FILES, "manifest.json"):
            os.replace(folder / name, output / name)
    return manifest, True


def read_manifest(output: Path) -> dict | None:
    """The manifest of a whole folder of this builder's version, else None."""
    try:
        manifest = json.loads((output / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    whole = manifest.get("build_version") == BUILD_VERSION and all((output / name).is_file() for name in FILES)
    return manifest if whole else None


def write_jsonl(path: Path, samples: list[dict]) -> None:
    """One JSON object per line, UTF-8, with line feeds on every platform."""
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for sample in samples:
            file.write(json.dumps(sample, ensure_ascii=False) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make the example's chat data and tokenizer from this Python.")
    parser.add_argument(
        "--output", type=Path, default=HERE / "generated", help="folder to write (default: %(default)s)"
    )
    parser.add_argument("--force", action="store_true", help="make it again although it is there")
    options = parser.parse_args(arguments)
    try:
        manifest, written = build(options.output, options.force)
    except OSError as error:
        print(f"{options.output}: cannot be written ({error}); choose another folder with --output", file=sys.stderr)
        return 2
    print(f"{options.output}: {'made' if written else 'is there already (--force makes it again)'}")
    print(
        f"  train.jsonl {manifest['train_conversations']} and validation.jsonl {manifest['validation_conversations']} "
        f"conversations, from the docstrings of Python {manifest['python']}"
    )
    print("  preference-train.jsonl and preference-validation.jsonl: the same with a worse answer for each good one")
    print("  answers-train.jsonl and answers-validation.jsonl: one of the two answers, with a label")
    print("  text_document.bin and .idx: the docstrings alone as tokens, for gpt_pretrain")
    print(f"  tokenizer/ byte-level BPE, {manifest['vocabulary_size']} entries, with a chat template")
    return 0


if __name__ == "__main__":
    sys.exit(main())
