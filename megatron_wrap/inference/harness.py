"""The adapter for lm-evaluation-harness (extra `eval`): scores and generates with a model on any layout.

    model = HarnessModel(wrap)
    results = lm_eval.simple_evaluate(model, tasks=["arc_easy"])

Every process runs the same program. A model is one worker for the harness, however many processes compute it, so every
process has all requests; results are on local rank 0 of each node.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, maybe_truncate, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron_wrap.config.schema import derived
from megatron_wrap.core.wrap import MegatronWrap
from megatron_wrap.errors import ConfigError, DataError
from megatron_wrap.evaluation.scoring import Score, score_continuations
from megatron_wrap.generation.generate import generate
from megatron_wrap.generation.sampling import SamplingRule
from megatron_wrap.inference.trained_model import read_model
from megatron_wrap.utils.progress import WorkProgress

NAME = "megatron_wrap"
"""Name of the model in the registry of lm-evaluation-harness."""
_MAX_GEN_TOKS = 256
"""Number of new tokens of requests that set none, as in the harness's model `hf`."""
_SUPPORTED = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}
_NEUTRAL: dict[str, Any] = {"num_beams": 1, "repetition_penalty": 1.0}
"""Further generation options -> the value that has no effect. Other values are refused."""

TokenRequest = tuple[tuple[str, str] | None, list[int], list[int]]
"""(context and continuation as text, or None; tokens of the context; tokens of the continuation)."""


@register_model(NAME)
class HarnessModel(TemplateLM):
    """A model for lm-evaluation-harness, with the tokenization of the harness's model `hf`. Collective over all ranks.

    Args:
        pretrained: a run with a model and a tokenizer, or the source of one (see `read_model`), which is started.
        batch_size: sequences in one forward pass of a replica.

    Raises:
        ConfigError: the model has no tokenizer, or returns scores instead of logits.
    """

    def __init__(self, pretrained: MegatronWrap | str, batch_size: int | str = 8) -> None:
        super().__init__()
        if isinstance(pretrained, str):
            pretrained = MegatronWrap(read_model(pretrained))
            pretrained.initialize()
            pretrained.setup_model()
        if pretrained.tokenizer is None:
            raise ConfigError("eval: the model has no tokenizer; give one with megatron_wrap.data.tokenizer=FOLDER")
        if derived.has_value_head(pretrained.config):
            raise ConfigError("eval: a model with a value head returns scores instead of log-probabilities")
        self._wrap = pretrained
        self.tokenizer = pretrained.tokenizer
        self.batch_size = int(batch_size)

    @property
    def eot_token_id(self) -> int:
        """Id of the tokenizer's end token."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Id of the token that precedes a text without a context."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def max_length(self) -> int:
        """Largest number of tokens of a sequence: the model's positions, else the length of its training."""
        config = self._wrap.config
        return derived.max_position_embeddings(config.arch, config.train.seq_length)

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for the harness's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text; special tokens are added unless it begins with the first one."""
        if add_special_tokens is None:
            begins = has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))
            return self.tokenizer.encode(string, **({"add_special_tokens": False} if begins else {}))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(self, requests: Sequence[TokenRequest], **kwargs: Any) -> list[tuple[float, bool]]:
        """(log-probability, whether greedy decoding returns it) of each continuation; a long context loses its first
        tokens."""
        scores = self._scores([(context, continuation) for _, context, continuation in requests])
        answers = [(score.log_prob, score.is_greedy) for score in scores]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _scores(self, pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        pairs = list(pairs)
        longest = max((len(following) for _, following in pairs), default=0)
        if longest > self.max_length:
            raise DataError(f"eval: a continuation has {longest} tokens, more than the model's {self.max_length}")
        # the last token is only predicted, so a sequence may have one more than the model's positions
        sequences = [([*context, *following][-(self.max_length + 1) :], len(following)) for context, following in pairs]
        return score_continuations(self._wrap.state, sequences, self.batch_size)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text, in windows of `max_length` tokens."""
        sizes = {"prefix_token": self.prefix_token_id, "max_seq_len": self.max_length, "context_len": 1}
        rolling = (get_rolling_token_windows(self.tok_encode(request.args[0]), **sizes) for request in requests)
        windows = [[make_disjoint_window(window) for window in of_text] for of_text in rolling]
        scores = iter(self._scores(window for of_text in windows for window in of_text))
        sums = [sum(next(scores).log_prob for _ in of_text) for of_text in windows]
        for request, log_prob in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, log_prob)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """A completion of each context, cut before the first of its stop texts."""
        by_options: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_options.setdefault(repr(request.args[1]), []).append(index)
        texts = [""] * len(requests)
        for indices in by_options.values():
            contexts = [requests[index].args[0] for index in indices]
            for index, text in zip(indices, self._complete(contexts, requests[indices[0]].args[1]), strict=True):
                texts[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return texts

    def _complete(self, contexts: Sequence[str], options: dict[str, Any]) -> list[str]:
        normalized: dict[str, Any] = dict(normalize_gen_kwargs(options, _MAX_GEN_TOKS))
        unknown = {name: value for name, value in normalized.items() if name not in _SUPPORTED}
        unknown = {name: value for name, value in unknown.items() if _NEUTRAL.get(name, object()) != value}
        if unknown:
            raise ConfigError(
                f"eval: generation options that are not supported: {unknown}; the supported ones are "
                f"{', '.join(sorted(_SUPPORTED))}"
            )
        end = None if self.eot_token_id is None else self.tokenizer.decode(self.eot_token_id)
        until = [text for text in handle_stop_sequences(normalized["until"], eos=end) if text]
        # the text of a completion has no special tokens, so a stop text that is one is a stop token
        token_ids = [self.tokenizer.convert_tokens_to_ids(text) for text in until]
        special = [token for token in token_ids if token in self.tokenizer.all_special_ids]
        most = normalized["max_gen_toks"]
        if most >= self.max_length:
            raise ConfigError(
                f"eval: {most} new tokens leave no room for a prompt in the model's {self.max_length}; lower "
                "max_gen_toks with --gen-kwargs"
            )
        prompts = [maybe_truncate(self.tok_encode(text), most, self.max_length)[0] for text in contexts]
        temperature = normalized.get("temperature", 0.0) if normalized["do_sample"] else 0.0
        rule = SamplingRule(temperature, normalized.get("top_k") or None, normalized.get("top_p"))
        seed = self._wrap.config.train.seed
        with WorkProgress("generation", len(prompts), "prompt") as progress:
            completions = generate(
                self._wrap.state,
                self.tokenizer,
                prompts,
                most,
                rule,
                seed,
                [*until, *special],
                self.batch_size,
                caller="eval",
                progress=progress,
            )
        return [completion["text"] or "" for completion in completions]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of messages. A template that refuses a system message gets none, as in the harness's model `hf`."""
        for messages in (chat_history, [message for message in chat_history if message["role"] != "system"]):
            try:
                return self.tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            except TemplateError as error:
                refusal = error
        raise ConfigError(f"eval: the chat template refuses the messages: {refusal}")

    def get_model_info(self) -> dict[str, Any]:
        """Information about the model, for the results."""
        dtype = self._wrap.state.transformer_config.params_dtype
        return {"model_layout": str(self._wrap.state.parallel.layout), "model_dtype": str(dtype)}
