"""A language model as lm-evaluation-harness asks for it: texts in; log-likelihoods and answers out.

Tokens, special tokens, windows and stop sequences are those of the harness's own Hugging Face and vLLM models. Who computes is given.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import jinja2
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerBase

from rlhf_core.engines.rollout.requests import SamplingSettings

MAX_GEN_TOKS = 256  # of a task that says nothing, as in the harness
UNUSED = {"do_sample": (True, False), "num_beams": (1,), "use_cache": (True, False)}  # settings of tasks that have no further meaning here

Pair = tuple[list[int], list[int]]  # ids of a context, at least one, and of its continuation
Score = Callable[[list[Pair]], list[tuple[float, bool]]]  # log-likelihoods of continuations, and whether each token is the most likely one
Generate = Callable[[list[list[int]], SamplingSettings, tuple[int, ...]], list[list[int]]]  # prompts, settings, end tokens -> answers


class HarnessModel(TemplateLM):
    """The harness's interface to a model.

    Args:
        max_length: tokens of context and continuation together; longer contexts lose their beginning.
        score, generate: compute on tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, score: Score, generate: Generate):
        super().__init__()
        self.tokenizer, self.max_length = tokenizer, max_length
        self._score, self._generate = score, generate
        self._asked: list[tuple[str, int]] = []  # task and document of each request that is being computed
        self._cut: set[tuple[str, int]] = set()

    @property
    def truncated(self) -> Counter[str]:
        """Number of documents of each task whose context has lost its beginning."""
        return Counter(task for task, _ in self._cut)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: the one that begins texts, or else the one that ends them."""
        return self.eot_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text, with the special tokens that the tokenizer adds unless the text begins with them."""
        if add_special_tokens is None:
            add_special_tokens = not has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as the model's template writes it; without its system message if the template refuses that."""

        def rendered(messages: list[dict[str, str]]) -> str:
            how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
            return self.tokenizer.apply_chat_template(messages, tokenize=False, **how)

        try:
            return rendered(chat_history)
        except jinja2.exceptions.TemplateError:
            return rendered([message for message in chat_history if message["role"] != "system"])

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        self._asked = [(r.task_name, r.doc_id) for r in requests]
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Return the log-likelihood of each text, in windows in which every token is predicted once, after as much text as fits."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            how = {"prefix_token": self.prefix_token_id, "max_seq_len": self.max_length - 1, "context_len": 1}
            of_one = [make_disjoint_window(window) for window in get_rolling_token_windows(token_list=ids, **how)]
            windows += [(("", ""), *window) for window in of_one]
            owners += [number] * len(of_one)
        self._asked = [(requests[i].task_name, requests[i].doc_id) for i in owners]
        sums = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[owner] += logprob
        return sums

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = True, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(self._fitting(i, context, len(continuation)), continuation) for i, (_, context, continuation) in enumerate(requests)]
        return self._score(pairs)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return each answer's text before the first stop sequence. Requests with the same settings are sampled together."""
        self._asked = [(r.task_name, r.doc_id) for r in requests]
        by_settings: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_settings.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        texts: dict[int, str] = {}
        for numbers in by_settings.values():
            contexts = {number: requests[number].args[0] for number in numbers}
            texts |= zip(numbers, self._answers(contexts, requests[numbers[0]].args[1]), strict=True)
        return [texts[number] for number in range(len(requests))]

    def _answers(self, contexts: dict[int, str], given: dict[str, Any]) -> list[str]:
        settings, until = self._settings(given)
        prompts = [
            self._fitting(number, self.tok_encode(text) or [self.prefix_token_id], settings.max_new_tokens)
            for number, text in contexts.items()
        ]
        special = [
            ids[0] for text in settings.stop if len(ids := self.tok_encode(text, False)) == 1 and ids[0] in self.tokenizer.all_special_ids
        ]
        found = self._generate(prompts, settings, tuple(special))
        decoded = (self.tokenizer.decode(ids, skip_special_tokens=True) for ids in found)
        return [postprocess_generated_text(text, stop=until, think_end_token=None) for text in decoded]

    def _settings(self, given: dict[str, Any]) -> tuple[SamplingSettings, list[str]]:
        """Return how a task samples, and the texts at which an answer is cut.

        Raises:
            ValueError: a task asks for what engines here don't do, or for more tokens than there are.
        """
        kwargs = dict(normalize_gen_kwargs(given, MAX_GEN_TOKS))
        until = [text for text in handle_stop_sequences(kwargs.pop("until"), eos=None) if text]
        temperature, new = float(kwargs.pop("temperature", 0.0)), kwargs.pop("max_gen_toks")
        top_p, top_k = float(kwargs.pop("top_p", None) or 1.0), kwargs.pop("top_k", None)
        if unknown := sorted(key for key, value in kwargs.items() if value is not None and value not in UNUSED.get(key, ())):
            raise ValueError(f"generation_kwargs: expected temperature, top_p, top_k, until and max_gen_toks, got {unknown}; remove them")
        if new >= self.max_length:
            raise ValueError(
                f"evaluation.harness.max_length: expected more than the {new} tokens that an answer may have, got {self.max_length}; "
                "raise it, or lower max_gen_toks of the task"
            )
        settings = SamplingSettings(new, temperature, top_p=top_p, top_k=top_k if top_k and top_k > 0 else None, stop=tuple(until))
        eos = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
        return settings, handle_stop_sequences(until, eos=eos)

    def _fitting(self, number: int, context: list[int], behind: int) -> list[int]:
        """Return the end of a context that leaves room for so many tokens behind it, and note whether it is shorter.

        Raises:
            ValueError: no token would be left.
        """
        room = self.max_length - behind
        if room < 1:
            raise ValueError(
                f"evaluation.harness.max_length: expected more than the {behind} tokens of a continuation of {self._asked[number][0]}, "
                f"got {self.max_length}; raise it"
            )
        if len(context) > room:
            self._cut.add(self._asked[number])
        return context[-room:]
