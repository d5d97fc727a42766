"""A page of the rollouts that an RL run has saved: rlhf rollouts [RUN]

RUN is a run's name (a folder of runs/) or a folder; by default the current one. A run that is still training shows the steps so far.
Exit codes: 0 done, 2 the run has no saved rollouts.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from cyclopts import Parameter

from rlhf_core.commands import GivenPath, RunFolder, printed, run_module
from rlhf_core.config import ConfigError
from rlhf_core.paths import REPORTS, ROLLOUTS, SCRATCH
from rlhf_core.process import exit_with
from rlhf_core.report.opened import open_page, run_folder
from rlhf_core.report.page import page
from rlhf_core.stage.rollouts import read_rollouts, step_files

BLOCK = 64  # rollouts whose tokens the page unpacks together
SIGNIFICANT = 3  # digits of numbers by token
SCALE_QUANTILE = 0.99  # of the absolute values of all tokens, which has the strongest colour


@printed()
def write_page(
    run: RunFolder = ".", *, output: GivenPath | None = None, open_: Annotated[bool, Parameter("--open", negative_bool="no-")] = True
) -> str:
    """Write a page of the rollouts that an RL run has saved, and open it where there is a display.

    Args:
        run: a run's name, or a folder; by default the current one.
        output: the page; reports/rollouts.html in the run's folder otherwise.
        open_: open the page in a browser.
    """
    folder = run_folder(run)
    table = saved_rollouts(folder)
    output = output or folder / REPORTS / "rollouts.html"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(render_rollouts(table, folder.resolve().name), encoding="utf-8", newline="\n")
    if open_:
        open_page(output)
    return f"Page: {output}"


def saved_rollouts(folder: Path) -> pa.Table:
    """Return the rollouts of a finished run, or those that a run in training has saved so far.

    Raises:
        ConfigError: there are none.
    """
    finished = folder / ROLLOUTS
    if finished.is_file():
        table = pq.read_table(finished)
    else:
        unfinished = [path for path in (folder / SCRATCH / "train_policy").glob("*") if step_files(path)]
        newest = max(unfinished, key=lambda path: path.stat().st_mtime_ns, default=folder)
        table = read_rollouts(newest)
    if not len(table):
        raise ConfigError(
            f"{finished}: expected rollouts of RL, got none; run method rl with rl.save_rollouts_every, or wait for the first step"
        )
    return table


def render_rollouts(table: pa.Table, name: str) -> str:
    """Return the page. The same table gives the same text."""
    tokens = Tokens(table)
    steps = table["step"].unique().to_pylist()
    content = {
        "title": f"Rollouts of {name}",
        "count": len(table),
        "steps": steps,
        "has_kl": bool(np.isfinite(tokens.kl).any()),
        "has_mismatch": bool(np.isfinite(tokens.mismatch).any()),
        "index": packed(index(table, tokens)),
        "blocks": [packed(tokens.of(range(at, min(at + BLOCK, len(table))))) for at in range(0, len(table), BLOCK)],
    }
    return page("rollouts.html.jinja", {}, content, script="rollouts.js", style="rollouts.css")


def packed(content: Any) -> str:
    """JSON, compressed, in characters that end no element."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=4, mtime=0)).decode()


class Tokens:
    """What the page shows of each token, all rollouts end to end.

    kl: the old policy's log-probability less the reference's; with rollouts ahead, of the policy that sampled the token, as in the curve.
    mismatch: the trainer's log-probability before the update less the engine's. NaN where one of them wasn't computed.
    sampled: of each rollout, the number of tokens that the policy sampled.
    """

    def __init__(self, table: pa.Table):
        self._ends = np.cumsum([0, *pc.list_value_length(table["token_ids"]).to_pylist()])
        self.advantage = _flat(table, "advantage")
        self._engine, old, reference = (_flat(table, f"{name}_logprob") for name in ("engine", "old", "ref"))
        sampler = _flat(table, "sampler_logprob") if "sampler_logprob" in table.column_names else old
        self.mismatch = sampler - self._engine
        self._version = _flat(table, "version")
        step = np.repeat(table["step"].to_numpy(), np.diff(self._ends))
        of_sampler = self._engine + np.nan_to_num(old - sampler)
        self.kl = np.where(self._version == step - 1, np.where(np.isnan(old), of_sampler, old), of_sampler) - reference
        self.trained = _flat(table, "trained")
        self.sampled = [int(np.isfinite(part).sum()) for part in np.split(self._version, self._ends[1:-1])]
        shown = {"e": self._engine, "a": self.advantage, "k": self.kl, "m": self.mismatch, "v": self._version, "u": self.trained}
        self._shown = {name: _rounded(values) for name, values in shown.items()}
        self.pieces, self._piece = _vocabulary(_flat_list(table, "token_ids"), _flat_list(table, "tokens"))

    def per_rollout(self, values: np.ndarray, reduce: Any) -> list[float | None]:
        """Return a figure of each rollout's values that are known; None without any."""
        parts = np.split(values, self._ends[1:-1])
        return [_number(reduce(known)) if len(known := part[np.isfinite(part)]) else None for part in parts]

    def of(self, rollouts: Iterable[int]) -> list[dict[str, Any]]:
        """Lists by token of each rollout; a number where all tokens have the same.

        t: places in `pieces`; e: engine's log-probability; a, k, m: advantage, KL, mismatch; v: version; u: 1 for trained tokens.
        """
        return [
            {"t": self._piece[start:end].tolist()} | {name: _short(values[start:end]) for name, values in self._shown.items()}
            for start, end in ((self._ends[i], self._ends[i + 1]) for i in rollouts)
        ]


def index(table: pa.Table, tokens: Tokens) -> dict[str, Any]:
    """What the page needs before any rollout is opened: a list for each column, texts, and the scales of the colours."""
    prompts: dict[tuple[str, ...], int] = {}
    keys = zip(*(table[name].to_pylist() for name in ("prompt", "prompt_id", "source", "label")), strict=True)
    numbers = [prompts.setdefault(key, len(prompts)) for key in keys]
    texts = [text for text, *_ in prompts]
    scores = {name: table[name].to_pylist() for name in table.column_names if name in ("score", "reward") or name.startswith("score_")}
    measures = {
        name: [None if value is None or math.isinf(value) else _number(value) for value in values] for name, values in scores.items()
    }
    measures |= {
        "advantage": tokens.per_rollout(tokens.advantage, np.mean),
        "kl": tokens.per_rollout(tokens.kl, np.sum),
        "mismatch": tokens.per_rollout(np.abs(tokens.mismatch), np.max),
        "tokens": tokens.sampled,
    }
    if len([name for name in measures if name.startswith("score_")]) == 1:
        measures = {name: values for name, values in measures.items() if name != "score"}
    return {
        "block": BLOCK,
        "prompts": [list(key) for key in prompts],
        "common": _common(texts),
        "pieces": tokens.pieces,
        "of": dict(zip(table["step"].to_pylist(), table["rollouts"].to_pylist(), strict=True)),
        "step": table["step"].to_pylist(),
        "group": table["group"].to_pylist(),
        "prompt": numbers,
        "finished": [int(value) for value in table["finished"].to_pylist()],
        "response": table["response"].to_pylist(),
        "measures": {name: values for name, values in measures.items() if any(value is not None for value in values)},
        "untrained": bool(not tokens.trained.all()),
        "scales": {name: _scale(getattr(tokens, name)) for name in ("advantage", "kl", "mismatch")},
    }


def _common(texts: Sequence[str]) -> list[int]:
    """Characters that all prompts begin with, and end with, as the template's; of a single prompt none."""
    if len(texts) < 2:
        return [0, 0]
    head = _same_beginning(min(texts), max(texts))
    ends = [text[head:][::-1] for text in texts]
    return [head, _same_beginning(min(ends), max(ends))]


def _same_beginning(first: str, second: str) -> int:
    """How many characters two texts begin with alike; of the smallest and the largest of many, all of them do."""
    return next((place for place, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), min(len(first), len(second)))


def _scale(values: np.ndarray) -> float | None:
    known = np.abs(values[np.isfinite(values)])
    return _number(float(np.quantile(known, SCALE_QUANTILE)) or float(known.max())) if len(known) else None


def _flat_list(table: pa.Table, name: str) -> pa.Array:
    return pc.list_flatten(table[name]).combine_chunks()


def _flat(table: pa.Table, name: str) -> np.ndarray:
    """Numbers of all tokens; NaN for null."""
    return _flat_list(table, name).cast(pa.float64()).to_numpy(zero_copy_only=False).astype(np.float64)


def _vocabulary(ids: pa.Array, pieces: pa.Array) -> tuple[list[list[Any]], np.ndarray]:
    """Return the different pairs of id and text, and the place of each token's pair."""
    text = pieces.dictionary_encode()
    pairs = pa.array(ids.to_numpy().astype(np.int64) * len(text.dictionary) + text.indices.to_numpy()).dictionary_encode()
    words = text.dictionary.to_pylist()
    different = (divmod(pair, len(words)) for pair in pairs.dictionary.to_pylist())
    return [[token, words[word]] for token, word in different], pairs.indices.to_numpy()


def _short(values: np.ndarray) -> Any:
    """Return a list with null for NaN; one number if all are equal."""
    unknown = np.isnan(values)
    if len(values) and (unknown.all() or (values == values[0]).all()):
        return None if unknown[0] else float(values[0])
    listed = values.tolist()
    return [None if value != value else value for value in listed] if unknown.any() else listed


def _rounded(values: np.ndarray) -> np.ndarray:
    """Values with SIGNIFICANT digits, integers whole."""
    size = np.floor(np.log10(np.abs(values), where=np.isfinite(values) & (values != 0), out=np.zeros_like(values)))
    unit = 10.0 ** np.maximum(SIGNIFICANT - 1 - size, 0)
    return np.round(values * unit) / unit


def _number(value: float | None) -> float | None:
    """Six digits; None for what is no finite number."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


main = partial(run_module, "rollouts")

if __name__ == "__main__":
    exit_with(main)
