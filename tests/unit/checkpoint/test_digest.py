"""State digests: equal states have equal ones, of different ones the first that differs is named, and reading runs no code of a file."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import policy_engine, tiny_params
from two_ranks import BATCHES, STAGES, sft_steps

from rlhf_core.checkpoint.digest import DIGEST_FILE, differences, main, read_digest, write_digest
from rlhf_core.checkpoint.saved_state import SavedFiles
from rlhf_core.checkpoint.saving import without_crc32
from rlhf_core.checkpoint.store import CheckpointStore
from rlhf_core.checkpoint.torch_file import SavedTensor, read_torch_file
from rlhf_core.engines.deepspeed.engine import TrainEngine
from rlhf_core.sampling.rewards import Moments, RewardNormalizer
from rlhf_core.stage.carried import STATE
from rlhf_core.trainers.rl.monitor import MonitorState, Track
from rlhf_core.trainers.rl.state import BestPolicy, Progress
from rlhf_core.trainers.supervised.loop import save_state

pytestmark = pytest.mark.usefixtures("world")
Q_PROJ = "model.model.layers.0.self_attn.q_proj.weight"
RL = tiny_params().rl


def trained(sft_folder: Path, stage: int) -> TrainEngine:
    engine = policy_engine(sft_folder, zero_stage=stage)
    sft_steps(engine, BATCHES[:1], rank=0, ranks=1)
    return engine


def saved(engine: TrainEngine, folder: Path) -> Path:
    random.seed(1)
    torch.manual_seed(1)
    return CheckpointStore(folder, write_digest=write_digest).save(1, lambda aside: save_state(engine, aside))


def bump_exp_avg(engine: TrainEngine, stage: int) -> None:
    """One number of one parameter's first moment."""
    parameter = dict(engine.module.named_parameters())[Q_PROJ]
    if stage == 0:
        engine._torch_optimizer.state[parameter]["exp_avg"][3, 5] += 1e-3
        return
    from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state

    value = safe_get_full_optimizer_state(parameter, "exp_avg").clone()
    value[3, 5] += 1e-3
    safe_set_full_optimizer_state(parameter, value, "exp_avg")


def leaves(node: object) -> Iterator[torch.Tensor | SavedTensor]:
    """The tensors in the content of a file."""
    if isinstance(node, torch.Tensor | SavedTensor):
        yield node
    elif isinstance(node, Mapping | list | tuple):
        for item in node.values() if isinstance(node, Mapping) else node:
            yield from leaves(item)


def assert_pieces(folder: Path) -> None:
    """The bytes of a file that are taken for a tensor's are those that torch reads."""
    for path in folder.rglob("*.pt"):
        content = path.read_bytes()
        for piece, tensor in zip(leaves(read_torch_file(path)), leaves(torch.load(path, weights_only=False)), strict=True):
            assert content[slice(*piece.piece)] == tensor.detach().flatten().view(torch.uint8).numpy().tobytes(), path


@pytest.mark.parametrize("stage", STAGES)
def test_the_same_state_twice_is_equal_and_one_number_of_the_optimizer_is_named(sft_folder: Path, tmp_path: Path, stage: int, capsys):
    a, b = (saved(trained(sft_folder, stage), tmp_path / name) for name in "ab")
    assert_pieces(a)
    assert main(["compare", str(a), str(b)]) == 0
    assert capsys.readouterr().out.startswith("equal: both are the same state, after step 1, in ")
    engine = trained(sft_folder, stage)
    bump_exp_avg(engine, stage)
    c = saved(engine, tmp_path / "c")
    assert main(["compare", str(a), str(c)]) == 1
    rank = "" if stage == 0 else " on rank 0"
    assert capsys.readouterr().out == f"different: optimizer: exp_avg of {Q_PROJ} of engine{rank}: other content\n"


def test_another_step_of_training_differs_in_everything_that_moves_and_position_comes_first(sft_folder: Path, tmp_path: Path, capsys):
    engine = policy_engine(sft_folder)
    store = CheckpointStore(tmp_path, write_digest=write_digest)
    for step, batch in enumerate(BATCHES[:2], 1):
        sft_steps(engine, [batch], rank=0, ranks=1)
        torch.manual_seed(step)
        store.save(step, lambda folder: save_state(engine, folder))
    found = differences(*(read_digest(tmp_path / f"step-{step}") for step in (1, 2)))
    assert found[0] == "data position: step: 1 and 2"
    parts = [line.split(":")[0] for line in found]
    assert list(dict.fromkeys(parts)) == ["data position", "random number generators", "scheduler", "counters", "optimizer", "weights"]
    assert f"optimizer: step of {Q_PROJ} of engine: 1.0 and 2.0" in found
    assert main(["compare", str(tmp_path / "step-1"), str(tmp_path / "step-2")]) == 1
    assert capsys.readouterr().out == f"different: data position: step: 1 and 2 (and {len(found) - 1} more; --all names them)\n"


CHANGES: dict[str, tuple[Callable[[Progress], Progress], str]] = {
    "prompts": (lambda p: replace(p, prompts_drawn=97), "data position: prompts_drawn: 96 and 97"),
    "coefficient": (lambda p: replace(p, kl_coef=0.15000000000000002), "KL coefficient: kl_coef: 0.15 and 0.15000000000000002"),
    "monitor": (
        lambda p: replace(p, monitor=MonitorState({"kl": Track((0.1,), None, 2)})),
        "running statistics: monitor tracks: other content",
    ),
    "best": (
        lambda p: replace(p, best=BestPolicy(2, 0.25, "score")),
        'best policy: best: {"metric": "score", "step": 2, "value": 0.5} and {"metric": "score", "step": 2, "value": 0.25}',
    ),
}


def driver(folder: Path, change: Callable[[Progress], Progress] = lambda p: p, count: int = 4) -> Path:
    normalizer = RewardNormalizer(RL.reward)
    normalizer.moments = {"reward_model": Moments(count, 1.5, 2.5)}
    progress = change(Progress(3, 96, 0.15, BestPolicy(2, 0.5, "score"), MonitorState({"kl": Track((0.1,), None, 1)})))
    return CheckpointStore(folder, write_digest=write_digest).save(3, lambda aside: progress.write(aside / "driver.json", normalizer))


@pytest.mark.parametrize("what", CHANGES)
def test_what_the_driver_of_an_rl_run_knows_is_compared_by_value(tmp_path: Path, what: str):
    change, message = CHANGES[what]
    a, b = read_digest(driver(tmp_path / "a")), read_digest(driver(tmp_path / "b", change))
    assert a["parts"]["position"] == {"step": 3, "policy version": 3, "prompts_drawn": 96}
    assert differences(a, b) == [message]


def test_running_statistics_of_the_rewards_too(tmp_path: Path):
    a, b = read_digest(driver(tmp_path / "a")), read_digest(driver(tmp_path / "b", count=5))
    (message,) = differences(a, b)
    assert message.startswith('running statistics: normalizer reward_model: {"count": 4, ')


def test_what_isnt_a_number_equals_itself_and_nothing_isnt_null():
    a, b = ({"step": 1, "parts": {"statistics": part}} for part in ({"x": math.nan, "y": None}, {"x": math.nan}))
    assert differences(a, a) == [] and differences(a, b) == ["running statistics: y: null and nothing"]


def test_the_newest_of_a_folder_counts_and_what_cant_be_read_is_refused(tmp_path: Path, capsys):
    driver(tmp_path / "a")
    driver(tmp_path / "b")
    assert main(["compare", str(tmp_path), str(tmp_path / "a")]) == 2
    assert "expected checkpoints of one phase, got those of several" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b/step-3" / DIGEST_FILE)]) == 0
    assert main(["show", str(tmp_path / "a")]) == 0
    assert "data position: 3 hashed or noted (step 3, policy version 3, prompts_drawn 96)" in capsys.readouterr().out
    shutil.copytree(tmp_path / "b", tmp_path / "kept", ignore=lambda _, names: set(names) - {"step-3", DIGEST_FILE})
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "kept")]) == 0
    content = json.loads((tmp_path / "b/step-3/driver.json").read_text()) | {"kl_coef": 1.0}
    (tmp_path / "b/step-3/driver.json").write_text(json.dumps(content))
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "a damaged checkpoint has no state digest" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "nowhere")]) == 2
    assert "expected a state digest" in capsys.readouterr().err


class Touch:
    """Unpickled as Python does it, this makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_reading_a_file_runs_nothing_of_what_is_in_it(tmp_path: Path):
    folder = tmp_path / "step-1"
    folder.mkdir()
    for name in ("rng.pt", "reference.pt"):
        torch.save({"torch": torch.zeros(3), "bad": Touch(tmp_path / "touched")}, folder / name)
        with pytest.raises(ValueError, match=f"^{name}: expected only the classes of a checkpoint, got getattr; remove the checkpoint"):
            read_torch_file(folder / name)
    assert not (tmp_path / "touched").exists()


def test_a_file_without_crc32_is_the_same_state_and_other_files_still_have_it(tmp_path: Path):
    state = {"weight": torch.arange(1000.0), "half": torch.ones(7, dtype=torch.bfloat16), "count": 3}
    for name in "ab":
        (tmp_path / name).mkdir()
    torch.save(state, tmp_path / "a" / "reference.pt")
    with without_crc32():
        torch.save(state, tmp_path / "b" / "reference.pt")
    torch.save(state, tmp_path / "after.pt")
    assert [zipfile.ZipFile(tmp_path / name).testzip() is None for name in ("a/reference.pt", "b/reference.pt", "after.pt")] == [
        True,
        False,
        True,
    ]
    assert torch.equal(torch.load(tmp_path / "b" / "reference.pt", weights_only=True)["weight"], state["weight"])
    for name in "ab":
        write_digest(tmp_path / name, 1)
    assert differences(*(read_digest(tmp_path / name / DIGEST_FILE) for name in "ab")) == []


def test_comparing_needs_no_torch(tmp_path: Path):
    program = "import sys; from rlhf_core.checkpoint.digest import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", program, "compare", str(driver(tmp_path / "a")), str(driver(tmp_path / "b"))]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1] == "False"


def test_every_part_of_a_checkpoint_is_a_field_of_the_table_of_resumed_state(tmp_path: Path, sft_folder: Path):
    """What a supervised phase saves, and the driver of an RL run: docs of the fields are in rlhf_core/stage/carried.py."""
    fields = {
        "weights": "weights", "optimizer": "optimizer", "scheduler": "scheduler", "counters": "scheduler", "generators": "generators",
        "position": "position", "kl_coef": "kl_coef", "best": "best", "statistics": "moments",
    }  # fmt: skip
    engine = policy_engine(sft_folder, ema_decay=0.5)
    sft_steps(engine, BATCHES[:1], rank=0, ranks=1)
    save_state(engine, tmp_path)
    Progress(3, 96, 0.15, BestPolicy(2, 0.5, "score")).write(tmp_path / "driver.json", RewardNormalizer(tiny_params().rl.reward))
    names = [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    parts = {part for saved in SavedFiles(tmp_path, names).result().values() for part, _, _ in saved.items}
    assert parts - {"world"} == fields.keys() and set(fields.values()) <= STATE["all"].keys() | STATE["rl"].keys()
