"""`make server` on a real PostgreSQL: deployment, schedule, a restart of the database in the middle of a run, and of the server."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from postgres import PASSWORD, USER, postgres

sys.path.insert(0, str(Path(__file__).parent))
from small_workspace import (
    ORDER,
    assert_resumed,
    command_line,
    flow_runs,
    make_workspace,
    outcomes,
    processes_in,
    run_flow,
    serving,
    training_has_begun,
    wait_until,
)

pytestmark = [pytest.mark.timeout(590), pytest.mark.long]
STEPS = 300  # fifteen seconds
DOWN = 6.0  # seconds without a database


def test_deployment_schedule_and_a_restart_of_the_database(tmp_path):
    workspace, log = make_workspace(tmp_path / "project", laid_out=False), tmp_path / "server.log"
    with postgres() as database:
        url = database.url().replace(f"{USER}@", f"{USER}:{quote(PASSWORD, safe='')}@")
        with serving(workspace, log, PREFECT_SERVER_DATABASE_CONNECTION_URL=url) as prefect:
            ended_runs(prefect, 0)
            overrides = json.dumps({"overrides": {"sft.steps": STEPS}})
            created = prefect("deployment", "run", "rlhf/full-pipeline", "--params", overrides)
            assert created.returncode == 0, created.stderr
            wait_until(lambda: (workspace / "runs").exists() and any((workspace / "runs").glob("[!.]*")), 90, "a worktree")
            (worktree,) = (workspace / "runs").glob("[!.]*")
            wait_until(training_has_begun(worktree), 60, "training")
            database.stop()
            time.sleep(DOWN)
            database.start()
            assert {run["state"]["name"] for run in ended_runs(prefect, 1)} == {"Completed"}
            assert_resumed(worktree, STEPS, processes=1)  # the stage heard nothing of it

            assert_no_secret(workspace, log)
            scheduled = prefect("deployment", "schedule", "create", "rlhf/full-pipeline", "--interval", "60")
            assert scheduled.returncode == 0, scheduled.stdout + scheduled.stderr
            wait_until(lambda: any(run["auto_scheduled"] for run in ended_runs(prefect, 1)), 180, "the scheduled run", every=1)
            cleared = prefect("deployment", "schedule", "clear", "--accept-yes", "rlhf/full-pipeline")
            assert cleared.returncode == 0, cleared.stdout + cleared.stderr
            assert {run["state"]["name"] for run in ended_runs(prefect, 2)} == {"Completed"}

            typed = run_flow(workspace, "--run", "typed")  # through the same server, without a variable
            assert typed.returncode == 0 and outcomes(typed.stdout).keys() == set(ORDER), typed.stdout + typed.stderr
        completed = "select auto_scheduled, count(*) from flow_run where state_name = 'Completed' group by 1 order by 1"
        counted = dict(line.split("|") for line in database.sql(completed, "prefect").splitlines())
        assert counted["f"] == "2" and int(counted["t"]) >= 1
        assert not (workspace / ".prefect/prefect.db").exists()
        with serving(workspace, log, PREFECT_SERVER_DATABASE_CONNECTION_URL=url) as prefect:
            assert len(ended_runs(prefect, 2)) == 2  # a new server finds them


def ended_runs(prefect, at_least: int) -> list[dict]:
    """The deployment's runs that have ended, of which there must be so many within minutes."""

    def ended() -> list[dict]:
        return [run for run in flow_runs(prefect, "full-pipeline") if run["state"]["type"] in ("COMPLETED", "FAILED", "CRASHED")]

    wait_until(lambda: len(ended()) >= at_least, 240, f"the end of {at_least} runs", every=1)
    return ended()


def assert_no_secret(workspace: Path, log: Path) -> None:
    """The password is in no file, no line and no command, and only in the server's environment."""
    forms = (PASSWORD, quote(PASSWORD, safe=""))
    files = [log, *(path for folder in (workspace / ".prefect", workspace / "runs") for path in folder.rglob("*") if path.is_file())]
    assert not [path for path in files if any(form.encode() in path.read_bytes() for form in forms)]
    processes = {process: " ".join(command_line(process)) for process in processes_in(workspace)}
    assert not [line for line in processes.values() if any(form in line for form in forms)]
    (worker,) = (process for process, line in processes.items() if " worker start" in line)
    assert not any(form in value for value in worker.environ().values() for form in forms)
