"""Teachers at an address in a run: the same numbers as beside the policy, and what happens where no answer comes."""

from __future__ import annotations

import math
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from rl_here import rl_job_here, running
from teacher_service import Teacher, Tree, teaching
from tiny_models import largest_difference, save_tiny_models
from whole_matrix import cells

from rlhf_core.config import DistillationConfig
from rlhf_core.trainers.rl import taught
from rlhf_core.trainers.rl.metrics import TooManyUnscored
from rlhf_core.trainers.rl.taught import TeacherServices
from rlhf_core.types import Prompt, Rollout, Span

pytestmark = pytest.mark.usefixtures("world")

Folders = tuple[Path, Path]
ALONE = {
    **{"rl.algorithm": "grpo", "rl.grpo.group_size": 4, "rl.reward.scorers": [], "rl.kl.coef": 0.0, "rl.steps": 30, "rl.monitor.kl": None},
    "rl.rollout.temperature": 1.0,
}
LOSSES = {"sampled": {"loss": "sampled"}, "top 4": {"loss": "jsd", "beta": 0.3, "top_k": 4}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> list[Path]:
    folder = tmp_path_factory.mktemp("teachers")
    return [save_tiny_models(folder / str(size), tokenizer, seed=size, hidden_size=size)[0] for size in (16, 32)]


def of(loss: str, *teachers: dict[str, Any]) -> dict[str, Any]:
    weighted = [teacher | {"weight": weight} for teacher, weight in zip(teachers, (3.0, 1.0), strict=False)]
    return {"rl.distillation": {"teachers": weighted, **LOSSES[loss]}}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_run_has_the_curve_of_one_with_the_teachers_beside_the_policy(
    model_folders: Folders, folders: list[Path], tokenizer, tmp_path: Path, loss: str
):
    """The first teacher is a service, named before the other: the order of weights is that of the outputs."""
    found = []
    with teaching(folders[0], tokenizer) as teacher:
        for first in ({"path": str(folders[0])}, {"service": teacher.service}):
            options = ALONE | of(loss, first, {"path": str(folders[1])})
            with running(rl_job_here(model_folders, tmp_path / str(len(found)), **options)) as run:
                for _ in range(3):
                    run.step()
                found.append([row["distillation_loss"] for row in run.rows])
        assert len(teacher.requests) == 3 * 8
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("loss", "schedule"), cells([(x, y) for x in LOSSES for y in ("counted", "free")], [("sampled", "counted"), ("top 4", "free")])
)
def test_a_run_resumes_to_the_same_bits(model_folders: Folders, folders: list[Path], tokenizer, tmp_path: Path, loss: str, schedule: str):
    """With a journal also if the service's answers have changed meanwhile: what was noted counts."""
    with teaching(folders[0], tokenizer) as teacher:
        options = ALONE | of(loss, {"service": teacher.service}) | {"rl.rollout.schedule": schedule}
        job = rl_job_here(model_folders, tmp_path, **options)
        with running(job) as whole:
            for step in range(4):
                whole.step()
                if step == 1:
                    whole.save()
            expected, curve = whole.rank.actors[0].weights(), [row["distillation_loss"] for row in whole.rows]
        if schedule == "free":
            teacher.misbehave = refuses
        with running(job) as part:
            assert part.progress.step == 2
            for _ in range(2):
                part.step()
            found, rows = part.rank.actors[0].weights(), [row["distillation_loss"] for row in part.rows]
    assert rows == curve[2:] and all(map(math.isfinite, curve))
    assert largest_difference(found, expected) == 0


async def refuses(teacher: Teacher, request: web.Request, tree: Tree) -> web.StreamResponse:
    return web.json_response({"error": "no such model"}, status=404)


def test_a_response_without_an_answer_is_masked_and_too_many_end_the_run(
    model_folders: Folders, folders: list[Path], tokenizer, tmp_path: Path
):
    async def refuses_the_first(teacher: Teacher, request: web.Request, tree: Tree) -> web.StreamResponse | None:
        return await refuses(teacher, request, tree) if tree["prompt"] == teacher.requests[0]["prompt"] else None

    with teaching(folders[0], tokenizer, misbehave=refuses_the_first) as teacher:
        options = ALONE | of("sampled", {"service": teacher.service})
        with running(rl_job_here(model_folders, tmp_path / "one", **options, **{"rl.reward.max_unscored_fraction": 0.5})) as run:
            batch = run.step().batch
        refused = [row == teacher.requests[0]["prompt"] for row in batch.sequences.lists()]
        assert any(refused) and (~batch.response_mask.any(1)).tolist() == refused
        teacher.misbehave = refuses
        with (
            running(rl_job_here(model_folders, tmp_path / "all", **options)) as run,
            pytest.raises(TooManyUnscored, match=r"step 0: rl.distillation: .*without an answer of every teacher"),
        ):
            run.step()


def test_a_service_reads_the_prompts_of_the_template(model_folders: Folders, folders: list[Path], tokenizer, tmp_path: Path):
    with teaching(folders[0], tokenizer) as teacher:
        options = of("sampled", {"service": teacher.service})
        options["rl.distillation"] |= {"teacher_template": "Be brief. {prompt}"}
        with running(rl_job_here(model_folders, tmp_path, **ALONE | options)) as run:
            rollouts = run.step().collected.rollouts
    asked = [tree["prompt"] for tree in teacher.requests]
    assert sorted(asked) == sorted([*r.prompt.teacher_ids, *r.response_ids] for r in rollouts)
    assert all("Be brief." in tokenizer.decode(ids) for ids in asked)
    assert torch.tensor([len(r.prompt.teacher_ids) > len(r.prompt.prompt_ids) for r in rollouts]).all()


def test_a_name_that_is_never_resolved_is_waited_for_no_longer_than_its_deadline(monkeypatch, caplog):
    """Python's resolver can't be interrupted."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(6.0) or [])
    monkeypatch.setattr(taught, "GRACE", 0.5)
    service = {"url": "http://teacher.invalid/v1", "model": "teacher", "timeout": 0.5}
    services = TeacherServices(DistillationConfig(teachers=[{"service": service}], loss="sampled"), vocabulary=300)
    rollout = Rollout(Prompt("p", "made", [], [1, 2], None), [Span([3, 4, 5], [-0.5] * 3, 1)], True, group_id=0)
    began = time.monotonic()
    found = services.submit([rollout])()
    assert found.known == [False] and found.logprobs == [[0.0] * 3] and time.monotonic() - began < 5.0
    assert "s after its timeout; look whether its host's name resolves" in caplog.text
