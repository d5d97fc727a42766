"""The recipe that the look at data prints is enough for prepare_data and validate_data to accept the data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_core.config import load_overlaid, parse_yaml
from rlhf_core.data.schema import open_rows
from rlhf_core.look.__main__ import main
from rlhf_core.preparation.prepare import measure_rows
from rlhf_core.preparation.sources import mix
from rlhf_core.preparation.validation.tables import read_measured
from rlhf_core.preparation.validation.validate import validate
from tests.tiny_models import DEFAULTS, tiny_tokenizer

SOUND = [{"prompt": f"Sort {i}.", "chosen": "1 2 3"[: 3 + 2 * (i % 2)], "rejected": "3 2 1"[: 5 - 2 * (i % 2)]} for i in range(40)]
FAULTY = [
    *({"prompt": f"long {i}", "chosen": "1 " * 100, "rejected": "2 " * 101} for i in range(8)),
    *({"prompt": f"blank {i}", "chosen": "a", "rejected": ""} for i in range(2)),
    *SOUND[:4],
]


def printed_recipe(path: Path, capsys, *options: str) -> str:
    assert main([str(path), "--params", str(DEFAULTS), *options]) == 0
    out = capsys.readouterr().out
    return out[out.index("\n# a recipe for --params\n") :]


def written(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def refused(recipe: str, folder: Path) -> set[str]:
    """The expectations that fail with this recipe. prepare_data raises ValueError if it drops too much."""
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    whole = folder / "params.yaml"
    whole.write_text(DEFAULTS.read_text(encoding="utf-8").replace("min_pairs: 200", "min_pairs: 1", 1), encoding="utf-8")
    params, tokenizer = load_overlaid(whole, folder / "recipe.yaml"), tiny_tokenizer()
    out, limit, longest = folder / "prepared", params.validation.max_dropped_fraction, params.model.max_length
    mixed = mix(params.data, out, scratch=folder / "scratch", seed=0, max_dropped_fraction=limit)
    measure_rows(mixed, tokenizer, params.data, folder / "measured", max_length=longest, max_dropped_fraction=limit)
    for rows in mixed.rows.values():
        rows.write()
    tables = {use: open_rows(out / f"{use}.parquet") for use in mixed.uses}
    findings = validate(tables, lambda use: read_measured(folder / "measured", use, tables[use]), params.validation, max_length=longest)
    return {f.name for f in findings if not f.passed and not f.name.startswith("template_round_trip")}


def test_the_recipe_drops_what_validation_refuses_and_allows_as_much(tmp_path, capsys):
    path = written(tmp_path / "d.jsonl", SOUND + FAULTY)
    recipe = printed_recipe(path, capsys, "--max-length", "80")
    assert "\n      drop: [empty, duplicate, too_long]\n" in recipe
    assert "\nmodel:\n  max_length: 80\nvalidation:\n  max_dropped_fraction: 0." in recipe
    assert "of the preference data are left out" in recipe
    assert refused(recipe, tmp_path) == set()


def test_of_equal_rows_one_stays(tmp_path, capsys):
    recipe = printed_recipe(written(tmp_path / "d.jsonl", SOUND + SOUND), capsys)
    assert "max_dropped_fraction: 0.52  # 50.0% of the preference data are left out" in recipe
    assert refused(recipe, tmp_path) == set()


@pytest.mark.parametrize("key", ["drop", "max_dropped_fraction"])
def test_nothing_in_the_recipe_is_superfluous(key, tmp_path, capsys):
    recipe = printed_recipe(written(tmp_path / "d.jsonl", SOUND + FAULTY), capsys)
    tree = parse_yaml(recipe, "printed")
    if key == "drop":
        del tree["data"]["sources"][0]["drop"]
    else:
        assert list(tree.pop("validation")) == ["max_dropped_fraction"]
    less = json.dumps(tree)
    if key == "drop":
        assert {"duplicate_pairs", "too_long", "empty.rejected"} <= refused(less, tmp_path)
    else:
        with pytest.raises(ValueError, match=r"raise validation\.max_dropped_fraction"):
            refused(less, tmp_path)


def test_a_length_bias_is_allowed_with_a_warning(tmp_path, capsys):
    path = written(tmp_path / "d.jsonl", [{**record, "chosen": "a b c d", "rejected": "a"} for record in SOUND])
    recipe = printed_recipe(path, capsys)
    assert "max_length_bias: 0.5  # the chosen response is the longer one in 100% of the pairs: training would learn length" in recipe
    assert refused(recipe, tmp_path) == set()


def test_sound_data_needs_a_source_only(tmp_path, capsys):
    plain = parse_yaml(printed_recipe(written(tmp_path / "d.jsonl", SOUND), capsys), "printed")
    assert list(plain) == ["data"] and "drop" not in plain["data"]["sources"][0]


def test_too_many_long_rows_stop_the_chain_instead_of_being_dropped(tmp_path, capsys):
    """50 of 100 rows are longer than the chosen length, as many as a recipe drops at most; one more, and it drops none."""
    long = [{"prompt": f"long {i}", "chosen": "1 " * 100, "rejected": "2 " * 101} for i in range(51)]
    sound = [{**record, "prompt": f"Sort {i} of these."} for i, record in enumerate([*SOUND, *SOUND][:50])]
    for count, drops in ((50, True), (51, False)):
        recipe = printed_recipe(written(tmp_path / "d.jsonl", sound + long[:count]), capsys, "--max-length", "80")
        assert ("drop: [too_long]" in recipe, "max_dropped_fraction" in recipe) == (drops, drops)


def test_counts_of_all_records_and_a_guess_from_the_first_say_so(tmp_path, capsys):
    path = written(tmp_path / "d.jsonl", [{**record, "turns": i} for i, record in enumerate(SOUND)])
    for options, first in (
        (["--records", "9", "--all"], "the first 9 records read for the guess, and all for the counts"),
        (["--records", "9"], "the first 9 records read"),
        (["--all"], "all 40 records read"),
    ):
        assert main([str(path), "--params", str(DEFAULTS), *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"{path}: {first}"
        assert "  columns not read: turns (`slices` may name them)" in lines
        assert not [line for line in lines if "unsure" in line and "turns" in line]
