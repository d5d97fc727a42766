"""One flow at a time on a run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flows.chain.locks import at_work, only_flow
from rlhf_core.config import ConfigError

ASK = "import pathlib, sys; from flows.chain.locks import only_flow; only_flow(pathlib.Path(sys.argv[1]), sys.argv[2] or None).__enter__()"


def asked_elsewhere(root, run: str) -> str:
    """What another process is told that starts a flow; nothing where it may."""
    return subprocess.run([sys.executable, "-c", ASK, str(root), run], capture_output=True, text=True, check=False).stderr


def test_a_second_flow_is_refused_with_the_first_ones_process(tmp_path):
    with only_flow(tmp_path, "one"), only_flow(tmp_path, None):
        assert at_work(tmp_path, "one") == str(os.getpid())
        met = f"expected no other flow at work on it, got one, process {os.getpid()}; wait for it or stop it"
        assert f"run one: {met}" in asked_elsewhere(tmp_path, "one")
        assert f"this folder: {met}" in asked_elsewhere(tmp_path, "")
        assert asked_elsewhere(tmp_path, "two") == ""
    assert at_work(tmp_path, "one") is None and asked_elsewhere(tmp_path, "one") == "" == asked_elsewhere(tmp_path, "")


def test_a_name_that_can_not_be_one_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="run name"), only_flow(tmp_path, "../one"):
        pass
