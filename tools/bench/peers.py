"""Compares speed with TRL's: python -m tools.bench.peers [--cases ...] [--models small medium] [--rounds N] ...

Both sides do the same work (workload.py) in alternating fresh processes: ours, theirs, ours, theirs. The time counts from the end of the
warm-up to the end of the last step; loading, tokenizing and precomputed references are excluded. A round whose losses differ stops the run.
A pretrained model takes --model FOLDER --pairs FILE, with smaller learning rates and responses of 48 tokens:
--rounds 2 --steps 3 --warmup 1 --batch-size 4 --online-steps 2 --online-warmup 1 --samples 16 takes some minutes.
Writes peers.json, peers.md and peers.svg into --out after each case.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core.config import ArchitectureConfig, ClerkConfig, ExternalPairsConfig, ModelConfig
from rlhf_core.data.clerk.generator import clerk_rows
from rlhf_core.data.schema import Message
from rlhf_core.preparation.sources import load_source
from rlhf_core.process import configure_process
from tools.bench.workload import ONLINE, Run, Workload, workloads_to_json, write_jsonl
from tools.clerk import clerk_params

ROOT = Path(__file__).parents[2]
SIDES = ("ours", "theirs")
# Generation one step ahead, for which TRL has no option. Responses may end early.
AHEAD = {"rollout.max_lag": 1, "rollout.engines": 1, "rollout.min_new_tokens": 0}
PYTORCH = {"rollout.backend": "pytorch", "trainer.ranks": 2}
# RLOO has the KL in the reward and so needs old log-probabilities before the update: the engine's, an eighth of them compared with the
# trainer's. That requires the whole distribution, so responses may end early, as on TRL's side.
TRUSTED = {"rollout.min_new_tokens": 0, "rollout.recomputed_fraction": 0.125}
# case: method, and overrides of its section of params.yaml
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {}),
    "reward": ("reward", {}),
    "dpo, reference precomputed": ("dpo", {"nll_coef": 0.0}),
    "dpo, reference live": ("dpo", {"nll_coef": 0.0, "reference": "live"}),
    "grpo": ("grpo", {}),
    "rloo": ("rloo", {}),
    "grpo, PyTorch rollouts": ("grpo", PYTORCH),
    "rloo, PyTorch rollouts": ("rloo", PYTORCH | TRUSTED),
    "grpo, one step off policy": ("grpo", AHEAD),
    "rloo, one step off policy": ("rloo", AHEAD),
}
MODELS = {
    "small": ArchitectureConfig(hidden_size=96, intermediate_size=256, layers=3, heads=3, vocab_size=390),  # 0.4 M parameters
    "medium": ArchitectureConfig(hidden_size=256, intermediate_size=704, layers=6, heads=4, vocab_size=390),  # 5 M
    "large": ArchitectureConfig(hidden_size=640, intermediate_size=1760, layers=10, heads=10, vocab_size=390),  # 51 M
}
# A pretrained model's settings, over those of the case.
PRETRAINED, PRETRAINED_ONLINE = {"learning_rate": 1e-5}, {"learning_rate": 1e-6, "rollout.max_new_tokens": 48, "rollout.min_new_tokens": 47}
ROWS = 2048
LONGEST_RESPONSE = 60  # characters; with the prompt at most model.max_length tokens
COMPARED_STEPS = 15  # rounding grows tenfold every ten steps
LOSS_TOLERANCE = 1e-3  # more steps and threads than in test_trl_curves.py
OWN_TEMPLATE_TOLERANCE = 0.2  # TRL also trains on what a template writes behind the end token, such as a newline


@dataclass(frozen=True)
class Inputs:
    """Model folders and row files, made once for all runs.

    pretrained: folder of the language model for every name; None: each name has its own folder.
    of_model: keys of each work's section `model`.
    """

    folder: Path
    pretrained: Path | None = None
    of_model: dict[str, Any] = field(default_factory=dict)

    def work(self, case: str, model: str, *, steps: int, batch_size: int) -> Workload:
        method, overrides = CASES[case]
        kind = "reward" if method == "reward" else "language"
        rows = "demonstrations" if method == "sft" else "pairs"
        folder = self.folder / model / kind
        if self.pretrained is not None:
            overrides = (PRETRAINED_ONLINE if method in ONLINE else PRETRAINED) | overrides
            folder = folder if kind == "reward" else self.pretrained
        return Workload(method, str(folder), str(self.folder / f"{rows}.jsonl"), steps, batch_size, overrides, self.of_model)


def main() -> None:
    arguments = parse()
    configure_process()
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        models = arguments.models if arguments.model is None else [arguments.model.name]
        inputs = make_inputs(Path(folder), models) if arguments.model is None else pretrained_inputs(Path(folder), arguments)
        for model in models:
            for case in arguments.cases:
                work, warmup = sized(inputs, case, model, arguments)
                speeds = measure(work, arguments.rounds, warmup, environment)
                found.append({"model": model, "case": case, "tokens_per_sample": tokens_per_sample(work), **summary(speeds)})
                print(line(found[-1]), flush=True)
                write(arguments, found)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["small"])
    parser.add_argument("--model", type=Path, help="folder of a pretrained language model, in place of --models")
    parser.add_argument("--pairs", type=Path, help="with --model: transcripts as of HH-RLHF, chosen and rejected")
    parser.add_argument("--max-length", type=int, default=256, help="with --model: tokens; longer pairs are left out")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="with --model")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--steps", type=int, default=25, help="timed optimizer steps")
    parser.add_argument("--warmup", type=at_least_one, default=5, help="optimizer steps before them")
    parser.add_argument("--batch-size", type=int, default=64, help="demonstrations or pairs per optimizer step")
    parser.add_argument("--online-steps", type=int, default=12, help="timed steps of online cases")
    parser.add_argument("--online-warmup", type=at_least_one, default=4)
    parser.add_argument("--samples", type=int, default=256, help="responses per step of online cases")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "bench")
    arguments = parser.parse_args()
    if (arguments.model is None) != (arguments.pairs is None):
        parser.error("expected --model and --pairs together, got one of them")
    return arguments


def at_least_one(text: str) -> int:
    """Parse a number of warm-up steps; the clock starts at the end of the last one."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return int(text)


def sized(inputs: Inputs, case: str, model: str, arguments: argparse.Namespace) -> tuple[Workload, int]:
    """A case's work and its number of warm-up steps."""
    if CASES[case][0] in ONLINE:
        steps, warmup, size = arguments.online_steps, arguments.online_warmup, arguments.samples
    else:
        steps, warmup, size = arguments.steps, arguments.warmup, arguments.batch_size
    return inputs.work(case, model, steps=warmup + steps, batch_size=size), warmup


def tokens_per_sample(work: Workload) -> float:
    """Return the mean number of tokens per sample over the rows.

    A pair's prompt counts with each response; online responses are as long as they may be.
    """
    from rlhf_core.models.tokenizer import encode_conversation, encode_prompt, load_tokenizer

    tokenizer = load_tokenizer(work.model, trust_remote_code=False)

    def tokens(row: dict[str, Any]) -> int:
        if work.is_online:
            return len(encode_prompt(tokenizer, row["messages"])) + work.params.rl.rollout.max_new_tokens
        responses = [row[side] for side in ("response", "chosen", "rejected") if side in row]
        return sum(len(encode_conversation(tokenizer, row["messages"], response)[0]) for response in responses)

    return statistics.mean(map(tokens, work.read_rows()))


def make_inputs(folder: Path, models: list[str]) -> Inputs:
    """Built-in data with one response or pair per conversation, and fresh models with a tokenizer trained on it."""
    from rlhf_core.models.build import new_language_model, new_scalar_model, save_model
    from rlhf_core.models.tokenizer import build_tokenizer

    params = clerk_params()
    clerk: ClerkConfig = params.data.sources[0].clerk
    demonstrations = one_each(clerk_rows(clerk, "sft", params.seed), ("response",))
    pairs = one_each(clerk_rows(clerk, "preference", params.seed), ("chosen", "rejected"))
    write_jsonl(folder / "demonstrations.jsonl", demonstrations)
    write_jsonl(folder / "pairs.jsonl", pairs)
    texts = [text for row in demonstrations for text in (row["messages"][0]["content"], row["response"])]
    for model in models:
        shape = MODELS[model]
        tokenizer = build_tokenizer(texts, vocab_size=shape.vocab_size)
        config: ModelConfig = params.model.model_copy(update={"architecture": shape, "path": None})
        language_model = new_language_model(config, tokenizer, seed=params.seed)
        save_model(language_model, language_model.state_dict(), tokenizer, folder / model / "language")
        scalar_model = new_scalar_model(folder / model / "language", tokenizer, trust_remote_code=False)
        save_model(scalar_model, scalar_model.state_dict(), tokenizer, folder / model / "reward")
    return Inputs(folder)


def pretrained_inputs(folder: Path, arguments: argparse.Namespace) -> Inputs:
    """Pairs of the file, one of each conversation, and their chosen responses as demonstrations; the model as it is."""
    from rlhf_core.models.build import new_scalar_model, save_model
    from rlhf_core.models.tokenizer import encode_conversation, encode_scored, load_tokenizer

    tokenizer = load_tokenizer(str(arguments.model), trust_remote_code=False)
    source = ExternalPairsConfig(name="pairs", path=str(arguments.pairs), format="hh").source()

    def tokens(messages: list[Message], response: str) -> int:
        """The longer of the two encodings: a scored response has an end of its own."""
        return max(len(encode_conversation(tokenizer, messages, response)[0]), len(encode_scored(tokenizer, messages, response)))

    pairs: dict[str, dict[str, Any]] = {}
    for row in load_source(source, seed=0).rows["preference"]:
        if all(tokens(row["messages"], row[side]) <= arguments.max_length for side in ("chosen", "rejected")):
            pairs.setdefault(json.dumps(row["messages"]), {name: row[name] for name in ("messages", "chosen", "rejected")})
        if len(pairs) == ROWS:
            break
    write_jsonl(folder / "pairs.jsonl", list(pairs.values()))
    write_jsonl(folder / "demonstrations.jsonl", [{"messages": r["messages"], "response": r["chosen"]} for r in pairs.values()])
    scalar_model = new_scalar_model(arguments.model, tokenizer, trust_remote_code=False)
    save_model(scalar_model, scalar_model.state_dict(), tokenizer, folder / arguments.model.name / "reward")
    return Inputs(folder, arguments.model, {"dtype": arguments.dtype, "max_length": arguments.max_length})


def one_each(rows: list[dict[str, Any]], sides: tuple[str, ...]) -> list[dict[str, Any]]:
    """The first row of each of ROWS conversations, without responses that may not fit."""
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        if all(len(row[side]) <= LONGEST_RESPONSE for side in sides):
            first.setdefault(json.dumps(row["messages"]), row)
    return list(first.values())[:ROWS]


def measure(work: Workload, rounds: int, warmup: int, environment: dict[str, str]) -> dict[str, dict[str, list[float]]]:
    """Return samples (demonstrations or pairs) per second in each side's alternating runs, by wall clock and by CPU time.

    Raises:
        RuntimeError: the sides' losses differ.
    """
    speeds: dict[str, dict[str, list[float]]] = {clock: {side: [] for side in SIDES} for clock in ("clock", "cpu")}
    samples = (work.steps - warmup) * work.batch_size
    for _ in range(rounds):
        runs = {side: run(side, work, environment) for side in SIDES}
        losses = list(zip(runs["ours"].losses, runs["theirs"].losses, strict=True))[:COMPARED_STEPS]
        difference = max(abs(a - b) for a, b in losses)
        tolerance = OWN_TEMPLATE_TOLERANCE if work.of_model else LOSS_TOLERANCE
        if not work.is_online and not difference < tolerance:
            raise RuntimeError(f"{work.method}: expected equal losses, got a difference of {difference:.2g}; the works differ")
        for side, made in runs.items():
            for clock, ends in (("clock", made.ends), ("cpu", made.cpu_ends)):
                if ends:
                    speeds[clock][side].append(samples / (ends[-1] - ends[warmup - 1]))
    return {clock: sides for clock, sides in speeds.items() if all(sides.values())}


def run(side: str, work: Workload, environment: dict[str, str]) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        works, runs = Path(folder) / "works.json", Path(folder) / "runs.json"
        works.write_text(workloads_to_json([work]))
        command = [sys.executable, "-m", "tools.bench.side", side, str(works), str(runs)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{side} {work.method}: expected a run, got exit code {done.returncode}:\n{done.stderr[-4000:]}")
        return Run(**json.loads(runs.read_text())[0])


def summary(speeds: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """All values by each clock, their medians, the ratio of the medians, and each round's ratio."""
    found = {}
    for clock, sides in speeds.items():
        medians = {side: statistics.median(values) for side, values in sides.items()}
        ratios = [a / b for a, b in zip(sides["ours"], sides["theirs"], strict=True)]
        found[clock] = {
            "samples_per_second": sides,
            "medians": medians,
            "ratio": medians["ours"] / medians["theirs"],
            "ratios": ratios,
        }
    return found


def line(row: dict[str, Any]) -> str:
    clock = row["clock"]
    cells = [row["model"], row["case"]]
    for side in SIDES:
        runs = clock["samples_per_second"][side]
        cells.append(f"{clock['medians'][side]:.3g} ({min(runs):.3g} to {max(runs):.3g})")
    cells += [f"{clock['medians'][side] * row['tokens_per_sample']:.0f}" for side in SIDES]
    for found in (clock, row.get("cpu")):
        cells.append(f"{found['ratio']:.2f} ({min(found['ratios']):.2f} to {max(found['ratios']):.2f})" if found else "")
    return f"| {' | '.join(cells)} |"


def write(arguments: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    import torch
    import trl

    about = {
        "trl": trl.__version__,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "load_at_the_end": os.getloadavg()[0],
        **{key: value for key, value in vars(arguments).items() if key not in ("cases", "models", "model", "pairs", "out")},
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "peers.json").write_text(json.dumps({"about": about, "results": found}, indent=2) + "\n")
    columns = ("model", "case", "ours, samples/s", "TRL, samples/s", "ours, tokens/s", "TRL, tokens/s", "ratio", "ratio by computing time")
    head = f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n"
    note = f"Medians of {arguments.rounds} runs (lowest to highest); " + ", ".join(f"{k} {v}" for k, v in about.items()) + ".\n"
    (arguments.out / "peers.md").write_text(head + "\n".join(map(line, found)) + "\n\n" + note)
    draw(found, arguments.out / "peers.svg")


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw the ratios: a dot per round, a bar up to the ratio of the medians."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 0.6 + 0.4 * len(found)), layout="constrained")
    for place, row in enumerate(found):
        ratios = row["clock"]["ratios"]
        axis.barh(place, row["clock"]["ratio"], height=0.6, color="#9db8d9")
        axis.plot(ratios, [place] * len(ratios), "o", color="#1f4e8c", markersize=4, gid=f"rounds-{place}")
    axis.axvline(1, color="black", linewidth=1)
    axis.set_yticks(range(len(found)), labels=[f"{row['case']}, {row['model']}" for row in found])
    axis.invert_yaxis()
    axis.set(xlabel="samples per second over TRL's: ratio of the medians (bar) and of each round (dot)", xlim=(0, None))
    with matplotlib.rc_context({"svg.hashsalt": "peers", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
