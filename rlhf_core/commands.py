"""The command `rlhf`: the tree of its subcommands, the types of options that several of them share, and its start in a checkout.

A subcommand is a function whose parameters are its options. It is imported when it runs, so that `rlhf --help` imports neither torch nor
Prefect. `python -m` of a command's module runs the same subcommand.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NoReturn

from cyclopts import App, CycloptsError, Parameter, Token
from cyclopts.validators import Number

REFUSED, INTERRUPTED = 2, 130  # exit codes
NO_ARGUMENTS_NEEDED = ("--help", "-h", "--version", "--install-completion")
start = Path()  # the folder in which the user typed the command, to which the paths that it names are relative


def _path(_: Any, tokens: tuple[Token, ...]) -> Path:
    return _from_root(tokens[0].value)


def _file_or_name(_: Any, tokens: tuple[Token, ...]) -> str:
    found = _from_root(tokens[0].value)
    return str(found) if found.exists() else tokens[0].value


def _from_root(path: str) -> Path:
    """The path as it is named from the checkout's root."""
    return Path(os.path.relpath(start / path)) if start != Path() else Path(path)


GivenPath = Annotated[Path, Parameter(converter=_path)]
# Always strings; a shell completes names of files where a path is allowed.
FileOrName = Annotated[str | Path, Parameter(converter=_file_or_name)]
RunFolder = Annotated[str | Path, Parameter("--run", converter=_file_or_name)]  # also without the word, as the first argument
Words = Annotated[tuple[str, ...], Parameter(consume_multiple=True)]
Numbers = Annotated[tuple[int, ...], Parameter(consume_multiple=True)]
Count = Annotated[int, Parameter(validator=Number(gte=1))]
Positive = Annotated[float, Parameter(validator=Number(gt=0, lt=float("inf")))]
Switch = Annotated[bool | None, Parameter(negative_bool="no-")]  # None: neither --x nor --no-x is given


@Parameter(name="*")
@dataclass(frozen=True)
class Overrides:
    """Values laid over params.yaml.

    Args:
        assignments: override a key of params.yaml, such as rl.algorithm=grpo; repeat for several.
        recipes: apply a recipe to params.yaml, such as recipes/gsm8k.yaml; repeat for several.
    """

    assignments: Annotated[tuple[str, ...], Parameter("--set")] = ()
    recipes: Annotated[tuple[GivenPath, ...], Parameter("--params")] = ()


NONE_GIVEN = Overrides()
Json = Annotated[bool, Parameter("--json", help="Print JSON, for programs.")]


def printed(*refusals: type[Exception]) -> Callable[[Callable[..., str]], Callable[..., int]]:
    """Make a command of a function: it prints what the function returns, or why it refuses, and returns the exit code.

    Args:
        refusals: errors that are the user's, beside ConfigError.
    """

    def command_of(function: Callable[..., str]) -> Callable[..., int]:
        @wraps(function)
        def command(*arguments: Any, **options: Any) -> int:
            from rlhf_core.config import ConfigError

            show_own_log()
            try:
                print(printable(function(*arguments, **options)), flush=True)
                return 0
            except (ConfigError, *refusals) as error:
                print(printable(str(error)), file=sys.stderr)
                return REFUSED
            except KeyboardInterrupt:
                return INTERRUPTED

        return command

    return command_of


def printable(text: str) -> str:
    """The text in a form that is safe to print, since names and tags may contain control sequences."""
    from rlhf_core.config import reordering_shown

    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in reordering_shown(text))


def show_own_log() -> None:
    """Show the log of this pipeline only: Prefect has its own handlers, and the root logger would show every HTTP request."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    own = logging.getLogger("rlhf")
    own.addHandler(handler)
    own.setLevel(logging.INFO)


FLOW_CODES = "0 done, 1 a stage failed, 2 refused or wrong options, 3 the gate rejected the reward model, 130 and 143 stopped by a signal"
CODES = "0 done, 2 refused or wrong options"

# Command -> (function, what it does, example, exit codes)
COMMANDS: dict[str, tuple[str, str, str, str]] = {
    "run": (
        "flows.full_pipeline:start",
        "Run the chain from data to report, in the worktree runs/NAME with --run.",
        "rlhf run --params recipes/clerk.yaml --set rl.algorithm=grpo --run my-grpo",
        FLOW_CODES,
    ),
    "sweep": (
        "flows.compare:start",
        "Run several algorithms or methods over several seeds, and compare them in one table.",
        "rlhf sweep --params recipes/clerk.yaml --algorithms grpo rloo --seeds 0 1 2",
        "0 done, 1 a run failed, 2 refused or wrong options",
    ),
    "gate": (
        "flows.outside:gate",
        "Judge a reward model, of responses or of steps, that another trainer made: accuracy with its interval, slices, probes.",
        "rlhf gate --reward-model ../my-reward --pairs ../pairs.jsonl --reference Qwen/Qwen2.5-1.5B-Instruct",
        FLOW_CODES,
    ),
    "evaluate": (
        "flows.outside:evaluate",
        "Compare a policy that another trainer made with the model from which it was trained, and write the report.",
        "rlhf evaluate --policy ../trl-output --reference Qwen/Qwen2.5-1.5B-Instruct --data ../pairs.jsonl --reward-model ../my-reward",
        FLOW_CODES,
    ),
    "stages": ("flows.runs.__main__:stages", "List the stages of a run with their states.", "rlhf stages my-grpo", CODES),
    "runs list": ("flows.runs.__main__:list_runs", "List all runs, most recently used first.", "rlhf runs list --json", CODES),
    "runs show": ("flows.runs.__main__:show", "Show a run's outcome, params, stages and lineage.", "rlhf runs show my-grpo", CODES),
    "runs delete": (
        "flows.runs.__main__:delete_runs",
        "Delete worktrees and branches of runs, with scratch, models and results.",
        "rlhf runs delete my-grpo",
        CODES,
    ),
    "compare": (
        "flows.compare_runs:compare",
        "Compare two runs (params, data, figures, answers), or configurations over seeds.",
        "rlhf compare my-grpo my-dpo",
        CODES,
    ),
    "report": ("flows.runs.__main__:report", "Open the report of a run, and print its path.", "rlhf report my-grpo", CODES),
    "track": (
        "flows.track:track",
        "Send a run to the configured trackers, wandb, TensorBoard and MLflow: what they lack of it.",
        "rlhf track my-grpo --set tracking.mlflow_uri=sqlite:///mlflow.db",
        "0 done, 2 refused, a tracker is down, or wrong options",
    ),
    "rollouts": (
        "rlhf_core.report.rollouts:write_page",
        "Write a page of the rollouts that an RL run has saved, and open it.",
        "rlhf rollouts my-grpo",
        CODES,
    ),
    "data check": (
        "rlhf_core.look.__main__:look",
        "Guess a data file's format, show what would be trained on, and propose a recipe.",
        "rlhf data check pairs.jsonl --model Qwen/Qwen2.5-1.5B-Instruct --recipe mine.yaml",
        "0 done, 2 no format fits, several do, the data can't be read, or wrong options",
    ),
    "plan": (
        "rlhf_core.planning.__main__:plan",
        "Estimate memory and time of online RL on a cluster, or of each stage with --stages.\n\n"
        "Options that aren't given come from params.yaml. The output has the best placement of each layout, and settings for the best "
        "of these.",
        "rlhf plan --params mine.yaml --gpu h100 --gpus 16",
        "0 it fits, 1 it doesn't, 2 refused or wrong options",
    ),
    "params show": (
        "tools.params:show",
        "Explain a key of params.yaml: what it does, its type and default, and which stages a change reruns.",
        "rlhf params show rl.kl.coef",
        CODES,
    ),
    "params schema": (
        "tools.params:print_schema",
        "Print the JSON schema of params.yaml and recipes, by which editors complete and check keys.",
        "rlhf params schema",
        CODES,
    ),
    "params print": (
        "tools.params:print_params",
        "Print params.yaml with every key, including those left at their defaults.",
        "rlhf params print rl.rollout --set rl.algorithm=ppo",
        CODES,
    ),
    "doctor": (
        "tools.doctor.__main__:doctor",
        "Check the installation: packages, versions, machine.",
        "rlhf doctor",
        "0 the chain can run, 1 it can't, 2 wrong options",
    ),
    "registry register": (
        "flows.promote:register",
        "Make the model of a run's last commit a version.",
        "rlhf registry register policy --run my-grpo",
        CODES,
    ),
    "registry show": ("flows.promote:show", "Show all versions, or one in detail.", "rlhf registry show policy promoted", CODES),
    "registry promote": (
        "flows.promote:promote",
        "Make a version the promoted one.",
        'rlhf registry promote policy v1.0.0 --reason "better on held-out prompts"',
        CODES,
    ),
    "registry review": (
        "flows.promote:review",
        "Approve or reject a version, with a reason.",
        'rlhf registry review policy v2.0.0 --approve --by "Ada Lovelace" --reason "read 50 answers"',
        CODES,
    ),
    "registry page": (
        "flows.promote:page",
        "Write and open the page of a version for its reviewers: what it is, what changed, who said what.",
        "rlhf registry page policy v2.0.0",
        CODES,
    ),
    "registry rollback": (
        "flows.promote:rollback",
        "Roll back the promoted version; the one before it is promoted again, if there is one.",
        'rlhf registry rollback policy --reason "too many refusals"',
        CODES,
    ),
    "registry history": (
        "flows.promote:history",
        "List all promotions and rollbacks: who, when and why.",
        "rlhf registry history policy",
        CODES,
    ),
    "registry fetch": (
        "flows.promote:fetch",
        "Fetch a version's files by their hash from DVC's cache or remote, and verify each.",
        "rlhf registry fetch policy --to served",
        CODES,
    ),
    "push": (
        "flows.stores.__main__:push",
        "Send a run or a registered version to DVC's and git's remotes.",
        "rlhf push policy@v1.0.0",
        CODES,
    ),
    "pull": (
        "flows.stores.__main__:pull",
        "Fetch a run or a registered version from DVC's and git's remotes, and verify each file.",
        "rlhf pull policy",
        CODES,
    ),
    "rounds run": (
        "flows.iterative_dpo:start",
        "Run rounds of iterative DPO, one after the other.",
        "rlhf rounds run --rounds 3 --series mine --params mine.yaml",
        FLOW_CODES.replace("130", "4 a round's data was refused, 130"),
    ),
    "labels export": (
        "flows.labels:export",
        "Export pairs for annotation.",
        "rlhf labels export --round 2 --out annotation --count 200",
        CODES,
    ),
    "labels import": (
        "flows.labels:import_",
        "Import labels as preference data.",
        "rlhf labels import annotation/pairs.jsonl",
        CODES,
    ),
    "chat": (
        "rlhf_core.use.__main__:chat",
        "Chat with a model, one message per line; works with pipes.",
        "rlhf chat --run my-grpo --beside sft",
        CODES,
    ),
    "serve": (
        "rlhf_core.use.__main__:serve",
        "Serve a policy with vLLM's OpenAI server, or a reward model to scorers of kind http.",
        "rlhf serve --version policy@v1.0.0 --port 8000",
        CODES,
    ),
    "export": (
        "rlhf_core.use.__main__:export",
        "Copy a model with a card that has its evaluation.",
        "rlhf export my-policy --run my-grpo",
        CODES,
    ),
    "server": (
        "flows.server:start_server",
        "Run Prefect's server with deployments and a worker until Ctrl-C.",
        "rlhf server --port 4200",
        "0 stopped, 1 server or worker ended, 2 refused or wrong options",
    ),
}
GROUPS = {
    "runs": "List, show and delete runs.",
    "data": "Check data before anything runs.",
    "params": "Explain and print the keys of params.yaml.",
    "registry": "Versions of the reward model and the policy: register, promote, roll back, fetch.",
    "rounds": "Iterative DPO.",
    "labels": "Human labels: export pairs, import labels.",
}


def _default_shown(value: Any) -> str | None:
    if value is None or value == () or value is False:
        return None
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def tree() -> App:
    """The command with its subcommands, none of which is imported yet."""
    shared = {
        "version_flags": (),
        "default_parameter": Parameter(negative_bool=(), negative_iterable=(), show_default=_default_shown),
    }
    top = App(
        name="rlhf",
        help="RLHF as one reproducible pipeline: from preference data and a base model to an aligned, evaluated policy.",
        help_epilogue="`rlhf COMMAND --help` has the options of a command, an example and its exit codes.",
        **shared,
    )
    groups = {name: App(name=name, help=text, **shared) for name, text in GROUPS.items()}
    for name, group in groups.items():
        top.command(group, name=name)
    for words, (place, text, example, codes) in COMMANDS.items():
        *group, name = words.split()
        epilogue = f"Example: {example}\n\nExit codes: {codes}."
        (groups[group[0]] if group else top).command(place, name=name, help=text, help_epilogue=epilogue)
    top.register_install_completion_command(help="Install completion for this shell.")
    return top


def main(*arguments: str) -> int:
    """Run a subcommand and return its exit code."""
    try:
        return tree()(arguments, result_action="return_value", print_error=False, exit_on_error=False) or 0
    except CycloptsError as error:
        print(f"rlhf {' '.join(error.command_chain or ())}: {error}".replace(" :", ":"), file=sys.stderr)
        raise SystemExit(REFUSED) from None


def run_module(command: str, arguments: list[str] | None = None) -> int:
    """Run a subcommand for `python -m` of its module, and return the exit code.

    Args:
        arguments: by default those of this process.
    """
    return main(*command.split(), *(sys.argv[1:] if arguments is None else arguments))


def entry() -> NoReturn:
    """Start the console script in the root of the checkout, with the checkout's code, as `python -m` does there."""
    typed, arguments = Path.cwd(), sys.argv[1:]
    root = next((folder for folder in (typed, *typed.parents) if all((folder / name).exists() for name in _ROOT_FILES)), None)
    if root is None and not (arguments[:1] and arguments[0] not in NO_ARGUMENTS_NEEDED):
        sys.exit(main(*arguments))
    if root is None:
        print(f"rlhf: expected a checkout of the pipeline ({', '.join(_ROOT_FILES)}), got {typed}; change to one", file=sys.stderr)
        sys.exit(REFUSED)
    os.chdir(root)
    sys.path.insert(0, str(root))
    for name in [name for name in sys.modules if name.partition(".")[0] == "rlhf_core"]:
        del sys.modules[name]  # may be another checkout's
    commands = importlib.import_module("rlhf_core.commands")
    if typed != root:
        commands.start = typed
    importlib.import_module("rlhf_core.process").exit_with(lambda: commands.main(*arguments))


_ROOT_FILES = ("params.yaml", "dvc.yaml", "flows")

if __name__ == "__main__":
    entry()
