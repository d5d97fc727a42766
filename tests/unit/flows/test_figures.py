"""Figures on which a registration rests, computed again: what somebody wrote into gate.json or evaluate.json by hand is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from clerk_params import CLERK_PARAMS
from gate_pairs import right_and_wrong
from registry_tags import git, sound_lineage

from flows.registry.figures import check_accuracy, check_gate, check_round
from flows.registry.tags import Version
from rlhf_core.config import ConfigError, load_params, read_yaml
from rlhf_core.data.heldout import as_heldout_table
from rlhf_core.data.schema import write_rows
from rlhf_core.gate.looks import LEDGER, write_result
from rlhf_core.gate.run import judge_model
from rlhf_core.gate.verdict import with_registry
from rlhf_core.paths import PREPARED, REWARD_HELDOUT, REWARD_MODEL
from rlhf_core.provenance.file_hashes import dvc_md5
from rlhf_core.rounds.pins import Pin, PromptsPin, Round, write_rounds
from rlhf_core.rounds.promotion import verdict
from rlhf_core.rounds.spending import LEDGER as LEDGER_OF_ROUNDS
from rlhf_core.rounds.spending import begin_comparison, outcome_of, record_rounds
from rlhf_core.stage.files import finite, write_json

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> Path:
    """A workspace whose gate has judged a model at its second look, with all in DVC's cache."""
    return judged_workspace(tmp_path_factory.mktemp("judged"), right_and_wrong(880, 110, 10), pairs=1)


def judged_workspace(root: Path, margins: list[float], *, pairs: int) -> Path:
    """pairs: of each prompt."""
    git(root, "init", "--quiet")
    (root / ".dvc").mkdir()
    (root / ".dvc/config").write_text("")
    shutil.copy(CLERK_PARAMS, root)
    ids = [f"test-{i}" for i in range(len(margins))] + [f"validation-{i}" for i in range(50)]
    rows = [{"id": i, "source": "clerk", "split": i.partition("-")[0], "chosen": f"a {i}", "rejected": "b"} for i in ids]
    write_rows(root / PREPARED, "preference", [row | {"messages": [{"role": "user", "content": "Sort."}]} for row in rows])
    prompts = [f"{i.partition('-')[0]}-{int(i.partition('-')[2]) // pairs}" for i in ids]
    found = zip(ids, prompts, [*margins, *[1.0] * 50], strict=True)
    scores = [(i, "clerk", i.partition("-")[0], m, 0.0, 9, 8, prompt, 4, 0.0, 0.0) for i, prompt, m in found]
    as_heldout_table(scores).to_parquet(root / REWARD_HELDOUT)
    for content in (b"another model", b"this model"):
        (root / REWARD_MODEL).mkdir(parents=True, exist_ok=True)
        (root / REWARD_MODEL / "weights").write_bytes(content)
        judge(root)
    for path in (REWARD_HELDOUT, PREPARED, REWARD_MODEL):
        into_cache(root, root / path)
    return root


def judge(root: Path) -> None:
    """As stage gate_reward does it, for a model that scores nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        params, where = load_params(), {"heldout": REWARD_HELDOUT, "prepared": PREPARED, "reward_model": REWARD_MODEL}
        probe = {"value": 9.6e-7, "low": None, "high": None, "n": 64}
        measured = {"probes": dict.fromkeys(("padding_side", "batch_size", "stored_scores"), probe), "external": []}
        gate = judge_model(params, **where, source_judges={}, infer=lambda *_: {"measured": measured, "members": 1})
        gate = with_registry(gate, params.gate, dvc_md5(REWARD_MODEL))
        write_result(gate["look"]["split"], gate["look"]["model"], **{key: gate[key] for key in ("passed", "accuracy", "confidence")})
        write_json(Path("metrics/gate.json"), gate)


def into_cache(root: Path, path: Path) -> None:
    files = [path] if path.is_file() else sorted(path.iterdir())
    listing = json.dumps([{"md5": dvc_md5(file), "relpath": file.name} for file in files], sort_keys=True).encode()
    contents = [(dvc_md5(file), file.read_bytes()) for file in files] + [(f"{hashlib.md5(listing).hexdigest()}.dir", listing)]
    for md5, content in contents:
        place = root / ".dvc/cache/files/md5" / md5[:2] / md5[2:]
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)


def lock(root: Path) -> dict:
    outs = [{"path": str(path), "md5": dvc_md5(root / path)} for path in (PREPARED, REWARD_HELDOUT, REWARD_MODEL)]
    return {"stages": {"train_reward": {"outs": outs}}}


def check(root: Path, change=lambda gate: None) -> None:
    gate = json.loads((root / "metrics/gate.json").read_text())
    change(gate)
    check_gate(root, lock(root), read_yaml(root / "params.yaml"), gate)


FORGED = {
    "accuracy": (
        lambda g: g.update(accuracy=0.999),
        rf"what {LEDGER.name} says of its model, passed True with accuracy 0.885, got passed True with",
    ),
    "verdict": (lambda g: g.update(passed=False), rf"what {LEDGER.name} says of its model, passed True"),
    "first look": (
        lambda g: g["look"].update(number=1, earlier=[]),
        rf"expected look 2 at its pairs or a later one by {LEDGER.name}, got 1",
    ),
    "level": (
        lambda g: g["look"].update(level=0.025),
        r"look.level as computed again from .*, 0\.0125, got 0.025",
    ),
    "low": (
        lambda g: g.update(low=0.884),
        r"low as computed again from data/reward_heldout.parquet of dvc.lock, 0\.\d+, got 0.884",
    ),
    "check": (lambda g: g["checks"][1].update(passed=None), "expected checks.1.passed as computed again from .*, true, got null"),
    "no check": (lambda g: g["checks"].pop(), "expected checks as computed again"),
    "probe": (lambda g: g["probes"]["batch_size"].update(value=0.5), "expected passed as computed again .* false, got true"),
    "source": (lambda g: g["by_source"]["clerk"].update(accuracy=1.0), "expected by_source.clerk.accuracy as computed again"),
    "members": (lambda g: g["ensemble"].update(disagreement=0.3), "expected ensemble.disagreement as computed again"),
    "message": (lambda g: g.update(message=g["message"].replace("0.88", "0.98")), "expected message as computed again"),
    "words": (lambda g: g.update(message="passed: well"), "expected message as computed again"),
    "override": (lambda g: g.update(override="why not"), "expected override as computed again .*, null, got"),
    "model": (lambda g: g["look"].update(model="0" * 32 + ".dir"), "a verdict on the model of dvc.lock, md5 .*, got one on 000"),
    "split": (lambda g: g["look"].update(split="0" * 64), rf".* in this repository's {LEDGER.name}, got none; the gate ran elsewhere"),
    "unjudged": (lambda g: g.update(look=None), "expected a verdict with its look at the test pairs, got none"),
    "a key less": (lambda g: g.pop("ensemble"), "expected what gate_reward writes, got another form"),
    "a list": (lambda g: g.update(look=[]), "expected what gate_reward writes, got another form"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_gate_is_refused_with_both_values(judged, name):
    change, message = FORGED[name]
    with pytest.raises(ConfigError, match=rf"gate\.json: (expected )?{message}"):
        check(judged, change)


def test_a_true_gate_is_accepted_and_so_is_one_that_is_not_needed(judged):
    check(judged)
    check_gate(judged, {"stages": {}}, {}, {"needed": False})


@pytest.mark.parametrize(("margin", "pairs"), [(2.0, 2), (0.0, 1), (2.0, 1000)], ids=["all right", "all tied", "one prompt"])
def test_a_true_gate_with_figures_that_are_not_finite_is_accepted(tmp_path, margin, pairs):
    check(judged_workspace(tmp_path, [margin] * 1000, pairs=pairs))


def test_scores_that_differ_from_their_hash_or_are_missing_are_refused(judged):
    md5 = dvc_md5(judged / REWARD_HELDOUT)
    place = judged / ".dvc/cache/files/md5" / md5[:2] / md5[2:]
    content = place.read_bytes()
    try:
        place.write_bytes(content[:-1] + b"!")
        with pytest.raises(ConfigError, match=rf"heldout: expected md5 {md5}, got"):
            check(judged)
        place.unlink()
        with pytest.raises(ConfigError, match=rf"heldout: expected md5 {md5} in DVC's cache, got nothing; `dvc pull`"):
            check(judged)
    finally:
        place.write_bytes(content)


def test_a_promotion_computes_the_accuracy_again_where_the_scores_are_here(judged):
    stages = {"train_reward": {"deps": {}, "outs": {str(REWARD_HELDOUT): dvc_md5(judged / REWARD_HELDOUT)}}}

    def version(accuracy: float | None, **changes) -> Version:
        gate = {"needed": True, "passed": True, "message": "", "override": None, "accuracy": accuracy}
        return Version("reward-model", "v1.0.0", "0" * 40, "a", "", {**sound_lineage("0" * 40), "gate": gate, "stages": stages, **changes})

    assert check_accuracy(judged, version(0.885))
    with pytest.raises(ConfigError, match=r"v1\.0\.0: expected the accuracy of its held-out scores, 0\.885, got 0\.9 in its tag"):
        check_accuracy(judged, version(0.9))
    assert not check_accuracy(judged, version(None)) and not check_accuracy(judged, version(0.9, stages={}))
    elsewhere = {"train_reward": {"deps": {}, "outs": {str(REWARD_HELDOUT): "0" * 32}}}
    assert not check_accuracy(judged, version(0.9, stages=elsewhere))


def test_a_rounds_verdict_follows_from_its_counts_and_its_budget_is_in_the_ledger(tmp_path):
    params = read_yaml(CLERK_PARAMS)
    config, pin = load_params(CLERK_PARAMS).iterative.promotion, Pin(path="models/sft", md5="0")
    (tmp_path / "rounds").mkdir()
    rounds, outcomes = {}, []
    for number, wins in ((1, 350), (2, 430)):
        budget, _ = begin_comparison(tmp_path.name, number, "sft", config, tmp_path)
        inputs = {"origin": pin, "policy": pin, "gate": pin, "reward_models": {}, "prompts": PromptsPin(first=0, count=1, sha256="0")}
        rounds[number] = Round(**inputs, budget=budget)
        rate = {"value": wins / 700, "low": wins / 700 - 0.04, "high": wins / 700 + 0.04, "wins": wins, "losses": 700 - wins, "n": 700}
        found = {"win_rate": {"sampled": rate}, "trained": True}
        found |= verdict(found, config, budget)
        outcomes.append((number, budget, outcome_of(found)))
        record_rounds(tmp_path.name, "sft", outcomes, tmp_path)
        write_json(tmp_path / f"rounds/{number}/metrics/evaluate.json", found)
    write_rounds(rounds, tmp_path)

    def read(number: int) -> dict:
        return json.loads((tmp_path / f"rounds/{number}/metrics/evaluate.json").read_text())

    assert read(2)["accepted"] and not read(1)["accepted"]
    for number in (1, 2):
        check_round(tmp_path, number, params, read(number))
    with pytest.raises(ConfigError, match="expected accepted as computed again from its own counts, false, got true"):
        check_round(tmp_path, 1, params, read(1) | {"accepted": True})
    with pytest.raises(ConfigError, match=r"expected promotion\.p_value as computed again"):
        check_round(tmp_path, 2, params, read(2) | {"promotion": {**read(2)["promotion"], "p_value": 1e-300 + 0.5}})
    write_json(tmp_path / "rounds/1/metrics/evaluate.json", read(1) | {"accepted": True})  # would hand its level on
    with pytest.raises(ConfigError, match=r"round 1: expected the outcome kept, as when it ended .* got accepted"):
        check_round(tmp_path, 2, params, read(2))
    write_json(tmp_path / "rounds/1/metrics/evaluate.json", read(1) | {"accepted": False})
    generous = {
        number: entry.model_copy(update={"budget": entry.budget.model_copy(update={"level": 0.9})}) for number, entry in rounds.items()
    }
    write_rounds(generous, tmp_path)
    forged = read(2) | verdict(read(2), config, generous[2].budget)
    with pytest.raises(
        ConfigError, match=r"round 1: expected the budget that its comparison began with, .* got comparison 1 at level 0\.9"
    ):
        check_round(tmp_path, 2, params, json.loads(json.dumps(finite(forged))))
    write_rounds(rounds, tmp_path)
    (tmp_path / LEDGER_OF_ROUNDS.name).unlink()
    with pytest.raises(
        ConfigError, match=r"round 1: expected its comparison in this repository's .* got none; register it where the series ran"
    ):
        check_round(tmp_path, 2, params, read(2))
