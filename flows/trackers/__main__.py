"""Sends a run's files to one tracker: the process that `flows.trackers.processes` starts.

python -m flows.trackers TRACKER FOLDER, with JSON on its input: the section `tracking`, and `since`, the time from
which the run goes on; null: what is there is sent once.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

from flows.trackers.contents import RUNNING, RunFiles
from flows.trackers.send import Sender
from rlhf_core.config import ConfigError, TrackingConfig, load_params
from rlhf_core.process import configure_process

POLL_SECONDS, RETRY_SECONDS = 4.0, 15.0


def main(tracker: str, folder: str) -> int:
    configure_process()
    os.nice(10)  # training comes first
    for noisy in ("mlflow", "urllib3", "wandb"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    given = json.loads(sys.stdin.read())
    workspace = Path(folder).resolve()
    params = load_params(workspace / "params.yaml", complete=False)
    files = RunFiles(workspace, params, given["since"] or 0.0)
    config = TrackingConfig.model_validate(given["tracking"])
    told = False
    while True:
        ended = given["since"] is None or files.outcome != RUNNING
        try:
            sender = Sender(files, tracker, config)
            _send(sender, files, once=given["since"] is None)
            return 0
        except Exception as error:  # the process's border: a tracker's client raises what it likes
            if not told:
                print(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", flush=True)
            told = True
        if ended:
            return 1
        time.sleep(RETRY_SECONDS)


def _send(sender: Sender, files: RunFiles, *, once: bool) -> None:
    """Send what comes until the run has ended, or once."""
    while True:
        ended = once or files.outcome != RUNNING  # before sending, so that the last pass sees all
        sender.send()
        if ended:
            sender.close()
            return
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except ConfigError as error:
        print(error, flush=True)  # the run's process reads this output
        sys.exit(1)
