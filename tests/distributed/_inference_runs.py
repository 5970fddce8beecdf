"""Functions that the tests of trained models run on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def opened(source: str, overrides: Sequence[str]) -> Iterator[Any]:
    """The model of a folder or checkpoint, set up on the layout of `overrides`, as a command does it."""
    import torch.distributed

    from megatron_wrap.core import MegatronWrap
    from megatron_wrap.inference.trained_model import read_model

    platform = "megatron_wrap.init.platform=cpu"
    with MegatronWrap(read_model(source, [platform, *overrides], torch.distributed.get_world_size())) as wrap:
        wrap.initialize()
        wrap.setup_model()
        yield wrap


def harness_answers(
    source: str, overrides: tuple[str, ...], tasks: str, generations: Sequence[tuple[str, dict[str, Any]]]
) -> tuple[dict[str, Any], list[str]]:
    """Results of lm-evaluation-harness, and its completions of (context, options)."""
    from megatron_wrap.inference.harness import HarnessModel

    with opened(source, overrides) as wrap:
        return answers(HarnessModel(wrap, batch_size=3), tasks, generations)


def answers(model: Any, tasks: str, generations: Sequence[tuple[str, dict[str, Any]]]) -> Any:
    """The same of any model of the harness."""
    from lm_eval.api.instance import Instance
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=tasks, include_defaults=False)
    results = evaluate(model, manager.load(["local_choice", "local_text"]), log_samples=True, bootstrap_iters=0)
    requests = [
        Instance("generate_until", {}, (text, dict(options)), index)
        for index, (text, options) in enumerate(generations)
    ]
    return results, model.generate_until(requests)


def conversation(
    source: str, overrides: tuple[str, ...], lines: Sequence[str], system: str | None
) -> tuple[str, list[dict[str, Any]]]:
    """What is written while the lines are typed, and the completions of rows of prompts."""
    from megatron_wrap.inference.chat import Conversation, Sampling, complete_rows, talk

    typed, written = iter(lines), []
    sampling = Sampling(max_new_tokens=12)
    read: Callable[[], str | None] = lambda: next(typed, None)  # noqa: E731
    with opened(source, overrides) as wrap:
        talk(Conversation(wrap, sampling, system), read, written.append, wrap.state.parallel.world.rank)
        rows = [{"prompt": "It was", "id": 1}, {"messages": [{"role": "user", "content": "hello"}]}]
        return "".join(written), complete_rows(wrap, rows, sampling, system)
