"""The table of what resumed work keeps of its state has every key and file that training depends on, and every field of the state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args

from rlhf_core.config import INPUT_SECTIONS, ROUND_STAGE_SECTIONS, STAGE_SECTIONS, Method, Params, read_stages, read_yaml
from rlhf_core.config.base import section_keys, subsection
from rlhf_core.stage.carried import ANEW, CARRIED, CONVERTED, REFUSED, STATE, row_of
from rlhf_core.trainers.rl.monitor import MonitorState
from rlhf_core.trainers.rl.state import Progress, RunStore

ROOT = Path(__file__).parents[2]
# Field of the driver's state -> its fields in the table.
DRIVER = {
    "step": ("position",),
    "prompts_drawn": ("position",),
    "curriculum": ("curriculum",),
    "kl_coef": ("kl_coef",),
    "best": ("best",),
    "monitor": (),  # by its own fields
    "seconds": ("seconds",),
    "tracks": ("score_tracks", "kl_tracks", "tracks"),
    "start": ("start",),
    "frontier": ("frontier",),
    "warnings": ("warnings",),
    "stopped": ("stopped",),
}
# A round starts from one of these, and trains on its own files.
OF_ROUNDS = (
    *("models/promoted/v1/model.safetensors", "rounds/2/policy/model.safetensors"),
    *("rounds/3/data/pairs.parquet", "rounds/3/metrics/validation.json", "rounds/rounds.yaml:rounds.3"),
)


def sections() -> Iterator[str]:
    for stage in ("train_sft", "train_reward"):
        yield from STAGE_SECTIONS[stage]
    for method in get_args(Method):
        yield from (name.replace("${alignment.method}", method) for name in STAGE_SECTIONS["train_policy"])
    yield from ROUND_STAGE_SECTIONS["train_round"]


def changeable() -> Iterator[str]:
    """Keys without keys below them, sections of hashes, and files of dvc.yaml, that training stages depend on."""
    for name in dict.fromkeys(sections()):
        field = Params.model_fields.get(name)
        section = None if field is None else subsection(field.annotation)[0]
        below = [] if section is None else list(section_keys(section, f"{name}.", item="*"))
        yield from (key for key in below or [name] if not any(other.startswith(f"{key}.") for other in below))
    stages = read_stages(ROOT / "dvc.yaml", read_yaml(ROOT / "params.yaml"))
    for stage in ("train_sft", "train_reward", "train_policy"):
        yield from (f"data/inputs.json:{section}" for section in INPUT_SECTIONS.get(stage, ()))
        yield from stages[stage]["deps"]
    yield "data/inputs.json:round_scorers"
    yield from OF_ROUNDS


def test_every_key_and_file_that_may_change_has_a_row_and_every_row_is_of_one():
    keys = list(changeable())
    assert len(keys) > 250 and {"rl.reward.scorers.*.weight", "rl.lora.rank", "dpo.beta", "sft.pretrain.steps", "models/sft"} <= set(keys)
    assert [key for key in keys if row_of(key) is None] == []
    rows = [name for names in CARRIED for name in names]
    assert sorted(rows) == sorted({row_of(key) for key in keys}), "a row twice, or of nothing"


def test_rows_name_fields_of_the_state_and_what_becomes_of_them():
    known = {field for of in STATE.values() for field in of}
    for names, fates in CARRIED.items():
        assert fates.keys() <= known and set(fates.values()) <= {CONVERTED, ANEW, REFUSED}, names


def test_every_field_of_the_drivers_state_is_in_the_table(tmp_path: Path):
    assert DRIVER.keys() == {f.name for of in (Progress, MonitorState) for f in fields(of)}
    assert {field for of in DRIVER.values() for field in of} <= STATE["all"].keys() | STATE["rl"].keys()
    RunStore(tmp_path)
    assert [folder.name for folder in tmp_path.iterdir()] == ["checkpoints"], "RL_PHASE"
