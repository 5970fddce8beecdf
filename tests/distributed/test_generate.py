"""wrap.generate: greedy completions equal those of transformers, token for token, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import _bridge_runs
import _generate_runs as runs
import pytest
from _covering import covering, family_and_axes, quick


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """original(family) -> its folder and transformers' greedy completions; each is created once."""
    return _bridge_runs.made_once(tmp_path_factory, runs.expected_greedy)


@pytest.mark.parametrize(("family", "layout"), covering(runs.CASES, family_and_axes))
def test_greedy_completions_equal_those_of_transformers(family, layout, ranks, original, tmp_path):
    folder, expected = original(family)
    world_size, overrides = runs.LAYOUTS[layout]
    calls = [{"prompts": runs.prompts(), "max_new_tokens": runs.NEW_TOKENS, "batch_size": size} for size in (8, 2)]
    for at_once, in_batches in ranks(world_size).run(runs.generate, str(folder), overrides, str(tmp_path), calls):
        assert [completion["token_ids"] for completion in at_once] == expected
        assert in_batches == at_once
        assert {completion["finish_reason"] for completion in at_once} == {"length"}


STEPPED = [
    *(("llama-four-layers", layout) for layout in ("one", "tp2-pp2", "pp2-vpp2", "cp2-tp2")),
    *(("deepseek-v2", layout) for layout in ("one", "tp2-pp2")),
    *(("mistral-window", layout) for layout in ("tp2-sp", "cp2")),
    ("gpt2", "one"),
]
PADDINGS = {"equal": [0, 0], "padded": [5, 0]}


@pytest.mark.parametrize(
    ("family", "layout", "padding"), covering((*case, padding) for padding in PADDINGS for case in STEPPED)
)
def test_logits_of_each_step_agree_with_one_pass_over_the_full_sequence(
    family, layout, padding, ranks, original, tmp_path
):
    folder, _ = original(family)
    world_size, overrides = runs.LAYOUTS[layout]
    actual = ranks(world_size).run(runs.cached_and_recomputed, str(folder), overrides, str(tmp_path), PADDINGS[padding])
    for differences in actual:
        assert all(difference <= 1e-4 for difference in differences)
        assert not differences or len(differences) == 18


@pytest.mark.parametrize(
    ("family", "padding"),
    [("llama", "padded"), *covering([("llama", "equal"), ("gpt2", "padded"), ("qwen3", "padded")])],
)
def test_passes_of_constant_shapes_agree_with_one_pass_over_the_full_sequence(
    family, padding, ranks, original, tmp_path
):
    folder, _ = original(family)
    [differences] = ranks(1).run(runs.with_constant_shapes, str(folder), (), str(tmp_path), PADDINGS[padding])
    assert len(differences) == 18
    assert all(difference <= 1e-4 for difference in differences)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", "dp2"),
        *(pytest.param(*case, marks=pytest.mark.matrix) for case in (("mixtral", "ep2"), ("gpt2", "tp2-pp2"))),
    ],
)
def test_several_completions_of_a_prompt_share_its_first_pass(family, layout, ranks, original, tmp_path):
    folder, expected = original(family)
    world_size, overrides = runs.LAYOUTS[layout]
    drawn = {"max_new_tokens": 6, "temperature": 1.2, "seed": 7}
    calls = [
        {"prompts": runs.prompts(), "n": 3, "max_new_tokens": 6, "batch_size": 4},
        {"prompts": runs.prompts(2), "n": 3, **drawn},
        {"prompts": [prompt for prompt in runs.prompts(2) for _ in range(3)], "batch_size": 1, **drawn},
    ]
    for greedy, several, alone in ranks(world_size).run(runs.generate, str(folder), overrides, str(tmp_path), calls):
        assert [completion["token_ids"] for completion in greedy] == [ids[:6] for ids in expected for _ in range(3)]
        assert several == alone
        assert len({tuple(completion["token_ids"]) for completion in several}) == 6


@pytest.mark.parametrize(
    "layouts",
    [["pp2", "dp2", "ep2-tp2"], pytest.param(["ep2-cp2"], marks=pytest.mark.matrix)],
    ids="+".join,
)
def test_sampled_tokens_depend_on_the_seed_and_not_on_layout_batch_or_other_prompts(layouts, ranks, original, tmp_path):
    folder, greedy = original("mixtral")
    sampled = {"max_new_tokens": 6, "temperature": 1.2, "top_p": 0.95, "top_k": 40, "seed": 7}
    calls: list[dict[str, Any]] = [
        {"prompts": runs.prompts(), **sampled},
        {"prompts": runs.prompts(), **sampled, "batch_size": 2},
        {"prompts": runs.prompts(3), **sampled},
        {"prompts": runs.prompts(), **sampled, "seed": 8},
        {"prompts": runs.prompts(), **sampled, "top_k": 1},
    ]
    actual = {}
    for layout in ("one", *layouts):
        world_size, overrides = runs.LAYOUTS[layout]
        first, *others = ranks(world_size).run(runs.generate, str(folder), overrides, str(tmp_path / layout), calls)
        assert all(other == first for other in others)
        actual[layout] = first
    assert all(of_layout == actual["one"] for of_layout in actual.values())
    whole, in_batches, fewer, other_seed, most_probable = actual["one"]
    assert in_batches == whole
    assert fewer == whole[:3]
    assert all(ours["token_ids"] != theirs["token_ids"] for ours, theirs in zip(whole, other_seed, strict=True))
    assert [completion["token_ids"] for completion in most_probable] == [ids[:6] for ids in greedy]


@pytest.mark.parametrize(
    ("family", "layout"),
    [("llama", "one"), ("llama", "tp2-pp2"), pytest.param("mixtral", "ep2-cp2", marks=pytest.mark.matrix)],
)
def test_log_probs_of_sampled_tokens_are_those_of_transformers(family, layout, ranks, original, tmp_path):
    folder, _ = original(family)
    world_size, overrides = runs.LAYOUTS[layout]
    sampled = {"prompts": runs.prompts(), "max_new_tokens": 6, "temperature": 1.2, "top_k": 40, "log_probs": True}
    calls = [sampled, {**sampled, "batch_size": 2}]
    for at_once, in_batches in ranks(world_size).run(runs.generate, str(folder), overrides, str(tmp_path), calls):
        expected = runs.expected_log_probs(folder, [completion["token_ids"] for completion in at_once])
        for completion, other, values in zip(at_once, in_batches, expected, strict=True):
            assert completion["log_probs"] == pytest.approx(values, abs=1e-5)
            assert other["token_ids"] == completion["token_ids"]
            assert other["log_probs"] == pytest.approx(values, abs=1e-5)


@pytest.mark.parametrize("layout", quick(["one", "dp2", "tp2-pp2"], ["tp2-pp2"]))
def test_prompts_passed_on_rank_0_only_are_completed_on_every_rank(layout, ranks, original, tmp_path):
    folder, expected = original("llama")
    world_size, overrides = runs.LAYOUTS[layout]
    for actual in ranks(world_size).run(runs.from_rank_0, str(folder), overrides, str(tmp_path)):
        assert [completion["token_ids"] for completion in actual] == expected


@pytest.mark.parametrize(
    ("family", "layout"), [pytest.param("llama", "one", marks=pytest.mark.matrix), ("llama", "dp2"), ("mixtral", "ep2")]
)
def test_end_tokens_of_generation_config_end_a_completion_as_in_transformers(family, layout, ranks, original, tmp_path):
    import json
    import shutil

    folder, greedy = original(family)
    ended = tmp_path / "ended"
    shutil.copytree(folder, ended)
    ends = [greedy[0][4], greedy[2][7]]  # replicas end after different numbers of tokens
    (ended / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    expected = runs.expected(ended, runs.NEW_TOKENS)
    assert expected[0][-1] == ends[0]
    assert len(expected[0]) <= 5
    assert len({len(ids) for ids in expected}) > 1
    world_size, overrides = runs.LAYOUTS[layout]
    calls = [
        {"prompts": runs.prompts(), "max_new_tokens": runs.NEW_TOKENS, "batch_size": 2},
        {"prompts": runs.prompts(), "max_new_tokens": runs.NEW_TOKENS, "stop": [greedy[4][1]]},
    ]
    for actual, stopped in ranks(world_size).run(runs.generate, str(ended), overrides, str(tmp_path / "out"), calls):
        assert [completion["token_ids"] for completion in actual] == expected
        for completion in actual:
            assert (completion["finish_reason"] == "stop") == (completion["token_ids"][-1] in ends)
        assert len(stopped[4]["token_ids"]) <= 2
        assert stopped[4]["finish_reason"] == "stop"


@pytest.fixture(scope="module")
def with_text(tmp_path_factory) -> Path:
    folder = _bridge_runs.make_folder("llama", tmp_path_factory.mktemp("with_text"))
    runs.write_tokenizer(folder)
    return folder


def test_texts_and_messages_are_completed_as_in_transformers_and_end_before_a_stop_text(with_text, ranks, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(with_text, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(with_text)
    chat = [{"role": "user", "content": "hello"}]
    prompts = ["It was", chat]
    texts, ids = [], []
    for encoded in (
        tokenizer(prompts[0], return_tensors="pt"),
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True),
    ):
        output = model.generate(**encoded, max_new_tokens=40, do_sample=False, pad_token_id=0, eos_token_id=256)
        ids.append(output[0, encoded["input_ids"].shape[1] :].tolist())
        texts.append(tokenizer.decode(ids[-1], skip_special_tokens=True))
    letter = next(letter for letter in texts[0][2:] if letter.isascii() and letter not in texts[0][:2])
    calls = [{"prompts": prompts, "max_new_tokens": 40}, {"prompts": prompts[:1], "max_new_tokens": 40, "stop": letter}]
    [(actual, stopped)] = ranks(1).run(runs.generate, str(with_text), (), str(tmp_path), calls)
    assert [(completion["token_ids"], completion["text"]) for completion in actual] == list(
        zip(ids, texts, strict=True)
    )
    [completion] = stopped
    assert completion["text"] == texts[0][: texts[0].index(letter)]
    assert completion["finish_reason"] == "stop"
    assert completion["token_ids"] == ids[0][: len(completion["token_ids"])]
    assert letter in tokenizer.decode(completion["token_ids"])
    assert letter not in tokenizer.decode(completion["token_ids"][:-1])


@pytest.mark.parametrize("layout", quick(["one", "tp2-pp2"], ["tp2-pp2"]))
def test_an_evaluation_logs_completions_of_the_sample_prompts(layout, with_text, ranks, tmp_path):
    world_size, overrides = runs.LAYOUTS[layout]
    prompts = ["It was", [{"role": "user", "content": "hello"}]]
    lines, completions = ranks(world_size).run(
        runs.samples_at_evaluation, str(with_text), overrides, str(tmp_path), prompts
    )[0]
    assert len(lines) == 2
    for line, prompt, completion in zip(lines, ["It was", "user: hello"], completions, strict=True):
        assert f"iteration 0, sample of {prompt!r}: {completion['text']!r}" in line


@pytest.mark.parametrize("layout", quick(["one", "tp2-sp", "pp2-vpp2", "cp2-tp2", "dp2-overlap"], ["tp2-sp"]))
def test_generation_between_steps_does_not_change_training(layout, ranks, original, tmp_path):
    folder, _ = original("llama-four-layers")
    world_size, overrides = runs.LAYOUTS[layout]
    pool = ranks(world_size)
    without, with_generation = (
        pool.run(runs.train_with_generation, str(folder), overrides, str(tmp_path / str(generates)), generates)
        for generates in (False, True)
    )
    assert with_generation == without


def test_errors_of_generate_have_values_and_a_suggestion(ranks, original, tmp_path):
    folder, _ = original("gpt2")
    long, no_prompt = [[1, 2], [3] * 70], "a prompt is a text, a list of messages or a list of token ids, not"
    messages: list[tuple[dict[str, Any], str]] = [
        (
            {"prompts": long, "max_new_tokens": 11},
            "prompt 1 has 70 tokens, which with max_new_tokens 11 is more than the model's 80 learned positions",
        ),
        ({"prompts": long, "max_new_tokens": 10}, "no error"),
        ({"prompts": ["It was"]}, "a prompt of text needs a tokenizer; set megatron_wrap.data.tokenizer"),
        ({"prompts": "It was"}, "prompts is one text"),
        ({"prompts": [[]]}, no_prompt),
        ({"prompts": [[1, 301]]}, "has the token id 301, but the vocabulary has the ids 0 to 300"),
        ({"prompts": [[1, "a"]]}, no_prompt),
        ({"prompts": [[1]], "max_new_tokens": 0}, "max_new_tokens 0 must be at least 1"),
        ({"prompts": [[1]], "seed": -1}, "seed -1 must be at least 0"),
        ({"prompts": [[1]], "batch_size": 0}, "batch_size 0 must be at least 1"),
        ({"prompts": [[1]], "stop": "x"}, "a stop text needs a tokenizer"),
        ({"prompts": [[1]], "top_p": 2.0}, "top_p 2.0 must be above 0 and at most 1"),
        ({"prompts": []}, "no error"),
    ]
    [actual] = ranks(1).run(runs.refusals, str(folder), (), str(tmp_path), [call for call, _ in messages])
    for message, (_, part) in zip(actual, messages, strict=True):
        assert part in message


def test_a_pipeline_in_half_precision_generates_the_same_as_one_process(ranks, original, tmp_path):
    folder, _ = original("llama-four-layers")
    calls = [{"prompts": runs.prompts(), "max_new_tokens": runs.NEW_TOKENS}]
    actual = []
    for layout in ("one", "pp2-vpp2"):
        world_size, overrides = runs.LAYOUTS[layout]
        bf16 = (*overrides, "megatron_lm.train.dtype.__select__=bf16")
        actual += ranks(world_size).run(runs.generate, str(folder), bf16, str(tmp_path / layout), calls)
    assert all(completions == actual[0] for completions in actual)
