"""Lists the cells of the matrix: stage, affected process, fault, and the expected message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGSTOP, SIGTERM
from typing import Literal

from tools.faults import faults
from tools.faults.faults import Strike, Undo

STAGES = [
    *("prepare_data", "validate_data", "check_model", "train_sft", "train_reward", "gate_reward"),
    *("train_policy", "evaluate", "report"),
]
RESUMABLE = ("train_sft", "train_reward", "train_policy")


@dataclass(frozen=True)
class Cell:
    """One fault.

    message: regular expression that a printed line must match; it names the process or file at fault.
    survives: whether the disturbed command succeeds.
    flow: whether the flow runs; otherwise `dvc repro` runs the stage alone.
    prepare: set-up before the stage starts.
    again: whether the stage has to run; otherwise it is up to date when the fault happens.
    """

    stage: str
    process: str
    fault: str
    message: str
    strike: Strike
    survives: bool = False
    flow: bool = False
    variant: Literal["one", "two", "none", "ranks", "sharded", "longer", "inference"] = "one"
    prepare: Callable[[Path, str], Undo] | None = None
    again: bool = True
    timeout: float | None = None  # flow.stage_timeout
    ends_first: bool = False  # undo `prepare` before the search for leftovers

    @property
    def name(self) -> str:
        return f"{self.stage}-{self.process}-{self.fault}-{self.variant}".replace(" ", "-").replace(",", "")


def of_stages() -> list[Cell]:
    """Cells that send SIGKILL and SIGTERM to each stage."""
    cells = []
    for stage in STAGES:
        resumes, kept = stage in RESUMABLE, " to resume from its checkpoint" if stage in RESUMABLE else ""
        module = "train_rl" if stage == "train_policy" else stage
        killed = f"failed to run: exec python -m tasks.{module}, exited with -9"
        cells.append(Cell(stage, "stage", "SIGKILL", killed, faults.send(SIGKILL, checkpointed=resumes)))
        stopped = f"{stage}: stopped by a signal; run it again{kept}"
        if not resumes:  # SIGTERM may arrive during imports, before the handler is installed
            stopped += f"|exec python -m tasks.{module}, exited with -15"
        cells.append(Cell(stage, "stage", "SIGTERM", stopped, faults.send(SIGTERM, checkpointed=resumes)))
    return cells


def around_stages() -> list[Cell]:
    """Cells for the processes above a stage, which behave the same for each stage."""
    sft, late = "train_sft", r"expected to end within flow.stage_timeout=\d+ s"
    stopped = "train_sft: stopped by a signal; run it again to resume from its checkpoint"
    return [
        Cell(sft, "dvc", "SIGKILL", stopped, faults.send(SIGKILL, "dvc")),
        Cell(sft, "dvc", "SIGTERM", stopped, faults.send(SIGTERM, "dvc")),
        Cell(
            sft, "flow", "SIGKILL", r"resuming from the checkpoint of step \d+", faults.send_to_command(SIGKILL), flow=True
        ),  # DVC and the stage end without a message
        Cell(sft, "flow", "SIGTERM", stopped, faults.send_to_command(SIGTERM), flow=True),
        Cell(sft, "flow", "SIGSTOP for 8 s", "Report: ", faults.send_to_command(SIGSTOP, seconds=8), flow=True, survives=True),
        Cell(sft, "stage", "SIGSTOP", late, faults.send(SIGSTOP), flow=True, survives=True, timeout=45),
        Cell(sft, "dvc", "SIGSTOP", late, faults.send(SIGSTOP, "dvc"), flow=True, timeout=30, survives=True),
        Cell("train_policy", "stage", "SIGSTOP", late, faults.send(SIGSTOP), flow=True, survives=True, timeout=120),
    ]


def of_ray() -> list[Cell]:
    """Cells for the processes of the RL job."""
    rl = "train_policy"
    dead, late = "rank {}: expected [a-z_ ]+ to finish, got a dead process", "rank {}: expected [a-z_ ]+ to finish, got no answer within"
    replaced = r".*replaced \(\d of at most rl.max_replacements=2\), and the call is repeated"
    head = "expected the head to answer within cluster.silence_timeout"
    crashed = r"RL job: expected exit code 0, got "
    stopped = "train_policy: stopped by a signal"
    any_rank = "[01]"
    return [
        Cell(rl, "Ray head's keeper", "SIGKILL", "train_policy: done in", faults.send(SIGKILL, "keeper"), survives=True),
        Cell(rl, "raylet", "SIGKILL", head, faults.send(SIGKILL, "raylet")),
        Cell(rl, "Ray GCS", "SIGKILL", head, faults.send(SIGKILL, "gcs")),
        Cell(rl, "Ray GCS", "SIGSTOP", head, faults.send(SIGSTOP, "gcs")),
        Cell(rl, "Ray dashboard", "SIGSTOP", head, faults.send(SIGSTOP, "dashboard")),
        Cell(rl, "job driver", "SIGKILL", crashed, faults.send(SIGKILL, "driver")),
        Cell(rl, "job driver", "SIGTERM", stopped, faults.send(SIGTERM, "driver")),
        Cell(rl, "job driver", "SIGSTOP", "expected a sign of life of its driver within", faults.send(SIGSTOP, "driver")),
        Cell(rl, "trainer", "SIGKILL", "trainer " + dead.format(0), faults.send(SIGKILL, "trainer")),
        Cell(rl, "trainer, 2 ranks", "SIGKILL", "trainer " + dead.format(any_rank), faults.send(SIGKILL, "trainer"), variant="two"),
        Cell(rl, "trainer, 2 ranks", "SIGSTOP", r"trainer rank [01].*: stopped", faults.send(SIGSTOP, "trainer"), variant="two"),
        Cell(rl, "trainer", "SIGTERM", "trainer " + dead.format(0), faults.send(SIGTERM, "trainer")),
        Cell(rl, "vLLM", "SIGKILL", "rollout " + dead.format(0) + replaced, faults.send(SIGKILL, "rollout"), survives=True),
        Cell(rl, "vLLM", "SIGTERM", "rollout " + dead.format(0) + replaced, faults.send(SIGTERM, "rollout"), survives=True),
        Cell(rl, "vLLM", "SIGSTOP", "rollout " + late.format(0) + replaced, faults.send(SIGSTOP, "rollout"), survives=True),
        Cell(
            rl,
            *("vLLM, 2 engines", "SIGKILL"),
            "rollout " + dead.format(any_rank) + replaced,
            faults.send(SIGKILL, "rollout"),
            survives=True,
            variant="two",
        ),
        Cell(
            rl,
            *("vLLM, none may be replaced", "SIGKILL"),
            "rollout " + dead.format(0) + ".*rl.max_replacements=0 allows no more",
            faults.send(SIGKILL, "rollout"),
            variant="none",
        ),
        Cell(rl, "scorer", "SIGKILL", "scorer " + dead.format(0) + replaced, faults.send(SIGKILL, "scorer"), survives=True),
        Cell(rl, "scorer", "SIGSTOP", "scorer " + late.format(0) + replaced, faults.send(SIGSTOP, "scorer"), survives=True),
    ]


def of_transfers() -> list[Cell]:
    """Cells in which an actor of the RL job is lost between the first and the last layer of a weight transfer."""
    rl, kill, stop = "train_policy", "SIGKILL", "SIGSTOP"
    engine = "rollout rank [01]: expected receive_weights to finish, got {}.*and the call is repeated"
    rank = "trainer rank [01]: expected send_weights to finish, got a dead process"
    killed, hangs = engine.format("a dead process"), engine.format("no answer within")
    kill_engine, kill_rank = faults.send_in_transfer(SIGKILL, "rollout"), faults.send_in_transfer(SIGKILL, "trainer")
    return [
        Cell(rl, "vLLM, in a weight transfer", kill, killed, kill_engine, survives=True),
        Cell(rl, "vLLM, in a weight transfer", stop, hangs, faults.send_in_transfer(SIGSTOP, "rollout"), survives=True),
        Cell(
            *(rl, "vLLM, 2 engines, in a weight transfer", kill, killed, faults.kill_one_of_the_engines),
            survives=True,
            variant="two",
        ),
        Cell(rl, "trainer, in a weight transfer", kill, rank, kill_rank),
        Cell(rl, "trainer, 2 ranks, in a weight transfer", kill, rank, kill_rank, variant="two"),
        Cell(rl, "trainer, 2 ranks, ZeRO 3, in a weight transfer", kill, rank, kill_rank, variant="sharded"),
    ]


def of_ranks() -> list[Cell]:
    """Cells for the Ray job of a stage other than RL on two ranks."""
    sft, dead = "train_sft", "training rank [01]: expected (its work|start) to finish, got a dead process"
    hanging = r"training rank [01]: expected its work to finish, got no answer within cluster.rank_timeout=\d+ s"
    crashed, silent = "training on 2 ranks: expected exit code 0", "expected a sign of life of its driver within"
    stopped = "train_sft: stopped by a signal; run it again to resume from its checkpoint"
    return [
        Cell(sft, "rank", "SIGKILL", dead, faults.send(SIGKILL, "rank"), variant="ranks"),
        Cell(sft, "rank", "SIGTERM", dead, faults.send(SIGTERM, "rank"), variant="ranks"),
        Cell(sft, "rank", "SIGSTOP", hanging, faults.send(SIGSTOP, "rank"), variant="ranks"),
        Cell(sft, "driver of ranks", "SIGKILL", crashed, faults.send(SIGKILL, "driver"), variant="ranks"),
        Cell(sft, "driver of ranks", "SIGSTOP", silent, faults.send(SIGSTOP, "driver"), variant="ranks"),
        Cell(sft, "stage on ranks", "SIGTERM", stopped, faults.send(SIGTERM), variant="ranks"),
        Cell(
            "evaluate",
            "rank",
            "SIGKILL",
            dead,
            faults.send(SIGKILL, "rank", checkpointed=False),
            variant="inference",
        ),
    ]


def of_files() -> list[Cell]:
    """Cells for disks, checkpoints and DVC's cache."""
    no_space, read_only = "No space left on device|free on the disk of", "Read-only file system"
    back = r"checkpoint of step \d+: .*going back to the one before"
    cells = [Cell(stage, "disk", "full, at a checkpoint", no_space, faults.full_disk, prepare=faults.small_disk) for stage in RESUMABLE]
    cells += [
        Cell("train_sft", "disk", "full, at the end", no_space, faults.just_run, prepare=faults.full_models),
        Cell("train_sft", "scratch/", "read-only", read_only, faults.just_run, prepare=faults.read_only("scratch")),
        Cell("train_sft", "models/", "read-only", read_only, faults.just_run, prepare=faults.read_only("models")),
        Cell("train_sft", "DVC's cache", "read-only", read_only, faults.just_run, prepare=faults.read_only(".dvc/cache")),
        Cell("report", "reports/", "read-only", read_only, faults.just_run, prepare=faults.read_only("reports")),
    ]
    cells += [Cell(stage, "checkpoint", "a bit flipped", back, faults.corrupt_checkpoint(faults.flip_a_bit)) for stage in RESUMABLE]
    cells += [
        Cell("train_sft", "checkpoint", "manifest torn", back, faults.corrupt_checkpoint(faults.tear_manifest)),
        Cell(
            *("train_sft", "DVC's cache", "a bit flipped"),
            "got a damaged models/sft; removed there, and the stage runs again",
            faults.just_run,
            flow=True,
            prepare=faults.corrupt_cache,
            again=False,
            survives=True,
        ),
    ]
    return cells


def of_clocks() -> list[Cell]:
    """Cells that change the clock."""
    cells = []
    for stage in ("train_sft", "train_policy"):
        for seconds, direction in ((faults.CLOCK_STEP, "forward"), (-faults.CLOCK_STEP, "back")):
            prepare = faults.preload_clock(seconds)
            cells.append(Cell(stage, "clock", f"an hour {direction}", f"{stage}: done in", faults.jump, survives=True, prepare=prepare))
    return cells


def of_nodes() -> list[Cell]:
    """Cells on an existing cluster (cluster.address) of several nodes, with one actor per node."""
    rl, dead = "train_policy", "rank 0: expected [a-z_ ]+ to finish, got a dead process"
    return [
        Cell(
            *(rl, "node of vLLM, another is free", "lost"),
            f"rollout {dead}.*call is repeated",
            faults.lose_node_of("rollout"),
            survives=True,
            prepare=faults.nodes(3),
            ends_first=True,
            variant="longer",
        ),
        Cell(
            *(rl, "node of vLLM, none is free", "lost"),
            r"rollout: expected room for 1 x \(1 CPU\) within .* got none \(2 nodes: 1 CPU",
            faults.lose_node_of("rollout"),
            prepare=faults.nodes(2),
            ends_first=True,
            variant="longer",
        ),
        Cell(
            *(rl, "node of vLLM and a trainer", "lost"),
            f"trainer {dead}",
            faults.lose_node_of("rollout"),
            prepare=faults.nodes(1, cpus=2),
            ends_first=True,
            variant="longer",
        ),
        Cell(
            *(rl, "node of a trainer", "lost"),
            f"trainer {dead}",
            faults.lose_node_of("trainer"),
            prepare=faults.nodes(3),
            ends_first=True,
            variant="longer",
        ),
    ]


def all_cells() -> list[Cell]:
    return [*of_stages(), *around_stages(), *of_ray(), *of_transfers(), *of_ranks(), *of_nodes(), *of_files(), *of_clocks()]
