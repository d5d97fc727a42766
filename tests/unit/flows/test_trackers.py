"""What wandb, TensorBoard and MLflow get of a run is read back from them; one that is down neither stops nor slows a run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from report_workspace import make_workspace
from whole_matrix import cells

from flows.runs.record import note
from flows.track import main as track
from flows.trackers import processes
from flows.trackers.contents import WITHHELD, RunFiles
from flows.trackers.processes import _environment, check_installed, send, tracked
from flows.trackers.send import Sender, note_path
from flows.trackers.sinks import configured, markdown
from rlhf_core.config import ConfigError, TrackingConfig, apply_overrides, load_params

ROOT = Path(__file__).parents[3]
STEPS = 60  # of train_policy
KEYS = {"wandb": "wandb_project", "tensorboard": "tensorboard_dir", "mlflow": "mlflow_uri"}
PLACES = {"wandb": "made", "tensorboard": "events", "mlflow": "sqlite:///{}/mlflow.db"}


def config(*trackers: str, texts: bool = True, **places: str) -> TrackingConfig:
    places = {name: PLACES[name].format(Path.cwd()) for name in trackers} | places
    return TrackingConfig(**{key: places.get(name) for name, key in KEYS.items()}, texts=texts)


@pytest.fixture
def run(tmp_path: Path, monkeypatch) -> Path:
    """A finished run with a registry, in a checkout that is the working folder."""
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "GIT_CONFIG_GLOBAL": os.devnull}.items():
        monkeypatch.setenv(name, value)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    workspace = make_workspace(tmp_path / "runs/one", steps=STEPS)
    for stage in ("train_sft", "train_reward"):
        rows = (workspace / f"plots/{stage}.csv").read_text().splitlines(keepends=True)
        (workspace / f"plots/{stage}.csv").write_text("".join(rows[:41]))
    (workspace / "reports").mkdir()
    (workspace / "reports/report.html").write_text("<h1>The report</h1>")
    (workspace / "dvc.lock").write_text(json.dumps({"stages": {"train_sft": {"outs": [{"path": "models/sft", "md5": "5f7"}]}}}))
    (workspace / "data/inputs.json").write_text(json.dumps({"data": {"sources.0": {"path": "pairs.jsonl", "sha256": "ab12"}}}))
    rollouts(workspace)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "add", "--all"], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "--quiet", "--message=made"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    return workspace


def rollouts(workspace: Path) -> None:
    """Saved rollouts of steps 1 and 20, two each."""
    row = {"rollouts": 8, "prompt": "Sort 3, 1.", "response": "1, 3", "score": 0.5, "token_ids": [4, 5], "version": [0, 0]}
    rows = [row | {"step": step, "group": group, "advantage": [0.25, 0.75]} for step in (1, 20) for group in (0, 1)]
    pd.DataFrame(rows).to_parquet(workspace / "data/rollouts.parquet", index=False)


def files(run: Path) -> RunFiles:
    return RunFiles(run, load_params(run / "params.yaml"))


def send_here(run: Path, tracker: str, **options: Any) -> Sender:
    sender = Sender(files(run), tracker, config(tracker, **options))
    sender.send()
    sender.close()
    return sender


def curve(tracker: str, root: Path, stage: str, name: str) -> list[tuple[int, float]]:
    """Every point that a tracker has of a curve, of all of its runs."""
    if tracker == "wandb":
        from wandb_files import Offline

        return Offline(root).curve(stage, name)
    if tracker == "tensorboard":
        return [(event.step, event.value) for events in event_folders(root) for event in events.Scalars(f"{stage}/{name}")]
    client, runs = mlflow_runs(root)
    return [(m.step, m.value) for found in runs for m in client.get_metric_history(found.info.run_id, f"{stage}/{name}")]


def event_folders(root: Path) -> list[Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [EventAccumulator(str(folder), {"scalars": 0, "tensors": 0}).Reload() for folder in (root / "events").iterdir()]


def mlflow_runs(root: Path) -> tuple[Any, list[Any]]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{root}/mlflow.db")
    experiment = client.get_experiment_by_name("rlhf")
    return client, client.search_runs([experiment.experiment_id])


def written(run: Path, name: str, column: str) -> list[tuple[int, float]]:
    rows = pd.read_csv(run / "plots" / f"{name}.csv").dropna(subset=[column])
    return [(int(step), value) for step, value in zip(rows["step"], rows[column], strict=True)]


def check_same(found: list[tuple[int, float]], wanted: list[tuple[int, float]]) -> None:
    """Every point once."""
    assert [step for step, _ in found] == [step for step, _ in wanted]
    assert [value for _, value in found] == pytest.approx([value for _, value in wanted], rel=1e-5)


def test_wandb_has_the_whole_run(run: Path, tmp_path: Path):
    from wandb_files import Offline

    send_here(run, "wandb")
    found = Offline(tmp_path)
    for stage, column in (("train_sft", "loss"), ("train_sft", "heldout_loss"), ("train_reward", "accuracy"), ("train_policy", "kl_mean")):
        check_same(found.curve(stage, column), written(run, stage, column))
    axes = {record.glob_name: record.step_metric for record in found.of("metric") if record.glob_name}
    assert axes == {f"{stage}/*": f"{stage}/step" for stage in ("train_sft", "train_reward", "train_policy")}
    figures = found.summary()
    assert figures["results/gate_reward/passed"] is True and figures["results/gate_reward/message"].startswith(
        "passed: held-out accuracy 0.8723"
    )
    evaluation = json.loads((run / "metrics/evaluate.json").read_text())
    assert figures["results/evaluate/win_rate/sampled/value"] == pytest.approx(evaluation["win_rate"]["sampled"]["value"])
    settings = found.config()
    assert settings["rl"]["steps"] == load_params(run / "params.yaml").rl.steps and settings["seed"] == 0
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=run, text=True).strip()
    lineage = settings["lineage"]
    assert (lineage["run"], lineage["commit"], lineage["md5.models/sft"]) == ("one", commit, "5f7")
    assert lineage["input.sources.0"] == "pairs.jsonl ab12" and lineage["package.torch"]
    (page,) = [artifact for artifact in found.of("artifact") if artifact.type == "report"]
    assert [entry.path for entry in page.manifest.contents] == ["report.html"]
    tables = [json.loads(path.read_text()) for path in (tmp_path / "wandb").rglob("*.table.json")]
    assert sorted(len(table["data"]) for table in tables) == [2, 2, len(pd.read_parquet(run / "data/evaluation_samples.parquet"))]
    assert next(t for t in tables if len(t["data"]) == 2)["data"][0][-2:] == [0.5, 2], "the mean advantage and the number of tokens"


def test_tensorboard_has_the_whole_run(run: Path, tmp_path: Path):
    note = send_here(run, "tensorboard")._note
    (events,) = event_folders(tmp_path)
    check_same(curve("tensorboard", tmp_path, "train_policy", "kl_mean"), written(run, "train_policy", "kl_mean"))
    assert events.Scalars("results/gate_reward/accuracy")[0].value == pytest.approx(2453 / 2812)
    texts = {tag: events.Tensors(tag) for tag in events.Tags()["tensors"]}
    assert [event.step for event in texts["rollouts/text_summary"]] == [1, 20]
    for tag, text in (("params", "rl.kl.coef"), ("lineage", "md5.models"), ("results/gate_reward/message", "held&#45;out accuracy 0.8723")):
        assert text in texts[f"{tag}/text_summary"][0].tensor_proto.string_val[0].decode(), tag
    assert (tmp_path / "events" / note.id / "report.html").read_text() == "<h1>The report</h1>"


def test_mlflow_has_the_whole_run(run: Path, tmp_path: Path):
    send_here(run, "mlflow")
    client, (found,) = mlflow_runs(tmp_path)
    check_same(sorted(curve("mlflow", tmp_path, "train_sft", "loss")), written(run, "train_sft", "loss"))
    assert found.data.params["rl.steps"] == str(load_params(run / "params.yaml").rl.steps)
    assert found.data.tags["lineage.md5.models/sft"] == "5f7" and found.data.tags["results/gate_reward/message"].startswith("passed")
    assert '"name":' in found.data.params["data.sources"], "params that are lists of sections"
    assert found.data.metrics["results/gate_reward/accuracy"] == pytest.approx(2453 / 2812) and found.info.run_name == "one"
    assert found.info.status == "FINISHED"
    run_id = found.info.run_id
    artifacts = {file.path for folder in client.list_artifacts(run_id) for file in client.list_artifacts(run_id, folder.path)}
    assert artifacts == {"evaluation_samples/000000.json", "report/report.html", "rollouts/000001.json", "rollouts/000020.json"}


def test_mlflow_takes_a_run_whose_id_here_is_as_long_as_its_own(run: Path, tmp_path: Path):
    named = run.rename(run.with_name("a" * 23))
    assert len(Sender(files(named), "mlflow", config("mlflow"))._note.id) == 32
    send_here(named, "mlflow")
    _, (found,) = mlflow_runs(tmp_path)
    assert found.info.run_name == named.name


@pytest.mark.parametrize("tracker", KEYS)
def test_texts_stay_here_if_wanted(run: Path, tmp_path: Path, tracker: str):
    send_here(run, tracker, texts=False)
    assert len(curve(tracker, tmp_path, "train_policy", "kl_mean")) == STEPS
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".parquet" and run not in path.parents]
    assert not any(b"Sort 3, 1." in path.read_bytes() or b"The report" in path.read_bytes() for path in kept)


def training(run: Path, steps: int) -> None:
    """The run as it is within train_policy, after so many steps."""
    note(run, outcome="running", stage="train_policy")
    rows = (run / "plots/train_policy.csv").read_text().splitlines(keepends=True)
    scratch = run / "scratch/train_policy/work"
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "curves.csv").write_text("".join(rows[: 1 + steps]))


@pytest.mark.parametrize("tracker", cells(KEYS, ["tensorboard"]))
def test_a_run_that_resumes_is_continued_and_no_step_comes_twice(run: Path, tmp_path: Path, tracker: str):
    """Three senders: 20 steps, then resumed from step 10 and on to 30, then the whole run."""
    for steps in (20, 10, 30):
        training(run, steps)
        Sender(files(run), tracker, config(tracker)).send()
    identity = json.loads(note_path(run, tracker).read_text())["id"]
    note(run, outcome="done", until=None)
    assert send_here(run, tracker)._note.id == identity
    for stage, column in (("train_sft", "loss"), ("train_policy", "kl_mean")):
        check_same(sorted(curve(tracker, tmp_path, stage, column)), written(run, stage, column))


@pytest.mark.parametrize("change", ["params", "rows"])
def test_another_run_in_the_folder_is_another_run_in_the_tracker(run: Path, tmp_path: Path, change: str):
    first = send_here(run, "tensorboard")._note.id
    if change == "params":
        apply_overrides(run / "params.yaml", {"seed": 5})
    else:
        path = run / "plots/train_sft.csv"
        path.write_text(path.read_text().replace("\n1,", "\n1,", 1).replace(path.read_text().splitlines()[2], "1,pretrain,9.5,,,", 1))
    second = send_here(run, "tensorboard")._note.id
    assert first != second and {path.name for path in (tmp_path / "events").iterdir()} == {first, second}
    assert send_here(run, "tensorboard")._note.id == second, "nothing has changed since"


def test_rows_of_a_killed_sender_are_sent_in_the_same_way(run: Path, tmp_path: Path, monkeypatch):
    """MLflow has got them, and the note doesn't say so: the same time and value make one point."""
    sender = Sender(files(run), "mlflow", config("mlflow"))
    monkeypatch.setattr(type(sender.sink), "figures", lambda *_: os.kill(os.getpid(), 0))  # quicker
    keep = Sender._keep

    def killed_before(self: Sender, **fields: Any) -> None:
        if fields.get("pending", 0) is None:
            raise KeyboardInterrupt
        keep(self, **fields)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Sender, "_keep", killed_before)
        sender.send()
    assert json.loads(note_path(run, "mlflow").read_text())["pending"][:2] == ["train_sft", 0]
    send_here(run, "mlflow")
    check_same(sorted(curve("mlflow", tmp_path, "train_sft", "loss")), written(run, "train_sft", "loss"))


def test_a_run_that_mlflow_has_deleted_is_sent_whole_as_another(run: Path, tmp_path: Path):
    """Also where it was deleted while the run goes on."""
    training(run, 20)
    sender = Sender(files(run), "mlflow", config("mlflow"))
    sender.send()
    client, (first,) = mlflow_runs(tmp_path)
    client.delete_run(first.info.run_id)
    note(run, outcome="done", until=None)
    with pytest.raises(Exception, match="must be in the 'active' state"):
        sender.send()
    second = send_here(run, "mlflow")._note.id
    assert second != first.info.run_id
    check_same(sorted(curve("mlflow", tmp_path, "train_sft", "loss")), written(run, "train_sft", "loss"))
    assert send_here(run, "mlflow")._note.id == second, "nothing was deleted since"
    client.delete_experiment(first.info.experiment_id)
    with pytest.raises(
        ConfigError, match=f"deleted; restore it by `mlflow experiments restore --experiment-id {first.info.experiment_id}`"
    ):
        send_here(run, "mlflow")


@pytest.mark.parametrize("tracker", KEYS)
def test_another_place_gets_the_whole_run(run: Path, tmp_path: Path, tracker: str):
    send_here(run, tracker)
    (tmp_path / "other").mkdir()
    place = {"wandb": "other", "tensorboard": "other/events", "mlflow": f"sqlite:///{tmp_path}/other/mlflow.db"}[tracker]
    send_here(run, tracker, **{tracker: place})
    root = tmp_path if tracker == "wandb" else tmp_path / "other"
    found = curve(tracker, root, "train_sft", "loss")
    assert len(found) == len(written(run, "train_sft", "loss")) * (2 if tracker == "wandb" else 1)


def test_results_of_an_earlier_run_arent_sent(run: Path):
    """While SFT trains, the folder still has the curves of the chain before."""
    note(run, outcome="running", stage="train_sft")
    assert [part.name for part in files(run).reached()[0]][-1] == "check_model"
    assert [*files(run).curves()] == [] and not any(name.startswith("results/evaluate") for name in files(run).figures())
    training(run, 5)
    assert [stage for stage, _ in RunFiles(run, files(run).params, since=time.time() + 5).curves()] == ["train_sft", "train_reward"]


def test_a_rejected_gate_is_sent(run: Path):
    note(run, outcome="GateRejected", stage="gate_reward")
    assert files(run).figures()["results/gate_reward/passed"] is True


def closed_port() -> Iterator[str]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"  # bound, and nobody listens: refused


def silent_port() -> Iterator[str]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(50)  # the kernel accepts, nobody answers
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize(
    ("tracker", "opened"),
    [
        ("wandb", silent_port),
        ("mlflow", closed_port),
        pytest.param("wandb", closed_port, marks=pytest.mark.long),
        pytest.param("mlflow", silent_port, marks=pytest.mark.long),
    ],
)
def test_a_tracker_that_is_down_neither_stops_nor_slows_a_run(
    run: Path, tmp_path: Path, monkeypatch, caplog, tracker: str, opened: Callable[[], Iterator[str]]
):
    monkeypatch.setattr(processes, "END_SECONDS", 3.0)
    address = opened()
    url = next(address)
    if tracker == "wandb":
        for name, value in {"WANDB_MODE": "online", "WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40}.items():
            monkeypatch.setenv(name, value)
    began = time.monotonic()
    with tracked(run, config(**{tracker: url if tracker == "mlflow" else "made"})):
        started = time.monotonic() - began
        training(run, 20)
        time.sleep(2.0)
        note(run, outcome="done", until=None)
    assert started < 5.0 and time.monotonic() - began < started + 2.0 + 3.0 + 8.0
    assert "`rlhf track one` sends the rest" in caplog.text and tracker in caplog.text
    left = [p for p in psutil.process_iter(["cmdline"]) if "flows.trackers" in (p.info["cmdline"] or []) and str(run) in p.info["cmdline"]]
    assert left == []
    address.close()


@pytest.mark.parametrize("tracker", ["wandb", pytest.param("mlflow", marks=pytest.mark.long)])
def test_what_a_tracker_missed_is_sent_later_although_its_process_was_killed(run: Path, tmp_path: Path, monkeypatch, tracker: str):
    for name in ("WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    note(run, outcome="running", stage="train_policy")
    with tracked(run, config(tracker)):
        training(run, 20)
        until = time.monotonic() + 60
        while not (note_path(run, tracker).is_file() and "train_policy" in json.loads(note_path(run, tracker).read_text())["curves"]):
            assert time.monotonic() < until, "expected 20 steps to be sent"
            time.sleep(0.2)
        for process in psutil.Process().children():
            if "flows.trackers" in process.cmdline():
                process.send_signal(signal.SIGKILL)
        training(run, 30)
        note(run, outcome="done", until=None)
    assert send(run, config(tracker)) == [tracker]
    check_same(sorted(curve(tracker, tmp_path, "train_policy", "kl_mean")), written(run, "train_policy", "kl_mean"))


def test_a_tracker_sees_its_own_credentials_only(run: Path, monkeypatch):
    secrets = ("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN")
    for name in (*secrets, "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "1")
    seen = {name: set(secrets) & set(_environment(name, run, ROOT)) for name in KEYS}
    assert seen == {"wandb": {"WANDB_API_KEY"}, "mlflow": {"MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD"}, "tensorboard": set()}
    assert "MLFLOW_HTTP_REQUEST_TIMEOUT" in _environment("mlflow", run, ROOT)


def test_a_run_whose_params_cant_be_read_is_named_as_the_problem(run: Path, caplog):
    (run / "params.yaml").write_text("seed: many\n")
    assert send(run, config("tensorboard")) == []
    assert "params.yaml" in caplog.text and "it ended early" not in caplog.text


def test_a_message_with_a_credential_is_withheld(run: Path):
    gate = json.loads((run / "metrics/gate.json").read_text())
    secret = "hf" + "_" + "QZpLmXwRtYvBnKdSgHjCfTuEaOiPqWzXcV"
    (run / "metrics/gate.json").write_text(json.dumps(gate | {"message": f"rejected; token {secret}"}))
    assert files(run).figures()["results/gate_reward/message"] == WITHHELD


def test_a_package_that_is_missing_is_named_before_the_run(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"expected the package of mlflow, got none; `pip install -e '\.\[track\]'` installs it"):
        check_installed(config("mlflow"))


def test_rlhf_track_sends_a_finished_run_and_refuses_what_it_cant_do(run: Path, tmp_path: Path, capsys):
    assert track(["one", "--set", "tracking.tensorboard_dir=events"]) == 0
    assert (
        capsys.readouterr().out == "one: sent to tensorboard\n" and len(curve("tensorboard", tmp_path, "train_policy", "kl_mean")) == STEPS
    )
    assert track(["one"]) == 2 and "expected a tracker, got none" in capsys.readouterr().err
    assert track(["runs", "--set", "tracking.tensorboard_dir=events"]) == 2 and "expected a run's folder" in capsys.readouterr().err
    assert track(["one", "--set", "rl.steps=3"]) == 2 and "expected keys of `tracking`, got rl.steps" in capsys.readouterr().err


def test_a_table_is_text_that_is_no_markdown():
    from markdown import markdown as as_page

    table = [{"prompt": "Sort | 4172.", "response": "<img src=x> *1247*\n[no](x)", "score": None}] * 2
    page = as_page(markdown(table), extensions=["markdown.extensions.tables"])  # as TensorBoard does
    assert page.count("<tr>") == 3 and "<img" not in page and "<em>" not in page and "<a " not in page


def test_configured_trackers_are_those_with_a_place():
    assert configured(config("mlflow", "wandb")) == ["wandb", "mlflow"] and configured(config()) == []
