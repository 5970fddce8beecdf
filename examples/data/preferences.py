"""Preference pairs and single answers made from the conversations: a docstring, and the same words in random order."""

import hashlib


def make_pairs(conversations: list[dict]) -> list[dict]:
    """`{"prompt": [user], "chosen": [assistant], "rejected": [assistant]}` for each conversation, in the same order."""
    pairs = []
    for sample in conversations:
        question, answer = sample["messages"]
        worse = {**answer, "content": disordered(answer["content"])}
        pairs.append({"prompt": [question], "chosen": [answer], "rejected": [worse]})
    return pairs


def make_answers(pairs: list[dict]) -> list[dict]:
    """`{"prompt", "completion", "label"}` for each pair: its chosen answer, or its rejected one, in turn."""
    return [
        {"prompt": pair["prompt"], "completion": pair["rejected" if index % 2 else "chosen"], "label": index % 2 == 0}
        for index, pair in enumerate(pairs)
    ]


def disordered(text: str) -> str:
    """The words of a text in the order of a hash of each word and its position; no text of two words stays as it is."""
    words = text.split()
    order = sorted(range(len(words)), key=lambda index: hashlib.sha256(f"{index} {words[index]}".encode()).digest())
    changed = [words[index] for index in order]
    return " ".join(changed if changed != words else changed[::-1])
