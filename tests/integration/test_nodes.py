"""SFT with a rank on each of two nodes that share a network, a storage address, and no folder of the project."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from small_chain import change_params, copy_chain, output_of, run

from tools.faults.namespaces import Nodes, unavailable

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]
SHORT = {"sft": {"steps": 10, "checkpoint_every": 5, "eval_every": 5, "zero_stage": 2, "ranks": 2, "pretrain": {"steps": 2}}}


def test_two_ranks_on_nodes_without_a_shared_folder_train_as_one(chain, tmp_path, monkeypatch):
    if (reason := unavailable()) is not None:
        pytest.skip(f"network namespaces: {reason}")
    workspaces = {}
    for name in ("cluster", "alone"):
        workspaces[name] = copy_chain(chain.workspace, tmp_path / name)
        shutil.rmtree(workspaces[name] / "models/sft")
        change_params(workspaces[name], SHORT)
    nodes = Nodes(tmp_path / "nodes", cpus=(1, 1), hidden=[tmp_path])
    try:
        nodes.start()
        use(nodes, workspaces["cluster"], monkeypatch)
        code, _ = run(workspaces["cluster"], "tasks.train_sft", deadline=300)
        assert code == 0, output_of(workspaces["cluster"])[-3000:]
        for number in (0, 1):  # each has read the data and written its part of a checkpoint
            (work,) = (nodes.folder / f"node-{number}-0/tmp").glob("rlhf-*/work/train_sft-*/")
            assert (work / "data/prepared/sft.parquet").exists() and list(work.glob("scratch/**/*optim_states.pt"))
        assert [path.name for path in nodes.storage.iterdir() if list(path.iterdir())] == ["inputs"]  # the rest is removed in the end
    finally:
        nodes.stop()
    change_params(workspaces["alone"], {"sft": {"ranks": 1, "zero_stage": 0}})
    assert run(workspaces["alone"], "tasks.train_sft")[0] == 0
    mine, theirs = (pd.read_csv(workspaces[name] / "plots/train_sft.csv") for name in ("cluster", "alone"))
    assert mine["step"].tolist() == theirs["step"].tolist() == list(range(12))
    for name in ("loss", "heldout_loss", "grad_norm"):
        assert mine[name].dropna().tolist() == pytest.approx(theirs[name].dropna().tolist(), rel=1e-3)


def use(nodes: Nodes, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(nodes.folder / "token"))
    change_params(workspace, {"cluster": {"address": "ADDRESS", "storage": f"file://{nodes.storage}"}})
    params = workspace / "params.yaml"
    params.write_text(params.read_text().replace("ADDRESS", json.dumps(nodes.address)))  # quoted because of its colon
