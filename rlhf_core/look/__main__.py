"""Looks at data before anything runs: rlhf data check, or python -m rlhf_core.look.

Guesses the format, shows records as they will be trained on, counts what is left out and what validate_data would object to, and prints
a recipe: for a model with the method, lengths, schedule and settings that fit this machine, or the GPUs of --gpu and --gpus. Exit code 0;
2 if no format fits, if several do, or if the data can't be read.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from tqdm import tqdm

from rlhf_core.commands import INTERRUPTED, Count, FileOrName, GivenPath, Json, Words, run_module
from rlhf_core.config import ConfigError, Params, overridden, parse_params, read_recipe, read_text, read_yaml_text
from rlhf_core.config.data import DataFormat
from rlhf_core.look import page
from rlhf_core.look.look import GUESSED_FROM, Guess, Inspection, TriedReading, guess, inspect_reading, place_of, sample_of
from rlhf_core.look.recipe import recipe, recipe_lines, yaml_lines
from rlhf_core.planning.hardware import GPUS
from rlhf_core.preparation.pictures import PictureStore
from rlhf_core.preparation.sources import records_of
from rlhf_core.process import configure_process, exit_with

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNDECIDED = 2


@Parameter(name="*")
@dataclass(frozen=True)
class Options:
    """What to look at, and for which model and machine.

    Args:
        model: instead of model.path: folder or name whose tokenizer and template are used.
        format: instead of the guess.
        columns: instead of the guess, OURS=THEIRS such as prompt=question.
        images: read pictures, whose paths are in this folder, for a model that sees.
        subset: of a Hugging Face data set.
        dataset_split: of a Hugging Face data set (train).
        delimiter: of a CSV file, instead of what its header tells.
        encoding: of text files (utf-8).
        records: read the first so many records.
        all: read all records.
        show: show the first so many records.
        tokens: list every token with its id.
        params: a recipe laid over params.yaml, or a whole one: model and limits.
        gpu: propose for GPUs of this kind instead of this machine (h100 with --gpus).
        gpus: propose for so many of them (1).
        max_length: tokens, instead of model.max_length.
        recipe: also write the recipe to a new file, where one reading fits.
        yaml_only: print the YAML for data.sources and nothing else.
    """

    model: FileOrName | None = None
    format: DataFormat | None = None
    columns: Words = ()
    images: GivenPath | None = None
    subset: str | None = None
    dataset_split: Annotated[str | None, Parameter("--split")] = None
    delimiter: str | None = None
    encoding: str | None = None
    records: Count = GUESSED_FROM
    all: bool = False
    show: Count = 3
    tokens: bool = False
    params: GivenPath | None = None
    gpu: Literal[tuple(GPUS)] | None = None
    gpus: Count | None = None
    max_length: Count | None = None
    recipe: GivenPath | None = None
    yaml_only: bool = False
    json: Json = False


NOTHING_GIVEN = Options()


def look(path: FileOrName, /, *, given: Options = NOTHING_GIVEN) -> int:
    """Guess the format and look at each reading. Returns the exit code, see above.

    Args:
        path: a file, a folder, or the name of a Hugging Face data set.
    """
    configure_process()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # for terminals without Unicode
    try:
        with TemporaryDirectory() as scratch:
            return run(path, given, None if given.images is None else PictureStore(Path(scratch)))
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ConfigError, ValueError, OSError) as error:
        print(f"data check: {error}", file=sys.stderr)
        return UNDECIDED


def run(path: str, given: Options, pictures: PictureStore | None = None) -> int:
    """Guess the format, look at each reading and print what was found. Returns the exit code.

    Args:
        pictures: keeps those of the records.
    """
    if given.recipe and given.recipe.exists():
        raise ConfigError(f"--recipe {given.recipe}: expected a new file, got one that exists; name another one, or remove it")
    images = None if given.images is None else str(given.images)
    place = place_of(path, {key: getattr(given, key) for key in ("subset", "dataset_split", "delimiter", "encoding")} | {"images": images})
    records, whole = sample_of(place, given.records)
    found = guess(place, records, whole=whole, format_=given.format, columns=columns(given.columns), pictures=pictures)
    decided = len(found.fitting) == 1 and found.unreadable is None
    if given.yaml_only:
        print(
            yaml_lines(found.fitting[0].source) if decided else "\n".join(page.describe_guess(found, path)),
            file=sys.stdout if decided else sys.stderr,
        )
        return 0 if decided else UNDECIDED
    model = {key: value for key, value in (("path", given.model), ("max_length", given.max_length)) if value is not None}
    text = _text(given.params)
    params = parse_params(read_yaml_text(text, "params.yaml"), subject="params.yaml", complete=False)
    if pictures is not None and given.model is None and params.model.path is None:
        raise ConfigError("--images: expected a model that sees, got none; name one with --model")
    if pictures is not None and params.model.vision is None:
        model["vision"] = "frozen"
    readings = [_read(tried, found, _with_model(params, model), model, text, given, pictures) for tried in found.fitting]
    if given.json:
        print(json.dumps(page.as_json(found, readings), indent=2))
        return 0 if decided else UNDECIDED
    print("\n".join(page.describe_guess(found, path, counts_all=given.all)))
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for number, reading in enumerate(readings, start=1):
        if not decided:
            print(f"\n--- reading {number}: {reading.looked.tried.reading.format} ---")
        print("\n".join(page.describe_inspection(reading.looked, reading.params, colour=colour, every_token=given.tokens)))
        print("\n".join(page.describe_proposal(reading)))
    if given.recipe and decided:
        given.recipe.write_text(f"{readings[0].recipe}\n", encoding="utf-8")
        before = "" if given.params is None else f"--params {given.params} "
        print(f"\nWritten to {given.recipe}, for the pipeline: {before}--params {given.recipe}")
    elif given.recipe:
        why = "the data can be read in several ways or in none; choose as said at the top"
        print(f"\n{given.recipe} is not written, because {why}", file=sys.stderr)
    return 0 if decided else UNDECIDED


def columns(pairs: Sequence[str]) -> dict[str, Any]:
    """Maps the format's column names to the user's, from arguments such as `prompt=question`, or `completions=a,b` for several columns.

    Raises:
        ConfigError: an argument has no `=`.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        ours, equals, theirs = pair.partition("=")
        if not (ours and equals and theirs):
            raise ConfigError(f"--columns {pair}: expected OURS=THEIRS, got no {'=' if not equals else 'name'}; write prompt=question")
        found[ours] = theirs.split(",") if ours == "completions" and "," in theirs else theirs
    return found


def _with_model(params: Params, model: dict[str, Any]) -> Params:
    return params.model_copy(update={"model": params.model.model_copy(update=model)})


def _text(recipe: Path | None) -> str:
    """Return the text of params.yaml with a recipe laid over it; the recipe alone where there is no params.yaml."""
    path = Path("params.yaml")
    if recipe is None or not path.exists():
        return read_text(path if recipe is None else recipe)
    return overridden(read_text(path), read_recipe(recipe), subject=str(path), source=str(recipe), complete=False)[0]


def _read(
    tried: TriedReading,
    found: Guess,
    params: Params,
    model: dict[str, Any],
    text: str,
    given: Options,
    pictures: PictureStore | None,
) -> page.InspectedReading:
    """Counts one reading and, with a model, makes a proposal for it."""
    if params.model.path is None:
        looked = _inspect_reading(tried, found, params, None, given)
        return page.InspectedReading(looked, params, recipe(looked, params, model))
    from rlhf_core.look.facts import data_facts, machine_facts, model_facts, with_template  # import transformers and torch
    from rlhf_core.look.propose import UserInput, propose

    params, tokenizer, is_chat = with_template(params, tried)
    model |= {"path": params.model.path, "chat_template": params.model.chat_template}
    looked = _inspect_reading(tried, found, params, tokenizer, given, pictures)
    machine = machine_facts(given.gpu, given.gpus)
    data = data_facts(looked, tried.source, whole=found.whole or given.all)
    proposal = propose(looked, data, model_facts(params, tokenizer, is_chat=is_chat), machine, UserInput(text, model))
    return page.InspectedReading(looked, proposal.params, recipe_lines(proposal.source, proposal.settings, proposal.why), proposal)


def _inspect_reading(
    tried: TriedReading,
    found: Guess,
    params: Params,
    tokenizer: PreTrainedTokenizerBase | None,
    given: Options,
    pictures: PictureStore | None = None,
) -> Inspection:
    if not given.all or found.whole:
        return inspect_reading(tried, found.records, params, tokenizer, show=given.show, pictures=pictures)
    with tqdm(records_of(tried.source), unit=" records", leave=False, disable=None) as records:  # None: shown on terminals only
        return inspect_reading(tried, records, params, tokenizer, show=given.show, pictures=pictures)


main = partial(run_module, "data check")

if __name__ == "__main__":
    exit_with(main)
