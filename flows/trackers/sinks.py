"""The trackers: wandb, TensorBoard and MLflow behind one interface."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from flows.trackers.contents import Point, Value, flat
from rlhf_core.config import ConfigError, TrackingConfig

Rows = Sequence[Mapping[str, Any]]
TEXT_ROWS = 16  # of a table in TensorBoard, which shows it as text
FLUSH_SECONDS = 0.2  # after which wandb's own process has written what it was given to its file, also online
BATCH = 100  # params or tags that MLflow takes at once; of metrics it takes 1,000
_MARKS = re.compile(r"[^\w\s.,;]")  # characters that may mean something in Markdown or HTML
_NOT_IN_MLFLOW = re.compile(r"[^\w\-. :/]")


class Sink(Protocol):
    """One run in a tracker.

    id: by which the tracker continues the run after an interruption.
    position: number of points and tables that were sent to it before. at: Unix time of the points.
    """

    id: str

    @staticmethod
    def lost(config: TrackingConfig, run_id: str) -> bool:
        """Whether the tracker no longer has a run that it had; False where only the user can know."""

    def settings(self, params: dict[str, Any], lineage: dict[str, str]) -> None: ...

    def points(self, stage: str, points: Sequence[Point], position: int, at: float) -> None: ...

    def figures(self, figures: dict[str, Value]) -> None: ...

    def table(self, name: str, step: int, rows: Rows, position: int) -> None: ...

    def file(self, path: Path) -> None: ...

    def close(self, *, ended: bool, good: bool) -> None:
        """Close the tracker, with the run's end if it has ended."""


class Wandb:
    """A run of wandb, of whose curves each has its stage's own steps. WANDB_MODE is offline unless the environment sets it."""

    def __init__(self, config: TrackingConfig, name: str, run_id: str):
        import wandb

        self._wandb, self.id = wandb, run_id
        # No host, command line, git remote or terminal: what identifies the run is in the lineage.
        quiet = wandb.Settings(
            silent=True,
            console="off",
            x_transaction_log_flush_interval=FLUSH_SECONDS,
            x_save_requirements=False,
            disable_git=True,
            disable_code=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
        )
        folder = os.environ.get("WANDB_DIR", os.getcwd())
        self._run = wandb.init(project=config.wandb_project, id=run_id, name=name, resume="allow", dir=folder, settings=quiet)
        self._known: set[str] = set()

    @staticmethod
    def lost(config: TrackingConfig, run_id: str) -> bool:
        return False  # files in wandb/ may have been sent and removed

    def settings(self, params: dict[str, Any], lineage: dict[str, str]) -> None:
        self._run.config.update({**params, "lineage": lineage}, allow_val_change=True)

    def points(self, stage: str, points: Sequence[Point], position: int, at: float) -> None:
        if stage not in self._known:
            self._run.define_metric(f"{stage}/step", hidden=True)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
            self._known.add(stage)
        for number, (step, values) in enumerate(points, position):
            self._run.log({f"{stage}/step": step, **{f"{stage}/{name}": value for name, value in values.items()}}, step=number, commit=True)
        time.sleep(3 * FLUSH_SECONDS)  # a kill from here on loses none of them

    def figures(self, figures: dict[str, Value]) -> None:
        self._run.summary.update(figures)

    def table(self, name: str, step: int, rows: Rows, position: int) -> None:
        shown = self._wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({f"{name}_step": step, name: shown}, step=position, commit=True)

    def file(self, path: Path) -> None:
        artifact = self._wandb.Artifact(f"report-{self.id}", type="report")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def close(self, *, ended: bool, good: bool) -> None:
        self._run.finish(exit_code=0 if good or not ended else 1)


class TensorBoard:
    """A folder of event files. Values of a stage are named STAGE/NAME; the report is a file beside them."""

    def __init__(self, config: TrackingConfig, name: str, run_id: str):
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.id, self._folder = run_id, Path(config.tensorboard_dir or "") / run_id
        self._writer = EventFileWriter(str(self._folder))

    @staticmethod
    def lost(config: TrackingConfig, run_id: str) -> bool:
        return not (Path(config.tensorboard_dir or "") / run_id).is_dir()

    def settings(self, params: dict[str, Any], lineage: dict[str, str]) -> None:
        for title, facts in (("params", flat(params, records=True)), ("lineage", lineage)):
            self._text(title, 0, [{"key": key, "value": value} for key, value in facts.items()])

    def points(self, stage: str, points: Sequence[Point], position: int, at: float) -> None:
        for step, values in points:
            self._numbers(step, {f"{stage}/{name}": value for name, value in values.items()}, at)

    def figures(self, figures: dict[str, Value]) -> None:
        texts = {name: value for name, value in figures.items() if isinstance(value, str)}
        self._numbers(0, {name: float(value) for name, value in figures.items() if name not in texts}, time.time())
        for name, value in texts.items():
            self._text(name, 0, [{"text": value}])

    def table(self, name: str, step: int, rows: Rows, position: int) -> None:
        self._text(name, step, rows[:TEXT_ROWS])

    def file(self, path: Path) -> None:
        shutil.copyfile(path, self._folder / path.name)

    def close(self, *, ended: bool, good: bool) -> None:
        self._writer.close()

    def _numbers(self, step: int, values: Mapping[str, float], at: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        if values:
            self._write(step, Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]), at)

    def _text(self, name: str, step: int, rows: Rows) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata

        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, string_val=[markdown(rows).encode()], tensor_shape=shape)
        metadata = create_summary_metadata(display_name=name, description="")
        self._write(step, Summary(value=[Summary.Value(tag=f"{name}/text_summary", metadata=metadata, tensor=tensor)]), time.time())

    def _write(self, step: int, summary: Any, at: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=at, step=step, summary=summary))
        self._writer.flush()


class Mlflow:
    """A run of MLflow. Params are params, lineage and texts are tags, samples and the report are artifacts."""

    EXPERIMENT = "rlhf"

    def __init__(self, config: TrackingConfig, name: str, run_id: str):
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=config.mlflow_uri)
        self.id = run_id if self._client_has(run_id) else self._begin(name, run_id)

    @staticmethod
    def lost(config: TrackingConfig, run_id: str) -> bool:
        from mlflow import MlflowClient, MlflowException

        try:
            return MlflowClient(tracking_uri=config.mlflow_uri).get_run(run_id).info.lifecycle_stage == "deleted"
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return True

    def _client_has(self, run_id: str) -> bool:
        """Whether the id is one that MLflow gave; the run then runs again."""
        if re.fullmatch("[0-9a-f]{32}", run_id) is None:  # ours have a hyphen
            return False
        self._client.update_run(run_id, status="RUNNING")
        return True

    def _begin(self, name: str, run_id: str) -> str:
        """Make the run, or find the one that an interrupted start has made, and return its id."""
        experiment = self._client.get_experiment_by_name(self.EXPERIMENT)
        number = self._client.create_experiment(self.EXPERIMENT) if experiment is None else experiment.experiment_id
        if experiment is not None and experiment.lifecycle_stage == "deleted":
            raise ConfigError(
                f"tracking.mlflow_uri: expected MLflow's experiment {self.EXPERIMENT}, got one that was deleted; restore it by "
                f"`mlflow experiments restore --experiment-id {number}` with MLFLOW_TRACKING_URI set to that address"
            )
        if found := self._client.search_runs([number], filter_string=f"tags.rlhf_run = '{run_id}'"):
            return found[0].info.run_id
        return self._client.create_run(number, run_name=name, tags={"rlhf_run": run_id}).info.run_id

    def settings(self, params: dict[str, Any], lineage: dict[str, str]) -> None:
        from mlflow.entities import Param

        for part in _parts(flat(params, records=True).items(), BATCH):
            self._client.log_batch(self.id, params=[Param(_allowed(key), str(value)[:6000]) for key, value in part])
        self._tags({"mlflow.source.git.commit": lineage["commit"], **{f"lineage.{key}": value for key, value in lineage.items()}})

    def points(self, stage: str, points: Sequence[Point], position: int, at: float) -> None:
        self._numbers(((f"{stage}/{name}", value, step) for step, values in points for name, value in values.items()), at)

    def figures(self, figures: dict[str, Value]) -> None:
        texts = {name: value for name, value in figures.items() if isinstance(value, str)}
        self._numbers(((name, float(value), 0) for name, value in figures.items() if name not in texts), time.time())
        self._tags(texts)

    def table(self, name: str, step: int, rows: Rows, position: int) -> None:
        content = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
        self._client.log_text(self.id, json.dumps(content, ensure_ascii=False), f"{name}/{step:06d}.json")

    def file(self, path: Path) -> None:
        self._client.log_artifact(self.id, str(path), "report")

    def close(self, *, ended: bool, good: bool) -> None:
        self._client.set_terminated(self.id, "KILLED" if not ended else "FINISHED" if good else "FAILED")

    def _numbers(self, values: Iterable[tuple[str, float, int]], at: float) -> None:
        from mlflow.entities import Metric

        for part in _parts(values, 1000):
            self._client.log_batch(self.id, metrics=[Metric(_allowed(name), value, int(at * 1000), step) for name, value, step in part])

    def _tags(self, texts: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        for part in _parts(texts.items(), BATCH):
            self._client.log_batch(self.id, tags=[RunTag(_allowed(key), str(value)[:5000]) for key, value in part])


def _allowed(name: str) -> str:
    """A name without the characters that MLflow refuses."""
    return _NOT_IN_MLFLOW.sub("_", name)[:250]


def _parts(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    items = list(items)
    yield from (items[start : start + size] for start in range(0, len(items), size))


def markdown(rows: Rows) -> str:
    """A Markdown table in which texts are neither Markdown nor HTML."""

    def cell(value: object) -> str:
        text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
        return _MARKS.sub(lambda found: f"&#{ord(found[0])};", text).replace("\n", "<br>")

    heads = [" | ".join(map(cell, rows[0])), " | ".join("---" for _ in rows[0])] if rows else []
    return "\n".join([*heads, *(" | ".join(map(cell, row.values())) for row in rows)])


# Name -> what connects to it, the key of `tracking` that switches it on, the package that it needs, and variables with its credentials.
SINKS: dict[str, type] = {"wandb": Wandb, "tensorboard": TensorBoard, "mlflow": Mlflow}
SWITCHES = {"wandb": "wandb_project", "tensorboard": "tensorboard_dir", "mlflow": "mlflow_uri"}
CREDENTIALS = {
    "wandb": {"WANDB_API_KEY"},
    "tensorboard": set(),
    "mlflow": {"MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"},
}


def configured(config: TrackingConfig) -> list[str]:
    """The trackers that params.yaml switches on."""
    return [name for name, key in SWITCHES.items() if getattr(config, key) is not None]
