"""Trained models on parallel layouts: lm-evaluation-harness and conversations give what transformers gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import _bridge_runs
import _generate_runs
import _inference_runs as runs
import pytest
from _covering import quick

LAYOUTS = quick(["one", "tp2", "tp2-pp2", "cp2-dp2", "pp2-vpp2"], ["tp2"])
CHOICE = """\
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
TEXT = """\
task: local_text
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/questions.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
"""
LONG = " five or six or seven or eight or nine"
QUESTIONS = [
    {
        "question": "Two and two is",
        "choices": [" three", " four", LONG],
        "answer": 1,
        "text": "It was. " * 8,
    },
    {"question": "Was it? ", "choices": ["no", "yes"], "answer": 0, "text": "Once"},
    {"question": "", "choices": ["begins", "with nothing"], "answer": 0, "text": "A text of middle length."},
]
GENERATIONS: list[tuple[str, dict[str, Any]]] = [
    ("It was", {"until": ["\n\n"], "max_gen_toks": 10}),
    ("Once upon a time", {"until": ["\n\n"], "max_gen_toks": 10}),
    ("It was", {"until": [], "max_gen_toks": 5, "do_sample": False}),
    ("Once upon a time there was a context that is cut. ", {"until": ["<|end|>"], "max_gen_toks": 10}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = _bridge_runs.make_folder("llama-four-layers", tmp_path_factory.mktemp("model"))
    _generate_runs.write_tokenizer(made)
    config = json.loads((made / "config.json").read_text())
    # fewer than some texts have, which the harness splits into windows, or cuts on the left
    (made / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 48}))
    return made


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("tasks")
    (made / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    for name, text in (("choice", CHOICE), ("text", TEXT)):
        (made / f"{name}.yaml").write_text(text.replace("FOLDER", str(made)))
    return made


@pytest.fixture(scope="module")
def expected(folder, tasks, tmp_path_factory) -> Any:
    """What the harness's own model of transformers gives."""
    from lm_eval.models.huggingface import HFLM

    model = HFLM(str(folder), device="cpu", dtype="float32", batch_size=2)
    return runs.answers(model, str(tasks), GENERATIONS)


def log_probs(results: dict[str, Any]) -> list[float]:
    """Every log-probability of the results."""
    samples = results["samples"]
    choices = [response[0][0] for sample in samples["local_choice"] for response in sample["resps"]]
    return choices + [sample["resps"][0][0] for sample in samples["local_text"]]


def are_greedy(results: dict[str, Any]) -> list[bool]:
    return [bool(response[0][1]) for sample in results["samples"]["local_choice"] for response in sample["resps"]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_harness_scores_and_generates_as_with_transformers(layout, ranks, folder, tasks, expected):
    world_size, overrides = _generate_runs.LAYOUTS[layout]
    results, texts = expected
    arguments = (str(folder), overrides, str(tasks), GENERATIONS)
    for actual, actual_texts in ranks(world_size).run(runs.harness_answers, *arguments):
        assert log_probs(actual) == pytest.approx(log_probs(results), abs=1e-4)
        assert are_greedy(actual) == are_greedy(results)
        assert actual["results"]["local_choice"]["acc,none"] == results["results"]["local_choice"]["acc,none"]
        assert actual_texts == texts


@pytest.mark.parametrize("layout", quick(["one", "tp2-pp2", "dp2"], ["tp2-pp2"]))
def test_a_conversation_is_that_of_transformers(layout, ranks, folder):
    world_size, overrides = _generate_runs.LAYOUTS[layout]
    lines = ["hello", "and more", "", "/reset", "hello"]
    system = {"role": "system", "content": "Be brief."}
    first = {"role": "user", "content": "hello"}
    complete = _greedy(folder)
    answer = complete([system, first])
    second = complete(
        [system, first, {"role": "assistant", "content": answer}, {"role": "user", "content": "and more"}]
    )
    written, rows = ranks(world_size).run(runs.conversation, str(folder), overrides, lines, "Be brief.")[0]
    assert written == f"{answer}\n{second}\n{answer}\n"
    assert [row["completion"] for row in rows] == [complete("It was"), answer]
    assert rows[0]["id"] == 1


def _greedy(folder: Path) -> Any:
    """transformers' completion of a text or messages, of 12 tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def complete(prompt: str | list[dict[str, str]]) -> str:
        text = prompt if isinstance(prompt, str) else _rendered(tokenizer, prompt)
        encoded = tokenizer(text, return_tensors="pt", add_special_tokens=isinstance(prompt, str))
        output = model.generate(**encoded, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=256)
        return tokenizer.decode(output[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True)

    return complete


def _rendered(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
