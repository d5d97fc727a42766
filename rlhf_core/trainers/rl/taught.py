"""Teachers at an address in RL: what they answer of a step's responses, asked for while other work goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rlhf_core.config import DistillationConfig
from rlhf_core.progress import Reasons
from rlhf_core.scorers.teacher import Said, TeacherClient
from rlhf_core.types import Rollout

GRACE = 60.0  # seconds after a service's timeout, for answers to be read, and for a name that is still being resolved


@dataclass(frozen=True)
class Taught:
    """What services answered of each response. What JSON makes of it has the same fields.

    known: of each response, whether every service answered.
    weights: of each service, its share of all teachers' weights.
    logprobs: by service, of all response tokens, response after response: a number each, or with rl.distillation.top_k those of K tokens.
    ids: the K tokens likewise; empty lists without top_k.
    """

    known: list[bool]
    weights: list[float]
    logprobs: list[list]
    ids: list[list]

    def beside(self, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the forward passes' outputs with those of the services beside the other teachers' (`TrainerRank.forward`)."""
        logprobs = torch.tensor(self.logprobs)
        if not self.ids[0]:
            total = torch.tensordot(torch.tensor(self.weights), logprobs, dims=1)
            return outputs | {"teacher_logprobs": total + outputs.get("teacher_logprobs", 0.0)}
        further = {"teacher_top_logprobs": logprobs.transpose(0, 1), "teacher_top_ids": torch.tensor(self.ids).transpose(0, 1)}
        return outputs | {name: torch.cat([outputs[name], x], 1) if name in outputs else x for name, x in further.items()}


class TeacherServices:
    """The services among the teachers of rl.distillation.

    Args:
        vocabulary: ids that the policy has.
    Raises:
        ValueError: a service's key can't be read.
    """

    def __init__(self, config: DistillationConfig, *, vocabulary: int):
        whole = sum(teacher.weight for teacher in config.teachers)
        self._top, self._services = config.top_k or 0, [t for t in config.teachers if t.service is not None]
        self._weights = [teacher.weight / whole for teacher in self._services]
        self._clients = [TeacherClient(t.service, top=self._top, vocabulary=vocabulary, in_time=True) for t in self._services]
        self._reasons = [Reasons(t.service.subject) for t in self._services]

    def submit(self, rollouts: Sequence[Rollout]) -> Callable[[], Taught]:
        """Ask all services about the responses, without waiting. Returns what waits for the answers, which their `timeout` ends.

        A service that is still busy GRACE seconds after its timeout has answered nothing.
        """
        sequences = [([*(r.prompt.teacher_ids or r.prompt.prompt_ids), *r.response_ids], r.num_tokens) for r in rollouts]
        found: list[list[Said | None] | BaseException] = [[] for _ in self._clients]

        def ask(number: int) -> None:
            try:
                found[number] = self._clients[number].ask(sequences, self._reasons[number])
            except BaseException as error:
                found[number] = error  # for the thread that waits

        threads = [threading.Thread(target=ask, args=(n,), name="teacher", daemon=True) for n in range(len(found))]
        began = time.monotonic()
        for thread in threads:
            thread.start()

        def answers(number: int) -> list[Said | None]:
            config = self._services[number].service
            threads[number].join(max(0.0, began + config.timeout + GRACE - time.monotonic()))
            if threads[number].is_alive():
                self._reasons[number](
                    f"{config.url} is still busy {GRACE:g} s after its timeout; look whether its host's name resolves", count=len(sequences)
                )
                return [None] * len(sequences)
            if isinstance(found[number], BaseException):
                raise found[number]
            return found[number]

        def wait() -> Taught:
            return self._taught([answers(number) for number in range(len(threads))], [length for _, length in sequences])

        return wait

    def _taught(self, found: list[list[Said | None]], lengths: list[int]) -> Taught:
        known = [all(answers) for answers in zip(*found, strict=True)]
        logprobs, ids = [], []
        for of_service in found:
            of_each = [answer or self._nothing(tokens) for answer, tokens in zip(of_service, lengths, strict=True)]
            logprobs.append([x for answer in of_each for x in answer.logprobs])
            ids.append([x for answer in of_each for x in answer.ids])
        return Taught(known, self._weights, logprobs, ids)

    def _nothing(self, tokens: int) -> Said:
        """Numbers for a response that isn't trained on."""
        if not self._top:
            return Said([0.0] * tokens, [])
        return Said([[0.0] * self._top] * tokens, [[0] * self._top] * tokens)
