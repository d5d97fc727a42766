"""The command `rlhf`: its subcommands, their examples, where it may be started, and what its start imports."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_core.commands import COMMANDS, main, tree

ROOT = Path(__file__).parents[2]
SLOW = ("torch", "prefect", "vllm", "transformers", "pandas", "pyarrow", "ray", "deepspeed", "pydantic")
STARTED = "import sys; sys.path.insert(0, {root!r}); sys.argv[0] = 'rlhf'; from rlhf_core.commands import entry; entry()"


def started(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The console script, whose first import is of this checkout."""
    command = [sys.executable, "-P", "-c", STARTED.format(root=str(ROOT)), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("arguments", [["--help"], ["registry", "--help"]])
def test_help_imports_nothing_slow(arguments):
    program = f"import sys; from rlhf_core.commands import main; main(*{arguments}); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "Usage: rlhf" in done.stdout and "cyclopts" in done.stderr.split()
    assert not set(SLOW) & set(done.stderr.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_an_example_that_it_accepts(command, capsys):
    assert main(*command.split(), "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    example = COMMANDS[command][2]
    assert f"Usage: rlhf {command}" in shown and f"Example: {example}" in shown and "Exit codes: 0 " in shown
    words = shlex.split(example)
    tree().parse_args(words[1:], exit_on_error=False, print_error=False)
    assert words[: len(command.split()) + 1] == ["rlhf", *command.split()]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained(command):
    app = tree()
    for word in command.split():
        app = app[word]
    found = app.assemble_argument_collection(parse_docstring=True)
    assert [argument.name for argument in found if argument.show and not argument.parameter.help] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--froce"], "rlhf run: Unknown option: --froce. Did you mean --force?"),
        (["chat", "--run", "a", "--model", "b"], "Mutually exclusive"),
        (["labels", "export", "--out", "x"], "rlhf labels export: "),
        (["registry", "show", "value-model"], 'Choose from: "reward-model", "policy"'),
        (["plan", "--gpus", "0"], "--gpus"),
        (["rnu"], "rlhf: "),
    ],
)
def test_wrong_arguments_are_refused_with_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(*arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_the_command_works_in_a_folder_below_with_paths_from_there():
    done = started(ROOT / "recipes", "params", "print", "data.sources.0.kind", "--params", "clerk.yaml")
    assert (done.returncode, done.stdout.strip()) == (0, '"clerk"'), done.stderr
    assert started(ROOT, "params", "print", "data.sources.0.kind", "--params", "recipes/clerk.yaml").stdout == done.stdout


@pytest.mark.parametrize(("given", "expected"), [("../docs", "docs"), ("sft", "sft")])
def test_a_model_beside_is_a_folder_from_where_the_command_is_typed(given, expected, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("rlhf_core.commands.start", ROOT / "recipes")
    _, bound, _ = tree().parse_args(["chat", "--beside", given], exit_on_error=False, print_error=False)
    assert bound.arguments["beside"] == expected


def test_outside_of_a_checkout_the_command_says_what_it_expects(tmp_path):
    refused = started(tmp_path, "runs", "list")
    assert refused.returncode == 2 and refused.stderr.startswith("rlhf: expected a checkout of the pipeline (params.yaml, ")
    assert "Usage: rlhf COMMAND" in started(tmp_path, "--help").stdout


def test_the_script_runs_the_code_of_the_checkout_it_is_started_in(tmp_path):
    """A run's worktree may have other code than the installation."""
    (tmp_path / "flows").mkdir()
    (tmp_path / "rlhf_core").mkdir()
    for name in ("params.yaml", "dvc.yaml", "rlhf_core/__init__.py"):
        (tmp_path / name).touch()
    (tmp_path / "rlhf_core/process.py").write_text("def exit_with(command): raise SystemExit(command())\n")
    (tmp_path / "rlhf_core/commands.py").write_text("def main(*words):\n    print('this one', *words)\n    return 7\n")
    done = started(tmp_path, "runs", "list")
    assert (done.returncode, done.stdout) == (7, "this one runs list\n")


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("registry prom", "promote"),
        ("chat --bes", "--beside"),
        ("run --params recipes/cle", "recipes/clerk.yaml"),
        ("evaluate --policy reci", "recipes"),  # a folder or a name
        ("data check reci", "recipes"),
    ],
)
def test_bash_completes_commands_options_and_files(typed, wanted):
    words = " ".join(["rlhf", *typed.split()])
    tried = f'COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _rlhf; echo "${{COMPREPLY[@]}}"'
    script = f"{tree().generate_completion(shell='bash')}\n{tried}"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert wanted in done.stdout.split()


def test_the_doctor_prints_json_for_programs(capsys):
    main("doctor", "--json")
    found = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert found["python"]["level"] == "ok" and found["dvc"]["found"]
