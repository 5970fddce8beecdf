"""The section of data: the samples that a run trains on and evaluates, and their reading."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_wrap.config.schema.keys import key
from megatron_wrap.config.schema.sources import SourceConfig


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """`megatron_wrap.data`: the samples of `wrap.batches()` and `wrap.evaluate()`. A relative path is relative to the
    working directory."""

    data_key: Literal["none", "dataset", "jsonl", "indexed", "mock"] = "none"
    """none: the caller passes samples; dataset: files, folders or hub ids, for which jsonl is another name; indexed:
    windows of Megatron's .bin and .idx files, for gpt_pretrain; mock: numbered empty samples for a flow that generates
    its own."""
    train: tuple[SourceConfig, ...] = key((), kind="a path, a source's mapping, a list of these, or null")
    """Training samples: a file, folder or hub id, a source with the keys below, or a list of sources, which are mixed;
    null: none."""
    validation: Mapping[str, tuple[SourceConfig, ...]] = key(
        {}, kind="a path, a mapping from names to paths or sources, or null"
    )
    """Path of the evaluation set `validation`, or name of each set -> its path, source or list of sources; null:
    none."""
    on_bad_sample: Literal["error", "skip"] = "error"
    """A row that cannot be read or encoded: stop and name file and row, or skip and count it."""
    num_workers: int = key(1, at_least=0)
    """Processes on each replica that read, tokenize and collate ahead of the training step; 0: the step itself."""
    prefetch_batches: int = key(2, at_least=1)
    """Number of global batches that are prepared ahead."""
    shuffle_buffer: int = key(1000, at_least=1)
    """Number of samples of a streaming source that are shuffled together, block by block."""
    cache_dir: str | None = None
    """Folder of cached tokenized samples, by data, tokenizer and template; null: no cache. indexed: folder of the
    indices; null: `cache` in the folder of the first prefix."""
    packing_window: int = key(1024, at_least=1)
    """With flow.packing, number of samples that are packed into rows together; more samples fill the rows better, but
    randomize the order less."""
    num_samples: int = key(1024, at_least=1)
    """Number of samples of mock data."""
    shuffle: bool = True
    """A different order of the samples in each epoch, determined by the seed; false: the order of the files."""
    tokenizer: str | None = None
    """Hugging Face tokenizer folder; null: the tokenizer of model_provider.hf_path, if any."""
    new_tokens: tuple[str, ...] = ()
    """Texts that the tokenizer gets as tokens. Their rows of embedding and output layer begin as the mean of the
    others, and are added where the model of hf_path has none for them; exports contain the grown tokenizer."""
    split: str | None = None
    """indexed: shares of each prefix's documents for training, validation and test, such as 949,50,1; null: all
    documents of train are for training, and validation has its own prefixes."""
    mock_data: bool = False
    """indexed: Megatron-Core's generated documents instead of train."""
    eod_token: int | None = key(None, at_least=0)
    """indexed: id of the token that ends a document; null: the tokenizer's eos token."""
    eod_mask_loss: bool = False
    """indexed: no loss where the input is the end of a document."""
    reset_position_ids: bool = False
    """indexed: positions begin at 0 in each document."""
    reset_attention_mask: bool = False
    """indexed: tokens attend only to their own document; needs flow.packing."""
    index_samples: int | None = key(None, at_least=1)
    """indexed: windows in the training index, which determine their order; null: those of the run. To continue a run
    with another length, keep the number; after the last window, the index begins again."""
