"""Throughput of `megatron-wrap preprocess` per core compared with the tokenizers library, and its memory.

    python scripts/benchmark/preprocess.py [--megabytes 20] [--workers 1] [--repeats 3] [--vocab-size 8000]
    python scripts/benchmark/preprocess.py --megabytes 1000 --repeats 1 --only-memory

The text is the source code of Python's standard library, repeated, one document a file, in JSON lines. Both sides
encode with the same tokenizer in turn: the library in batches in one thread from texts in memory to lists of ids,
preprocess from the file to `.bin` and `.idx`. A side's throughput is bytes of text per second of processor time, of all
its processes, so that other work on the machine does not count; imports and loading the tokenizer, which a run does
once, do not count either. Each measurement has a process of its own. One JSON line has the two and their ratio, the
other the peak memory of the process that writes and of its largest worker.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from megatron_wrap.data.chat.tokenizer import load_tokenizer
from megatron_wrap.data.preprocess.documents import InputFiles
from megatron_wrap.data.preprocess.preprocess import Preprocessing, preprocess
from megatron_wrap.data.preprocess.tokenizer_training import train_tokenizer


def write_text(folder: Path, megabytes: float) -> Path:
    """JSON lines with so much text."""
    library = Path(os.__file__).parent
    files = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    path, size = folder / "text.jsonl", 0
    with path.open("w", encoding="utf-8") as file:
        while size < megabytes * 1e6:
            for source in files:
                text = source.read_bytes().decode("utf-8", "replace")
                if text and size < megabytes * 1e6:
                    file.write(json.dumps({"text": text}) + "\n")
                    size += len(text.encode())
    return path


def library_alone(path: Path, tokenizer: Path) -> tuple[int, float]:
    """Bytes of text, and seconds of processor time that the library takes to encode them."""
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in path.open(encoding="utf-8")]
    begun = time.process_time()
    for first in range(0, len(texts), 64):
        for encoding in loaded.encode_batch_fast(texts[first : first + 64], add_special_tokens=False):
            assert encoding.ids
    return sum(len(text.encode()) for text in texts), time.process_time() - begun


def processor_seconds() -> float:
    """Of this process and of those that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def ours(path: Path, tokenizer: Path, workers: int) -> tuple[float, list[int]]:
    """Seconds of processor time that preprocess takes; peak memory, MiB, of the writer and of its largest worker."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        settings = Preprocessing(
            input=[str(path)], tokenizer=str(tokenizer), output_prefix=f"{folder}/out", append_eod=True, workers=workers
        )
        begun = processor_seconds()
        assert preprocess(settings).complete
        seconds = processor_seconds() - begun
    peaks = [resource.getrusage(who).ru_maxrss // 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return seconds, peaks


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call: what a process has allocated before makes the library slower, by up to a fifth."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=lambda: there.send(function(*arguments)))
    process.start()
    there.close()
    result = here.recv()  # EOFError: the process failed, and has printed why
    process.join()
    return result


def prepare(folder: Path, megabytes: float, vocab_size: int) -> Path:
    """Write the text, train the tokenizer in folder/tok."""
    path, sample = write_text(folder, megabytes), folder / "sample.jsonl"
    with path.open(encoding="utf-8") as file:
        sample.write_text("".join(line for _, line in zip(range(300), file, strict=False)), encoding="utf-8")
    train_tokenizer(InputFiles([str(sample)], ["text"]), ["text"], folder / "tok", vocab_size=vocab_size)
    return path


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=20)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--only-memory", action="store_true")
    parser.add_argument("--folder", help="for the text; default: the folder of temporary files")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        path = in_new_process(prepare, folder, arguments.megabytes, arguments.vocab_size)
        load_tokenizer(str(folder / "tok"))
        alone, whole, peaks = [], [], [0, 0]
        for _ in range(arguments.repeats):
            if not arguments.only_memory:
                size, seconds = in_new_process(library_alone, path, folder / "tok")
                alone.append(size / seconds / 1e6)
            seconds, peaks_of_run = in_new_process(ours, path, folder / "tok", arguments.workers)
            peaks = [max(pair) for pair in zip(peaks, peaks_of_run, strict=True)]
            whole.append(os.path.getsize(path) / seconds / 1e6 if arguments.only_memory else size / seconds / 1e6)
    if not arguments.only_memory:
        speeds = {"tokenizers_mb_per_second": alone, "preprocess_mb_per_second": whole}
        rounded = {key: round(statistics.median(values), 3) for key, values in speeds.items()}
        ratio = statistics.median(ours / theirs for ours, theirs in zip(whole, alone, strict=True))
        print(json.dumps({"workers": arguments.workers, **rounded, "ratio": round(ratio, 3)}))
    print(json.dumps({"megabytes": arguments.megabytes, "writer_peak_mib": peaks[0], "worker_peak_mib": peaks[1]}))


if __name__ == "__main__":
    main()
