"""Settings of scorers, and of how RL turns their scores into rewards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from rlhf_core.config.base import Fraction, Section

RESERVED_NAMES = ("score", "mean", "std")  # score_<name> and eval_<name> are columns of the curves
LABEL_SCORERS = ("exact_match", "number", "math", "code")  # kinds that compare the response with the prompt's label
SERVICE_FIELDS = ("concurrency", "retries", "request_timeout", "api_key_env", "api_key_file")  # of the kinds that ask a service
# Kind of scorer -> the fields that only some kinds have, and whether that kind requires them. Other kinds have none of these fields.
KIND_FIELDS: dict[str, dict[str, bool]] = {
    "reward_model": {"path": False, "label": False, "steps": False},
    "function": {"path": True},
    "regex": {"pattern": True},
    "length": {"target_length": True},
    "code": {"seconds": False, "memory_mib": False, "reward": False},
    "http": {"url": True, **dict.fromkeys(("dialect", "batch_size", *SERVICE_FIELDS), False)},
    "llm_judge": {
        **dict.fromkeys(("url", "model"), True),
        **dict.fromkeys(("mode", "scale", "criteria", "template", "max_answer_tokens", "request"), False),
        **dict.fromkeys(("budget_tokens", "budget_cost", "prices", *SERVICE_FIELDS), False),
    },
}
KEEP_TIMEOUT = ("code", "http", "llm_judge")  # kinds that end their own work at `timeout` and then return the scores that they have
GRACE = 10.0  # further seconds in which they return


class Criterion(Section):
    """A criterion of a rubric, which a response meets or not."""

    criterion: str = Field(min_length=1)  # what a response should do, in words
    weight: float = Field(default=1.0, gt=0)  # relative to those of the other criteria


class TokenPrices(Section):
    """Prices of a million tokens, in any currency."""

    input: float = Field(ge=0)  # of questions
    output: float = Field(ge=0)  # of answers


class ServiceAccess(Section):
    """How a service is asked: a scorer's or a teacher's."""

    concurrency: int = Field(default=16, ge=1, le=256)  # requests at the same time
    retries: int = Field(default=4, ge=0, le=20)  # of a request that fails
    request_timeout: float | None = Field(default=None, gt=0)  # seconds for a request, which is then retried; null: those of timeout
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")  # environment variable with the service's key
    api_key_file: str | None = None  # in its place: absolute path of a file with nothing but the key


class ScorerConfig(ServiceAccess):
    """One component of the reward; with weight 0 it is measured, not rewarded."""

    name: str = Field(pattern=r"^[A-Za-z0-9_]+$")  # in curves and reports
    kind: Literal[
        *(
            "reward_model",
            "function",
            "exact_match",
            "number",
            "math",
            "regex",
            "length",
            "judge",
            "code",
            "http",
            "llm_judge",
            "environment",
        )
    ]  # docs/scorers.md describes each
    weight: float = 1.0  # in the sum; below 0 it is a penalty, with 0 the score is only measured
    # initial: by mean and deviation of the SFT model's scores; running: of those so far
    normalization: Literal["initial", "running", "none"] = "none"
    path: str | None = None  # reward_model: a folder, null takes the chain's own; function: file.py:name or package.module:name
    members: int = Field(default=1, ge=1)  # reward_model: size of the ensemble; the score is the members' mean
    std_coef: float = Field(default=0.0, ge=0)  # reward_model: times the members' standard deviation, subtracted from their mean
    label: int | str | None = None  # reward_model: number or name of the label whose score counts, for a classifier with several
    # reward_model, a process reward model: the response's score from its steps' probabilities; null: min
    steps: Literal["min", "sum", "last"] | None = None
    pattern: str | None = None  # regex: 1 where it is found in the response, else 0
    target_length: int | None = Field(default=None, gt=0)  # length: tokens
    seconds: float | None = Field(default=None, gt=0)  # code: of computing, for a program with one input or all its asserts; null: 2
    memory_mib: int | None = Field(default=None, ge=1)  # code: address space of a program; null: 256
    reward: Literal["fraction", "all"] | None = None  # code: share of the tests passed, or 1 for all of them, else 0; null: fraction
    timeout: float = Field(default=60.0, gt=0)  # seconds for a step's responses
    dialect: Literal["items", "openrlhf"] = "items"  # http: items, or OpenRLHF's form of requests
    batch_size: int = Field(default=8, ge=1, le=1024)  # http: responses in a request
    model: str | None = Field(
        default=None, min_length=1
    )  # llm_judge: the model's name at its address; the fields below are of the same kind
    # llm_judge: one response at a time, by criteria, or two against each other
    mode: Literal["pointwise", "rubric", "pairwise", "head_to_head"] = "pointwise"
    scale: list[int] = Field(default=[1, 10], min_length=2, max_length=2)  # pointwise: worst and best score
    criteria: list[Criterion] | None = Field(default=None, min_length=1, max_length=64)  # rubric; null: those of the prompt's label
    template: str | None = None  # a file with the judge's instructions in place of the default; relative to the project's folder
    max_answer_tokens: int = Field(default=512, ge=1)  # llm_judge: of an answer
    request: dict[str, Any] = Field(default={})  # further keys of each request; null removes one of ours
    budget_tokens: int | None = Field(default=None, ge=1)  # of questions and answers, in all of a run
    budget_cost: float | None = Field(default=None, gt=0)  # in the currency of prices
    prices: TokenPrices | None = None
    url: str | None = None  # http, llm_judge: the service's address, of an llm_judge that before /chat/completions

    @property
    def is_own_reward_model(self) -> bool:
        """Whether the scorer is the reward model that the chain trains."""
        return self.kind == "reward_model" and self.path is None

    @property
    def aggregate(self) -> str:
        """How a process reward model's scores of steps make the response's."""
        return self.steps or "min"

    @property
    def reads_rendered(self) -> bool:
        """Whether the scorer reads the conversation as the policy's template renders it."""
        return self.kind == "http" and self.dialect == "openrlhf"

    @property
    def reads_label(self) -> bool:
        """Whether the scorer compares the response with the prompt's label, or takes criteria from it."""
        of_row = self.mode == "pairwise" or (self.mode == "rubric" and self.criteria is None)
        return self.kind in LABEL_SCORERS or (self.kind == "llm_judge" and of_row)

    @property
    def asked_with(self) -> dict[str, Any]:
        """The fields that a judge's verdicts depend on, beside its template's text."""
        return self.model_dump(include={"url", "model", "mode", "scale", "criteria", "max_answer_tokens", "request"})

    @property
    def subject(self) -> str:
        """The scorer in messages."""
        return f"scorer {self.name}"

    @property
    def is_rewarded_judge(self) -> bool:
        """Whether the scorer is a language model that judges, and what it says is learned from."""
        return self.kind == "llm_judge" and self.weight != 0

    @property
    def deadline(self) -> float:
        """Seconds after which a step of RL gives a call up. A scorer that keeps `timeout` itself returns before."""
        return self.timeout + GRACE * (self.kind in KEEP_TIMEOUT)

    def conflicts(self) -> Iterator[str]:
        own = KIND_FIELDS.get(self.kind, {})
        for field in dict.fromkeys(name for fields in KIND_FIELDS.values() for name in fields):
            given = getattr(self, field)
            if given != type(self).model_fields[field].default and field not in own:
                yield f"{field}: expected none for a scorer of kind {self.kind}, got {given!r}; remove it"
            if given is None and own.get(field):
                yield f"{field}: expected a value for a scorer of kind {self.kind}, got none; set it"
        if self.members > 1 and self.kind != "reward_model":
            yield f"members: expected 1 for a scorer of kind {self.kind}, got {self.members}; only reward models are ensembles"
        if self.std_coef and self.members == 1:
            yield f"std_coef: expected 0 with one member, got {self.std_coef}; raise members or set it to 0"
        if self.url is not None:
            yield from service_conflicts(self, self.url)
        if self.kind == "llm_judge":
            yield from self._judge_conflicts()
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                yield f"pattern: expected a regular expression, got {self.pattern!r} ({error}); correct it"

    def _judge_conflicts(self) -> Iterator[str]:
        """Conflicts of the fields of kind llm_judge."""
        if self.scale[0] >= self.scale[1]:
            yield f"scale: expected the worst and then a higher best score, got {self.scale}; correct it"
        if self.mode != "pointwise" and self.scale != type(self).model_fields["scale"].default:
            yield f"scale: expected none with mode {self.mode}, got {self.scale}; remove it"
        if self.mode != "rubric" and self.criteria is not None:
            yield f"criteria: expected none with mode {self.mode}, got {len(self.criteria)}; remove them, or set mode to rubric"
        if self.budget_cost is not None and self.prices is None:
            yield f"prices: expected those of the model with budget_cost={self.budget_cost}, got none; add them, or take budget_tokens"
        if taken := sorted({"messages", "model", "stream", "n"} & self.request.keys()):
            yield f"request: expected other keys than those of the question, got {taken}; remove them"


class TeacherService(ServiceAccess):
    """A teacher of rl.distillation at an OpenAI-compatible address that returns log-probabilities of prompts, as vLLM's does."""

    url: str  # before /completions
    model: str = Field(min_length=1)  # its name there
    timeout: float = Field(default=300.0, gt=0)  # seconds for a step's responses

    @property
    def subject(self) -> str:
        """The teacher in messages."""
        return f"teacher {self.model}"

    def conflicts(self) -> Iterator[str]:
        yield from service_conflicts(self, self.url)


def service_conflicts(config: ScorerConfig | TeacherService, url: str) -> Iterator[str]:
    """Conflicts of the fields of a service."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and "#" not in url and "@" not in parts.netloc
    except ValueError:  # of the port or of an IPv6 address
        usable = False
    if not usable or not url.isascii() or any(c.isspace() for c in url):
        yield f"url: expected http:// or https:// with a host, without a password or #, got {url!r}; correct it"
    if config.api_key_env and config.api_key_file:
        yield f"api_key_file: expected none with api_key_env={config.api_key_env}, got {config.api_key_file!r}; remove one of them"
    if config.api_key_file and not config.api_key_file.startswith(("/", "~/")):
        yield f"api_key_file: expected an absolute path outside the project, got {config.api_key_file!r}; correct it"
    if config.request_timeout is not None and config.request_timeout >= config.timeout:
        yield f"request_timeout: expected less than timeout={config.timeout}, got {config.request_timeout}; lower it, or set it to null"


def name_conflicts(scorers: list[ScorerConfig]) -> Iterator[str]:
    """The conflicts of a list of scorers, of which each needs a name of its own."""
    names = [s.name for s in scorers]
    if len(set(names)) < len(names):
        yield f"scorers: expected different names, got {names}; rename one"
    if taken := [name for name in names if name in RESERVED_NAMES]:
        yield f"scorers: expected names other than {list(RESERVED_NAMES)}, which the curves use, got {taken}; rename them"


def weight_conflicts(scorers: list[ScorerConfig]) -> Iterator[str]:
    """The conflict of a list of scorers to learn from whose weights are all 0."""
    if not any(s.weight for s in scorers):
        yield "scorers: expected one with a weight other than 0, got none; nothing would be learned"


def raw_scorer_conflicts(scorers: list[ScorerConfig]) -> Iterator[str]:
    """Conflicts of a list of scorers whose weighted sum only ranks responses."""
    yield from name_conflicts(scorers)
    yield from weight_conflicts(scorers)
    if normalized := [s.name for s in scorers if s.normalization != "none"]:
        yield f"scorers: expected normalization none, got another one for {normalized}; the scores are only compared here"


class OverlongConfig(Section):
    """DAPO's soft penalty, which rises linearly from 0 at max_new_tokens - buffer tokens to `penalty` at max_new_tokens."""

    buffer: int = Field(gt=0)  # tokens before max_new_tokens in which the penalty grows from 0
    penalty: float = Field(gt=0)  # at max_new_tokens


class ScoreConfig(Section):
    """The reward of RL.

    scorers: RL needs one with a weight. By default the evaluation has the same; without any it scores nothing.
    """

    scorers: list[ScorerConfig]
    normalization_samples: int = Field(ge=16)  # responses of the SFT model that are scored first, for normalization initial
    clip: float | None = Field(gt=0)
    no_eos_penalty: float = Field(ge=0)
    mask_truncated: bool
    overlong: OverlongConfig | None = None
    max_unscored_fraction: float = Fraction

    @property
    def rewarded(self) -> list[ScorerConfig]:
        """The scorers with a weight."""
        return [s for s in self.scorers if s.weight]

    @property
    def own_reward_models(self) -> list[ScorerConfig]:
        """The rewarded scorers that are the chain's own reward model."""
        return [s for s in self.rewarded if s.is_own_reward_model]

    def conflicts(self) -> Iterator[str]:
        yield from name_conflicts(self.scorers)
