"""docs/tutorial.md: the page's files and commands run as written, from data to chat, server and export."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from small_chain import log_of, make_chain, output_of
from small_workspace import ROOT, environment, processes_in, wait_until

PAGE = (ROOT / "docs/tutorial.md").read_text()
MODEL = ROOT.parent / "shared/data/stories260k-hd32"
COMMANDS = [command.strip() for command in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)]
PROMPT = "One day, Tim went to the park and saw a kite."
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not MODEL.is_dir(), reason="the pretrained model is not here: ../shared/data/stories260k-hd32, beside the checkout"),
]


def command(*words: str) -> str:
    """The only command of the page with all of these words."""
    (found,) = (c for c in COMMANDS if all(word in c for word in words))
    return found


def shell(clone: Path, line: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a line of the page with this Python instead of the clone's."""
    line = line.replace(".venv/bin/python", shlex.quote(sys.executable))
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=clone,
        env=environment(PYTHONPATH=str(clone)),
        input=given,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A clone after steps 1 to 4."""
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "shared").symlink_to(MODEL.resolve().parents[1])
    found = make_chain(folder / "project", {"cluster": {"threads": 1}})
    subprocess.run(["git", "config", "user.name", "test"], cwd=found, check=True)
    subprocess.run(["git", "config", "user.email", "test@localhost"], cwd=found, check=True)
    for language, name in (("python", "my_data.py"), ("yaml", "my.yaml")):
        assert f"`{name}`" in PAGE
        (block,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
        (found / name).write_text(block)
    for line in (command("config.json"), command("my_data.py"), command("rlhf run")):
        shell(found, line)
    return found


def test_the_page_is_short_and_every_command_is_run_here():
    assert len(PAGE.split()) < 900
    run_here = ("config.json", "my_data.py", "rlhf run", "--beside sft", "echo", "rlhf serve", "rlhf export")
    assert len(COMMANDS) == 1 + len(run_here) and COMMANDS[0].startswith("make setup")
    assert len({command(words) for words in run_here}) == len(run_here)


def test_the_judge_accepts_the_policy_and_half_of_the_model_before_it(clone):
    found = json.loads((clone / "runs/first/metrics/evaluate.json").read_text())["sampled"]
    assert found["policy"]["judge_ok"] > 0.9 and 0.2 < found["sft"]["judge_ok"] < 0.8


def test_the_policy_is_talked_to_beside_the_model_before_it(clone):
    done = shell(clone, command("--beside sft"), f"{PROMPT}\n/reset\n{PROMPT}\n/quit\n")
    lines = done.stdout.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["first", "sft"] * 2
    assert all("Tim was happy" in line for line in lines[::2]) and "a new conversation" in done.stderr
    assert re.search("Mia|doll|happy", shell(clone, command("echo")).stdout)


def test_the_policy_is_served_and_ends_with_nothing_left(clone):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = shlex.split(command("use serve").replace(".venv/bin/python", sys.executable).replace("8000", str(port)))
    before = {p.pid for p in processes_in(clone)}
    start = len(output_of(clone))
    with log_of(clone).open("a") as log:
        server = subprocess.Popen(words, cwd=clone, env=environment(PYTHONPATH=str(clone)), stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: "\ncurl " in output_of(clone)[start:] or server.poll() is not None, 400, "the server's line for curl")
        assert server.poll() is None, output_of(clone)[-4000:]
        line = next(line for line in output_of(clone)[start:].splitlines() if line.startswith("curl "))
        body = {**json.loads(shlex.split(line)[-1]), "temperature": 0, "messages": [{"role": "user", "content": PROMPT}]}
        request = urllib.request.Request(shlex.split(line)[1], json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            (choice,) = json.load(answer)["choices"]
    finally:
        server.send_signal(signal.SIGINT)
        code = server.wait(60)
    assert code == 0 and "Stopped." in output_of(clone)[start:]
    assert {p.pid for p in processes_in(clone)} <= before
    chatted = shell(clone, ".venv/bin/python -m rlhf_core.use chat --run first --temperature 0", PROMPT).stdout
    assert choice["message"]["content"].strip() == chatted.strip() and choice["finish_reason"] == "stop"


def test_what_is_handed_on_loads_in_transformers_and_takes_adapters_of_peft(clone, monkeypatch, capsys):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shell(clone, command("use export"))
    folder = clone / "my-policy"
    card = (folder / "README.md").read_text()
    assert "| sampled | policy | 1.000 |" in card or re.search(r"\| sampled \| policy \| 0\.9\d\d \|", card)
    monkeypatch.chdir(folder)
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1].replace('"..."', repr(PROMPT)), {})
    assert "Tim was happy" in capsys.readouterr().out

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    given = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        plain = model(**given).logits
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))(**given).logits  # adapters start at zero
    assert torch.equal(plain, adapted)


def test_a_registered_version_is_chatted_with_and_handed_on_with_the_figures_of_its_commit(clone):
    registered = shell(clone, ".venv/bin/python -m flows.promote register policy --run first").stdout
    assert "Registered policy v1.0.0" in registered
    spoken = shell(clone, ".venv/bin/python -m rlhf_core.use chat --version policy@v1.0.0 --temperature 0", PROMPT)
    assert "Tim was happy" in spoken.stdout and "policy@v1.0.0 512" in spoken.stderr
    shell(clone, ".venv/bin/python -m rlhf_core.use export versioned --version policy@v1.0.0")
    card = (clone / "versioned/README.md").read_text()
    assert "| tags | policy@v1.0.0 |" in card and "Win rate of the policy" in card
    (clone / "models/promoted/policy-v1.0.0/config.json").write_text("{}")
    line = f"{shlex.quote(sys.executable)} -m rlhf_core.use chat --version policy@v1.0.0"
    changed = subprocess.run(
        ["bash", "-c", line], cwd=clone, env=environment(PYTHONPATH=str(clone)), capture_output=True, text=True, check=False
    )
    assert changed.returncode == 2 and "expected files of that version" in changed.stderr and "md5" in changed.stderr
