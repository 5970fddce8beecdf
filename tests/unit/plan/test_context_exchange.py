"""What the attention of context-parallel processes exchanges by default; whose attention the layers of Transformer
Engine use, by what its `get_attention_backend` documents."""

from pathlib import Path

import pytest

from megatron_wrap.config import load_run_config
from megatron_wrap.config.checks.run import check_configuration
from megatron_wrap.errors import MegatronWrapError
from megatron_wrap.plan.context_exchange import (
    can_use_attention_of_transformer_engine,
    exchange_choice,
    exchanged_bytes,
)

RUN = Path(__file__).parents[3] / "configs/tiny-llama-mock.yaml"
BF16, FP32 = (f"megatron_lm.train.dtype.__select__={kind}" for kind in ("bf16", "fp32"))
PARALLEL, ARCH = "megatron_lm.model.parallel.", "megatron_lm.model.arch."
CP2, PACKED = f"{PARALLEL}context_parallel_size=2", "megatron_wrap.flow.packing=true"
CP4, CP8 = (f"{PARALLEL}context_parallel_size={size}" for size in (4, 8))
BY_HEADS = f"{PARALLEL}cp_comm_type=a2a"
WINDOW, SINKS, EXACT = (
    f"{ARCH}{text}" for text in ("window_size=[7,0]", "softmax_type=learnable", "attention_dropout=0")
)
LATENT = f"{ARCH}multi_latent_attention=true"


def heads(count: int, groups: int, seq_length: int = 1024) -> tuple[str, ...]:
    return (
        *(f"{ARCH}num_attention_heads={count}", f"{ARCH}num_query_groups={groups}", f"{ARCH}kv_channels=16"),
        *(f"megatron_lm.train.common.seq_length={seq_length}", f"{ARCH}max_position_embeddings={seq_length}"),
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((FP32, WINDOW, SINKS), True),
        ((BF16, PACKED, WINDOW), True),
        ((BF16, PACKED, SINKS), False),
        ((BF16, CP2), True),
        ((FP32, CP2), False),
        ((BF16, CP2, WINDOW), False),
        ((BF16, CP2, SINKS), False),
        ((BF16, CP2, WINDOW, SINKS, BY_HEADS), True),
        ((BF16, CP2, WINDOW, PACKED, BY_HEADS), False),
        ((BF16, CP4, *heads(8, 4), BY_HEADS), True),
        ((BF16, CP4, *heads(8, 2), BY_HEADS), False),  # each key head is sent to two processes
        ((BF16, CP2, LATENT, BY_HEADS), False),
        ((BF16, CP2, LATENT, f"{PARALLEL}cp_comm_type=all_gather"), False),
        ((BF16, CP2, LATENT, f"{PARALLEL}cp_comm_type=p2p"), True),
    ],
)
def test_what_the_attention_of_transformer_engine_supports(overrides: tuple[str, ...], expected: bool) -> None:
    assert can_use_attention_of_transformer_engine(load_run_config(RUN, overrides)) == expected


@pytest.mark.parametrize(
    ("overrides", "expected"), [((SINKS, BY_HEADS), False), ((WINDOW, BY_HEADS), True), ((), True)]
)
def test_sinks_with_deterministic_kernels(overrides: tuple[str, ...], expected: bool) -> None:
    config = load_run_config(RUN, (BF16, CP2, *overrides))
    assert can_use_attention_of_transformer_engine(config, deterministic=True) == expected


@pytest.mark.parametrize(
    ("transformer_engine", "overrides", "expected"),
    [
        (False, (CP2, *heads(8, 8)), "all_gather"),  # as many bytes
        (False, (CP4, *heads(8, 8)), "a2a"),
        (False, (CP4, *heads(8, 2)), "all_gather"),
        (False, (CP8, *heads(32, 8)), "a2a"),
        (False, (CP8, *heads(16, 4)), "a2a"),  # each key head is sent to two processes
        (False, (CP8, *heads(12, 12)), "all_gather"),  # 8 does not divide 12
        (False, (BF16, CP2, *heads(8, 8), EXACT), "p2p"),  # as many bytes, some of them hidden
        (False, (BF16, CP2, *heads(8, 8), EXACT, PACKED), "p2p"),
        (False, (BF16, CP2, *heads(8, 8), EXACT, SINKS), "p2p"),
        (False, (BF16, CP2, *heads(8, 8), f"{ARCH}attention_dropout=0.1"), "all_gather"),
        (False, (BF16, CP2, *heads(8, 8), EXACT, WINDOW), "all_gather"),
        (False, (FP32, CP2, *heads(8, 8), EXACT), "all_gather"),  # a GPU stores scores
        (False, (BF16, CP4, *heads(8, 8, 8192), EXACT), "p2p"),  # attention hides the ring
        (False, (BF16, CP4, *heads(8, 2, 2048), EXACT), "p2p"),  # of a quarter of the keys
        (False, (BF16, CP4, *heads(8, 2, 2044), EXACT), "all_gather"),
        (False, (BF16, CP8, *heads(32, 8), EXACT), "a2a"),
        (True, (BF16, CP4, *heads(8, 8)), "a2a"),
        (True, (BF16, CP4, *heads(8, 8, 16_384)), "p2p"),  # attention hides the ring
        (True, (BF16, CP4, *heads(8, 8), PACKED), "p2p"),
        (True, (BF16, CP4, *heads(8, 8), WINDOW), "all_gather"),
        (True, (BF16, CP4, *heads(8, 8), LATENT), "p2p"),
        (True, (FP32, CP4, *heads(8, 8)), "a2a"),  # torch's attention
    ],
)
def test_the_default_sends_the_fewest_bytes_that_attention_does_not_hide(
    transformer_engine: bool, overrides: tuple[str, ...], expected: str
) -> None:
    choice = exchange_choice(load_run_config(RUN, overrides), transformer_engine)
    assert choice is not None
    assert choice.value == expected


def test_bytes_are_those_of_the_tensors_that_a_process_sends() -> None:
    """Counted one by one for four processes: a quarter of 1,024 tokens, 8 query and 4 key heads of 16 in fp32."""
    local, width, others = 256, 16 * 4, 3
    keys_and_values, queries_and_outputs = 2 * local * 4 * width, 2 * local * 8 * width
    sent = {
        "all_gather": 2 * others * keys_and_values,
        "p2p": 3 * others * keys_and_values,
        "a2a": 2 * others * (keys_and_values + queries_and_outputs) // 4,
    }
    config = load_run_config(RUN, (FP32, CP4, *heads(8, 4)))
    assert exchanged_bytes(config, transformer_engine=True) == sent
    kept_from_the_forward_pass = {"p2p": sent["p2p"] - keys_and_values}
    assert exchanged_bytes(config, transformer_engine=False) == sent | kept_from_the_forward_pass


def test_a_named_value_and_a_saved_one_are_kept() -> None:
    assert exchange_choice(load_run_config(RUN, (CP4, *heads(8, 8), f"{PARALLEL}cp_comm_type=p2p")), False) is None
    assert exchange_choice(load_run_config(RUN, heads(8, 8)), False) is None
    resumed = exchange_choice(load_run_config(RUN, (CP4, *heads(8, 8))), False, saved="p2p")
    assert resumed is not None
    assert resumed.value == "p2p"


@pytest.mark.parametrize(
    ("overrides", "legal"),
    [
        ((CP4, *heads(6, 6)), "1, 2, 3, 6"),
        ((CP4, *heads(12, 6)), "1, 2, 3, 6, 12"),  # each key head is sent to two of twelve processes
        ((CP8, *heads(4, 4)), "1, 2, 4"),
    ],
)
def test_heads_that_cannot_be_divided_are_refused(overrides: tuple[str, ...], legal: str) -> None:
    message = f"a2a gives each of .* legal context_parallel_size: {legal}; or write all_gather or null"
    with pytest.raises(MegatronWrapError, match=message):
        check_configuration(load_run_config(RUN, (*overrides, BY_HEADS)))
