"""A teacher at an address: what it answers is read exactly, and what isn't an answer about the same tokens is refused."""

from __future__ import annotations

import json
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from teacher_service import Teacher, Tree, teaching
from tiny_models import save_tiny_models, sequences, tiny_tokenizer

from rlhf_core.config import TeacherService
from rlhf_core.engines.vllm.server import ServerSettings, VllmServer
from rlhf_core.models.build import load_language_model
from rlhf_core.models.tokenizer import build_tokenizer
from rlhf_core.scorers.service import MAX_ANSWER
from rlhf_core.scorers.teacher import TeacherClient, probe_texts

KEY = "rl.distillation.teachers.0.service"
TEXTS = ["Please sort 4172.", "Quick, give the largest of 309."]
VOCABULARY = 300


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    return save_tiny_models(tmp_path_factory.mktemp("teacher"), tokenizer, seed=3)[0]


class Reasons(Counter):
    def __call__(self, reason: str, *, count: int) -> None:
        self[reason] += count


@torch.no_grad()
def by_transformers(folder: Path, ids: list[int], count: int) -> torch.Tensor:
    """[count, V]"""
    return load_language_model(folder)(torch.tensor([ids])).logits[0, len(ids) - count - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("top", [0, 5])
def test_log_probabilities_are_those_of_the_last_tokens(folder: Path, tokenizer, top: int):
    asked, reasons = [(ids, len(ids) - 2) for ids in sequences(7, seed=2)], Reasons()
    with teaching(folder, tokenizer) as teacher:
        found = TeacherClient(teacher.config, top=top, vocabulary=VOCABULARY).ask(asked, reasons)
        assert len(teacher.requests) == 7 and not reasons
    for (ids, count), said in zip(asked, found, strict=True):
        expected = by_transformers(folder, ids, count)
        if top:
            assert said.ids == expected.topk(top).indices.tolist()
            expected = expected.gather(1, torch.tensor(said.ids))
        else:
            expected = expected.gather(1, torch.tensor(ids[-count:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(said.logprobs), expected, rtol=1e-5, atol=1e-5)


def test_a_teacher_with_the_same_tokens_passes_the_check(folder: Path, tokenizer):
    with teaching(folder, tokenizer) as teacher:
        TeacherClient(teacher.config, top=3, vocabulary=VOCABULARY).check(TEXTS, tokenizer, key=KEY)
        assert all(isinstance(tree["prompt"], str) for tree in teacher.requests)
        text = "".join(tree["prompt"] for tree in teacher.requests)
    known = {tokenizer.decode([token]) for token in range(len(tokenizer)) if token not in tokenizer.all_special_ids}
    assert sum(part in text for part in known if "\ufffd" not in part) == len([part for part in known if "\ufffd" not in part])


def test_another_tokenizer_is_refused_with_the_place(folder: Path, tokenizer):
    other = build_tokenizer(["Other words have other merges, and other tokens follow."] * 20, vocab_size=VOCABULARY)
    with teaching(folder, other) as teacher, pytest.raises(ValueError, match=rf"{KEY}: .*another tokenizer: expected token \["):
        TeacherClient(teacher.config, top=0, vocabulary=VOCABULARY).check(TEXTS, tokenizer, key=KEY)


def test_tokens_that_only_the_vocabulary_has_are_probed():
    """The prompts alone don't show the difference: a token of the policy that no prompt has."""
    own = tiny_tokenizer()
    own.add_tokens(["rare_word"])
    assert any("rare_word" in text for text in probe_texts(own))


def wrong(change: dict[str, Any]):
    async def answer(teacher: Teacher, request: web.Request, tree: Tree) -> web.StreamResponse:
        choice = teacher.completion(tree)["choices"][0]
        places = [
            None if p is None else {token: entry | change.get("entry", {}) for token, entry in p.items()} for p in choice["prompt_logprobs"]
        ]
        return web.json_response({"choices": [choice | {"prompt_logprobs": places[change.get("lost", 0) :]} | change.get("choice", {})]})

    return answer


@pytest.mark.parametrize(
    ("change", "why", "asked"),
    [
        ({"choice": {"prompt_logprobs": None}}, "no prompt_token_ids and prompt_logprobs", 1),
        ({"choice": {"prompt_token_ids": [7, 7, 7]}}, "another tokenizer", 1),
        ({"lost": 1}, "places in prompt_logprobs", 2),
        ({"entry": {"logprob": 0.5}}, "expected a log-probability of token", 2),
        ({"entry": {"logprob": float("nan")}}, "expected a log-probability of token", 2),
        ({"entry": {"rank": 9}}, "expected the ranks 1 to 2", 2),
    ],
    ids=str,
)
def test_what_is_no_answer_about_these_tokens_has_a_reason(folder: Path, tokenizer, change: dict[str, Any], why: str, asked: int):
    """What can't become right is asked for once, a faulty answer again."""
    reasons, top = Reasons(), 2 if "rank" in change.get("entry", {}) else 0
    with teaching(folder, tokenizer, misbehave=wrong(change)) as teacher:
        found = TeacherClient(teacher.config, top=top, vocabulary=VOCABULARY).ask([([5, 6, 7, 8], 2)], reasons)
        assert len(teacher.requests) == asked
    (reason,) = reasons
    assert found == [None] and why in reason


def test_ids_that_the_policy_lacks_are_refused_among_the_likeliest(folder: Path, tokenizer):
    reasons = Reasons()
    with teaching(folder, tokenizer) as teacher:
        found = TeacherClient(teacher.config, top=8, vocabulary=2).ask([([5, 6, 7, 8], 2)], reasons)
    assert found == [None] and "of the policy's 2 ids" in next(iter(reasons))


def test_answers_about_long_texts_may_be_large(folder: Path, tokenizer):
    """Those of vLLM have about 80 bytes for each of the likeliest tokens at each place."""
    ids, top, reasons = [7] * 4000, 20, Reasons()
    place = {str(token): {"logprob": -3.14159265358979, "rank": token + 1, "decoded_token": "understanding"} for token in range(top)}

    async def answer(teacher: Teacher, request: web.Request, tree: Tree) -> web.StreamResponse:
        assert len(json.dumps([place] * len(ids))) > MAX_ANSWER
        return web.json_response({"choices": [{"prompt_token_ids": ids, "prompt_logprobs": [None, *[place] * (len(ids) - 1)]}]})

    with teaching(folder, tokenizer, misbehave=answer) as teacher:
        (said,) = TeacherClient(teacher.config, top=top, vocabulary=VOCABULARY).ask([(ids, 2)], reasons)
    assert not reasons and said.ids == [list(range(top))] * 2


@pytest.mark.long
@pytest.mark.parametrize("top", [0, 5])
def test_vllms_server_is_such_a_teacher(tmp_path: Path, tokenizer, top: int):
    """Of heads that its CPU build has."""
    folder = save_tiny_models(tmp_path, tokenizer, seed=3, hidden_size=64)[0]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    how = {"api_key": "secret", "max_length": 64, "dtype": "float32", "trust_remote_code": False, "start_seconds": 300.0}
    settings = ServerSettings(name="teacher", folder=folder, host="127.0.0.1", port=port, **how)
    key = tmp_path / "key"
    key.write_text("secret")
    config = TeacherService(url=f"{settings.address}/v1", model="teacher", api_key_file=str(key))
    client = TeacherClient(config, top=top, vocabulary=VOCABULARY)
    asked, reasons = [(ids, len(ids) - 2) for ids in sequences(20, seed=2)], Reasons()
    with VllmServer(settings) as server:
        assert server.wait_until_ready(lambda: False)
        client.check(TEXTS, tokenizer, key=KEY)
        found = client.ask(asked, reasons)
        other = build_tokenizer(["Other words have other merges, and other tokens follow."] * 20, vocab_size=VOCABULARY)
        with pytest.raises(ValueError, match="another tokenizer"):
            client.check(TEXTS, other, key=KEY)
    assert not reasons
    for (ids, count), said in zip(asked, found, strict=True):
        expected = by_transformers(folder, ids, count)
        places = torch.tensor(said.ids) if top else torch.tensor(ids[-count:])[:, None]
        numbers = torch.tensor(said.logprobs) if top else torch.tensor(said.logprobs)[:, None]
        torch.testing.assert_close(numbers, expected.gather(1, places), rtol=1e-4, atol=1e-4)
        if top:
            torch.testing.assert_close(numbers, expected.topk(top).values, rtol=1e-4, atol=1e-4)
