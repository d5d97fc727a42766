"""What a stage's work is made of, what differs from older work, and going on from that when asked to and never by itself."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import warm_python

from rlhf_core.checkpoint.settings import Origin, StoreSettings
from rlhf_core.checkpoint.store import CheckpointStore
from rlhf_core.config import CheckpointsConfig, ConfigError, read_yaml
from rlhf_core.provenance.file_hashes import dvc_folder_md5
from rlhf_core.stage.scratch import RECORDED, RESUMED_FROM, WORK, StageInputs, checkpoint_of, journal_of, prepare_scratch, stage_files

BEFORE = StageInputs(
    "exec python -m tasks.train_sft",
    {"seed": 0, "sft": {"steps": 20, "learning_rate": 1e-3, "extra": None, "sizes": [1, 2]}},
    {"data/prepared/sft.parquet": "a", "data/prepared/old.parquet": "b", "rlhf_core/models/build.py": "c", "work.py": "d"},
)
NOW = StageInputs(
    BEFORE.command,
    {"seed": 0, "sft": {"steps": 20, "learning_rate": 2e-3, "extra": {"rank": 8}, "sizes": [1, 3]}},
    {"data/prepared/sft.parquet": "a2", "data/prepared/new.parquet": "b", "rlhf_core/models/build.py": "c2", "work.py": "d"},
)
CONFIG = CheckpointsConfig(keep_last=2, keep_best=0, keep_abandoned=2, resume_from=None)
DIFFERENCES = [
    "sft.learning_rate: 0.001 -> 0.002",
    "sft.extra.rank: nothing -> 8",
    "sft.sizes.1: 2 -> 3",
    "data: data/prepared/new.parquet new",
    "data: data/prepared/old.parquet gone",
    "data: data/prepared/sft.parquet changed",
    "code: rlhf_core/models/build.py changed",
]


def begun(top: Path, work: StageInputs, *steps: int, phase: str = "sft") -> Path:
    """The scratch folder of a work that has come so far."""
    folder = top / work.folder_name
    folder.parent.mkdir(parents=True, exist_ok=True)
    prepare_scratch(folder, work, replace_config(keep_abandoned=9), top.name)
    (folder / "curves.csv").write_text("step,loss\n")
    store = CheckpointStore(folder / phase, StoreSettings(origin=work.origin))
    for step in steps:
        store.save(step, lambda aside: (aside / "weights").write_text(work.folder_name))
    return folder


def replace_config(**changes) -> CheckpointsConfig:
    return CONFIG.model_copy(update=changes)


def age(folder: Path, seconds: int) -> None:
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (1_700_000_000 - seconds, 1_700_000_000 - seconds))


def test_differences_name_keys_with_both_values_and_files_of_data_and_code():
    assert sorted(NOW.differences(BEFORE)) == sorted(DIFFERENCES)
    assert [line.split(":")[0] for line in NOW.differences(BEFORE)][-4:] == ["data", "data", "data", "code"]
    assert BEFORE.differences(BEFORE) == []
    other = replace(BEFORE, command="exec python -m tasks.train_dpo")
    assert other.differences(BEFORE) == ["command: exec python -m tasks.train_sft -> exec python -m tasks.train_dpo"]


def test_an_origin_has_configuration_data_and_code_apart():
    assert replace(BEFORE, params={}).origin == replace(BEFORE.origin, config=replace(BEFORE, params={}).origin.config)
    code = replace(BEFORE, files=BEFORE.files | {"work.py": "e"}).origin
    assert (code.config, code.data) == (BEFORE.origin.config, BEFORE.origin.data) and code.code != BEFORE.origin.code
    data = replace(BEFORE, files=BEFORE.files | {"data/prepared/sft.parquet": "e"}).origin
    assert (data.config, data.code) == (BEFORE.origin.config, BEFORE.origin.code) and data.data != BEFORE.origin.data


def test_work_that_starts_anew_beside_an_older_checkpoint_says_which_and_what_differs(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    older = begun(tmp_path / "train_sft", BEFORE, 5, 10)
    scratch = tmp_path / "train_sft" / NOW.folder_name
    with caplog.at_level(logging.WARNING, logger="rlhf"):
        assert prepare_scratch(scratch, NOW, CONFIG, "train_sft") == []
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"train_sft: starts anew. {older} has the checkpoint of step 10 (sft) of other work; changes since then:\n")
    assert all(f"  {line}\n" in message for line in DIFFERENCES)
    assert message.endswith(f"  To resume from it anyway: checkpoints.resume_from=train_sft/{older.name}")
    assert checkpoint_of(scratch) is None and checkpoint_of(older) == ("sft", 10)
    begun(tmp_path / "train_sft", NOW, 5)
    caplog.clear()
    prepare_scratch(scratch, NOW, CONFIG, "train_sft")  # with a checkpoint of its own there is nothing to say
    assert not caplog.records


def test_resuming_older_work_copies_checkpoints_and_curves_and_records_it(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    older, scratch = begun(tmp_path / "train_sft", BEFORE, 5, 10), tmp_path / "train_sft" / NOW.folder_name
    chosen = replace_config(resume_from=f"train_sft/{older.name}")
    with caplog.at_level(logging.WARNING, logger="rlhf"):
        (noted,) = prepare_scratch(scratch, NOW, chosen, "train_sft")
    assert [record.getMessage() for record in caplog.records][1:] == [
        "train_sft: best_loss of the checkpoint: begun anew, since data/prepared/new.parquet, data/prepared/old.parquet, "
        "data/prepared/sft.parquet changed"
    ]
    assert "resumes from step 10 of other work" in caplog.records[0].getMessage()
    assert (noted["of"], noted["step"]) == ("sft", 10) and sorted(noted["differences"]) == sorted(DIFFERENCES)
    assert checkpoint_of(scratch) == ("sft", 10) and (scratch / "curves.csv").exists() and checkpoint_of(older) == ("sft", 10)
    accepted = StoreSettings(origin=NOW.origin, accepted=(Origin(**noted["origin"]),))
    store = CheckpointStore(scratch / "sft", accepted)
    assert store.latest().step == 10
    with pytest.raises(ValueError, match="made with other config and data and code"):
        CheckpointStore(scratch / "sft", StoreSettings(origin=NOW.origin)).latest()
    store.save(15, lambda aside: (aside / "weights").write_text("new"))
    assert prepare_scratch(scratch, NOW, chosen, "train_sft") == [noted]  # a second start resumes from its own
    assert prepare_scratch(scratch, NOW, CONFIG, "train_sft") == [noted]  # and remembers where it came from
    assert checkpoint_of(scratch) == ("sft", 15)
    third = replace(NOW, params={"seed": 1})
    noted_twice = prepare_scratch(
        tmp_path / "train_sft" / third.folder_name, third, replace_config(resume_from=f"train_sft/{scratch.name}"), "train_sft"
    )
    assert [entry["step"] for entry in noted_twice] == [10, 15]


def test_work_that_a_checkpoint_does_not_fit_is_refused_before_anything_is_copied(tmp_path: Path):
    top = tmp_path / "train_sft"
    older = begun(top, BEFORE, 5, 10)
    sft = BEFORE.params["sft"]
    fewer = replace(BEFORE, params=BEFORE.params | {"sft": sft | {"steps": 8, "optimizer": "lion"}})
    with pytest.raises(ConfigError) as refused:
        prepare_scratch(top / fewer.folder_name, fewer, replace_config(resume_from=f"train_sft/{older.name}"), "train_sft")
    assert str(refused.value).splitlines() == [
        'sft.optimizer: expected "adamw", as for the optimizer in the checkpoint, got "lion"; set it back, or set checkpoints.resume_from '
        "to null to begin anew",
        "sft.steps: expected at least the 10 of the checkpoint, got 8; raise it, or set checkpoints.resume_from to null",
    ]
    assert not (top / fewer.folder_name).exists() and prepare_scratch(top / fewer.folder_name, fewer, CONFIG, "train_sft") == []


def test_without_resume_from_a_checkpoint_that_was_only_copied_does_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    top = tmp_path / "train_sft"
    older, other, scratch = begun(top, BEFORE, 10), begun(top, replace(BEFORE, params={"seed": 9}), 7), top / NOW.folder_name
    chosen, another = (replace_config(resume_from=f"train_sft/{folder.name}") for folder in (older, other))
    prepare_scratch(scratch, NOW, chosen, "train_sft")
    assert [entry["step"] for entry in prepare_scratch(scratch, NOW, another, "train_sft")] == [7]
    prepare_scratch(scratch, NOW, chosen, "train_sft")
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="rlhf"):
        assert prepare_scratch(scratch, NOW, CONFIG, "train_sft") == []
    assert checkpoint_of(scratch) is None and checkpoint_of(older) == ("sft", 10)
    assert caplog.messages[0] == (
        "train_sft: begins without the checkpoint of other work that an earlier start resumed from, since nothing came of it"
    )


def test_a_takeover_that_was_interrupted_begins_again(tmp_path: Path):
    older, scratch = begun(tmp_path / "train_sft", BEFORE, 10), tmp_path / "train_sft" / NOW.folder_name
    left_over = tmp_path / "train_sft" / f"taking-over-{scratch.name}"
    (left_over / "sft/step-10").mkdir(parents=True)
    prepare_scratch(scratch, NOW, replace_config(resume_from=f"train_sft/{older.name}"), "train_sft")
    assert not left_over.exists() and json.loads((scratch / RESUMED_FROM).read_text())[0]["step"] == 10


def test_resuming_missing_or_foreign_work_is_refused(tmp_path: Path):
    top = tmp_path / "train_policy"
    older, scratch = begun(top, BEFORE, 10), top / NOW.folder_name
    nothing = replace_config(resume_from="train_policy/" + "0" * 16)
    with pytest.raises(ConfigError, match=r"resume_from=train_policy/0{16}: expected a scratch folder with a checkpoint, got none"):
        prepare_scratch(scratch, NOW, nothing, "train_policy")
    chosen = replace_config(resume_from=f"train_policy/{older.name}")
    dpo = replace(NOW, command="exec python -m tasks.train_dpo")
    with pytest.raises(ConfigError, match=r"expected work of the same command, exec python -m tasks\.train_dpo, got .*train_sft"):
        prepare_scratch(top / dpo.folder_name, dpo, chosen, "train_policy")
    unknown = begun(top, replace(BEFORE, params={}), 10)
    (unknown / WORK).write_text("[")
    with pytest.raises(ConfigError, match=r"expected work\.json with the record of that work, got no such file"):
        prepare_scratch(scratch, NOW, replace_config(resume_from=f"train_policy/{unknown.name}"), "train_policy")
    begun(top, NOW, 3)
    with pytest.raises(ConfigError, match="expected no checkpoint of this work itself, got one at"):
        prepare_scratch(scratch, NOW, chosen, "train_policy")
    assert prepare_scratch(scratch, NOW, nothing, "train_reward") == []  # another stage's setting


def test_the_newest_folders_of_given_up_work_stay_and_older_ones_go(tmp_path: Path):
    top = tmp_path / "train_sft"
    works = [replace(BEFORE, params={"seed": n}) for n in range(6)]
    folders = [begun(top, work, 10) for work in works[:4]] + [begun(top, work) for work in works[4:]]
    for seconds, folder in enumerate(reversed(folders)):
        age(folder, 100 * seconds)
    chosen = replace_config(keep_abandoned=1, resume_from=f"train_sft/{folders[1].name}")
    prepare_scratch(top / NOW.folder_name, NOW, chosen, "train_sft")
    # Of those with a checkpoint the newest and the one that was chosen, of those without the newest.
    assert {p.name for p in top.iterdir()} == {NOW.folder_name, folders[3].name, folders[1].name, folders[5].name}


def test_journals_of_unfinished_work_go_with_its_folder_and_whole_ones_stay(tmp_path: Path):
    top, works = tmp_path / "train_policy", [replace(BEFORE, params={"seed": n}) for n in range(3)]
    folders = [begun(top, work, 10, phase="checkpoints") for work in works]
    for seconds, folder in enumerate(reversed(folders)):
        journal_of(folder, kept=True).mkdir()
        age(folder, 100 * seconds)
    (journal_of(folders[1], kept=True) / RECORDED).touch()
    own = journal_of(top / NOW.folder_name, kept=True)
    own.mkdir()
    prepare_scratch(top / NOW.folder_name, NOW, replace_config(keep_abandoned=1), "train_policy")
    assert [folder.exists() for folder in folders] == [False, False, True]
    assert [journal_of(folder, kept=True).exists() for folder in folders] == [False, True, True] and own.exists()


@pytest.mark.parametrize("value", ["train_sft", "../x/0123456789abcdef", "train_sft/..", "gate_reward/0123456789abcdef", "train_sft/0123"])
def test_a_scratch_folder_is_named_by_stage_and_fingerprint(value: str):
    with pytest.raises(ValueError, match="resume_from"):
        CheckpointsConfig(keep_last=2, keep_best=0, keep_abandoned=2, resume_from=value)


def test_an_editors_files_are_no_dependency_of_ours_or_of_dvcs(tmp_path: Path):
    """They come and go while a stage runs, though nothing is edited."""
    code = tmp_path / "rewards"
    code.mkdir()
    for name in ("mine.py", ".mine.py.swp", "mine.py~", ".#mine.py", ".DS_Store", "4913", ".hidden.py"):
        (code / name).write_text(name)
    shutil.copy(Path(__file__).parents[3] / ".dvcignore", tmp_path)
    (tmp_path / "dvc.yaml").write_text("stages: {s: {cmd: echo, deps: [rewards]}}\n")
    for command in ("init --no-scm --quiet", "repro --quiet"):
        warm_python.run([sys.executable, "-m", "dvc", *command.split()], cwd=tmp_path, check=True)
    files = stage_files({"deps": ["rewards"]}, "s", tmp_path)
    assert [path.name for path in files] == [".hidden.py", "mine.py"]
    locked = read_yaml(tmp_path / "dvc.lock")["stages"]["s"]["deps"][0]
    assert locked["md5"] == dvc_folder_md5({path.name: hashlib.md5((tmp_path / path).read_bytes()).hexdigest() for path in files})
