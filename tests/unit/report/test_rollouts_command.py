"""The command that makes the page of saved rollouts: which table it takes, what it refuses, and the page's bytes.

What a browser makes of the page is in tests/integration/test_rollouts_page.py.
"""

from __future__ import annotations

import base64
import gzip
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_rollouts import made_table, tool_table
from tiny_models import tiny_params, tiny_tokenizer

from rlhf_core.report.rollouts import Tokens, index, main, render_rollouts, saved_rollouts
from rlhf_core.stage.rollouts import publish_rollouts, step_file


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return made_table(tiny_tokenizer(), tiny_params().rl, steps={1: 8, 5: 8}, words=10)


def unpacked(page: str, element: str) -> object:
    text = re.search(rf"<script type=\"text/plain\" {element}>(.*?)</script>", page)[1]
    return json.loads(gzip.decompress(base64.b64decode(text)))


def test_a_finished_run_has_its_table_and_a_page(table, tmp_path, monkeypatch, capsys):
    run = tmp_path / "runs/mine"
    (run / "data").mkdir(parents=True)
    pq.write_table(table, run / "data/rollouts.parquet")
    monkeypatch.chdir(tmp_path)
    assert main(["mine", "--no-open"]) == 0
    assert capsys.readouterr().out == "Page: runs/mine/reports/rollouts.html\n"
    assert (run / "reports/rollouts.html").read_text(encoding="utf-8") == render_rollouts(table, "mine")
    (tmp_path / "data").symlink_to(run / "data")
    assert main(["--no-open"]) == 0 and capsys.readouterr().out == "Page: reports/rollouts.html\n", "the checkout's own, beside runs/"
    assert main([str(run), "--output", str(tmp_path / "page.html"), "--no-open"]) == 0 and (tmp_path / "page.html").exists()


def test_a_run_in_training_shows_the_steps_so_far(table, tmp_path):
    scratch = tmp_path / "scratch/train_policy/0123456789abcdef"
    scratch.mkdir(parents=True)
    for step in (1, 5):
        pq.write_table(table.filter(pa.compute.equal(table["step"], step)), step_file(scratch, step))
    assert saved_rollouts(tmp_path).to_pylist() == table.to_pylist()


def test_a_run_without_rollouts_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--no-open"]) == 2 and "data/rollouts.parquet: expected rollouts of RL, got none" in capsys.readouterr().err
    publish_rollouts(tmp_path)
    assert main(["--no-open"]) == 2 and "rl.save_rollouts_every" in capsys.readouterr().err
    assert main(["nobody"]) == 2 and "expected a run of runs/ or a folder, got nobody" in capsys.readouterr().err


def test_the_page_has_what_the_table_has(table):
    page = render_rollouts(table, "mine")
    found, block = unpacked(page, 'id="index"'), unpacked(page, 'class="block"')
    assert found["response"] == table["response"].to_pylist() and found["step"] == table["step"].to_pylist()
    assert found["measures"]["reward"] == table["reward"].to_pylist() and "score" not in found["measures"]  # that of the only scorer
    for row, tokens in zip(table.to_pylist(), block, strict=True):
        assert [found["pieces"][place] for place in tokens["t"]] == [
            list(pair) for pair in zip(row["token_ids"], row["tokens"], strict=True)
        ]
        shown = tokens["k"] if isinstance(tokens["k"], list) else [tokens["k"]] * len(tokens["t"])
        expected = [old - ref for old, ref in zip(row["old_logprob"], row["ref_logprob"], strict=True)]
        assert shown == pytest.approx(expected, rel=6e-3)
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org)|@import|url\(", re.sub(r"<script type=.*?</script>", "", page))


def test_the_kl_of_older_policies_tokens_is_that_of_the_policy_that_sampled_them():
    table = tool_table(tiny_tokenizer(), tiny_params().rl)  # step 4, by policies of versions 2 and 3
    row = table.to_pylist()[0]
    kl = Tokens(table).kl
    for place, version in enumerate(row["version"]):
        by = {None: None, 2: "engine_logprob", 3: "old_logprob"}[version]
        assert kl[place] == pytest.approx(row[by][place] - row["ref_logprob"][place]) if by else kl[place] != kl[place]


def test_the_mismatch_is_of_the_distribution_that_was_sampled_from():
    rl = tiny_params(**{"rl.rollout.top_p": 0.9, "rl.kl.estimator": "k3", "rl.kl.placement": "loss"}).rl
    table = tool_table(tiny_tokenizer(), rl)
    sampler = [None if value is None else value + 0.25 for value in table["sampler_logprob"].to_pylist()[0]]
    place = table.schema.get_field_index("sampler_logprob")
    changed = table.set_column(place, "sampler_logprob", pa.array([sampler], pa.list_(pa.float32())))
    difference = Tokens(changed).mismatch - Tokens(table).mismatch
    assert difference[difference == difference] == pytest.approx(0.25, abs=1e-6)


def test_prompts_are_named_without_what_all_have_in_common(table):
    found = index(table, Tokens(table))
    head, tail = found["common"]
    assert {text[head : len(text) - tail] for text, *_ in found["prompts"]} == {"0", "1001", "5001"}
