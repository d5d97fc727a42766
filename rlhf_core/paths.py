"""Where each file of a run lies, relative to its workspace. Stages, flows and reports take the paths from here.

dvc.yaml and rounds/dvc.yaml name the same paths, as dependencies and outputs.
"""

from __future__ import annotations

from pathlib import Path

DATA = Path("data")
INPUTS = DATA / "inputs.json"  # hashes of what the run reads from outside the project
PREPARED = DATA / "prepared"  # tables and sources.json
MEASURED = DATA / "measured"  # what validate_data judges the tables by
SOURCES = PREPARED / "sources.json"
REWARD_HELDOUT = DATA / "reward_heldout.parquet"  # the reward model's scores of held-out pairs
EVALUATION_SAMPLES = DATA / "evaluation_samples.parquet"
ROLLOUTS = DATA / "rollouts.parquet"  # of some steps of RL
LABELS = DATA / "labels"  # of people, imported

MODELS = Path("models")
TOKENIZER = MODELS / "tokenizer"
SFT_MODEL = MODELS / "sft"
REWARD_MODEL = MODELS / "reward"
POLICY_MODEL = MODELS / "policy"
PROMOTED = MODELS / "promoted"  # versions fetched from the registry, one folder each

METRICS = Path("metrics")
STAGE_METRICS = {
    "prepare_data": METRICS / "prepare_data.json",
    "validate_data": METRICS / "validation.json",
    "check_model": METRICS / "check_model.json",
    "train_sft": METRICS / "train_sft.json",
    "train_reward": METRICS / "train_reward.json",
    "gate_reward": METRICS / "gate.json",
    "train_policy": METRICS / "train_policy.json",
    "evaluate": METRICS / "evaluate.json",
}
GATE_METRICS = STAGE_METRICS["gate_reward"]
EVALUATION_METRICS = STAGE_METRICS["evaluate"]

# Written by a check that has passed, for train_sft to depend on: the same for every method and engine, so that SFT is shared among them.
CHECKS = Path("checks")
DATA_ACCEPTED = CHECKS / "data.json"
MODEL_ACCEPTED = CHECKS / "model.json"

PLOTS = Path("plots")
CURVES = {stage: PLOTS / f"{stage}.csv" for stage in ("train_sft", "train_reward", "train_policy")}
TOKEN_LENGTHS = PLOTS / "token_lengths.csv"
EVALUATION_PROMPTS = PLOTS / "evaluation.csv"  # the evaluation's results, one row a prompt

REPORTS = Path("reports")
REPORT = REPORTS / "report.html"
STOPPED_REPORT = REPORTS / "stopped.html"  # of a chain that ended early
DATA_DOCS = REPORTS / "data_docs"
CHECK_MODEL_FIGURES = REPORTS / "check_model.json"
TIMINGS = REPORTS / "timings"  # outside DVC: no two runs take the same time
STATE_DIGESTS = REPORTS / "digests"  # of a finished stage's last checkpoints; outside DVC as well

SCRATCH = Path("scratch")  # checkpoints of unfinished work
JUDGE_ANSWERS = SCRATCH / "judges"  # of language models that judge, so that none is asked twice
RUNS = Path("runs")  # worktrees

ROUNDS = Path("rounds")  # of iterative DPO
ROUNDS_PIPELINE = ROUNDS / "dvc.yaml"
ROUNDS_FILE = ROUNDS / "rounds.yaml"
ROUNDS_FIGURE = ROUNDS / "rounds.svg"
ROUNDS_TABLE = ROUNDS / "rounds.md"


def processes_file(timings: Path) -> Path:
    """Where the processes of an RL job ran, beside the job's timings, since it differs between runs too."""
    return timings.with_suffix(".processes.json")


def round_folder(number: int) -> Path:
    """Everything that round `number` writes."""
    return ROUNDS / str(number)
