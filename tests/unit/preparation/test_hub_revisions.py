"""Data sets of the hub without the hub: what the library `datasets` takes from its cache, and that no other revision passes for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
# The library reads its environment when it is imported, so all of this is a process of its own. Two commits of a data set are prepared.
PROGRAM = """
import json, shutil
from pathlib import Path
from datasets import load_dataset
from rlhf_core.config import SourceConfig
from rlhf_core.data.places import data_set_commit
from rlhf_core.preparation.sources import load_source

cache = Path("home/datasets")
for text, commit in (("old", "a" * 40), ("new", "b" * 40)):
    Path("rows.jsonl").write_text(json.dumps({"prompt": text}))
    load_dataset("json", data_files="rows.jsonl", split="train")
    made = next(path for path in (cache / "json").glob("*/*/*") if path.is_dir())
    prepared = cache / "some___my_data/default/0.0.0" / commit
    prepared.parent.mkdir(parents=True, exist_ok=True)
    made.rename(prepared)
    shutil.rmtree(cache / "json")
    about = json.loads((prepared / "dataset_info.json").read_text())
    (prepared / "dataset_info.json").write_text(json.dumps(about | {"config_name": "default", "dataset_name": "my_data"}))
    for file in prepared.glob("json-*"):
        file.rename(prepared / file.name.replace("json-", "my_data-"))

def read(revision):
    about = {"name": "mine", "kind": "huggingface", "path": "some/MyData", "format": "prompt", "uses": ["prompt"], "weight": 1.0}
    try:
        (row,) = load_source(SourceConfig(**about, revision=revision), seed=0).rows["prompt"]
        return [row["messages"][0]["content"], data_set_commit("some/MyData", revision, None)]
    except ValueError as error:
        return str(error)

print(json.dumps([read(None), read("b" * 40), read("a" * 40), load_dataset("some/MyData", split="train", revision="a" * 40)[0]["prompt"]]))
"""


def test_a_revision_is_the_one_that_is_read_or_is_refused(tmp_path):
    env = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    env = {name: value for name, value in env.items() if name not in ("HF_DATASETS_CACHE", "HF_HUB_CACHE")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    newest, wanted, other, of_library = json.loads(done.stdout)
    assert newest == wanted == ["new", "b" * 40]
    assert f"revision {'a' * 40} isn't the one that the cache has" in other and "set HF_HUB_OFFLINE=0 to download" in other
    assert of_library == "new"  # which is why
