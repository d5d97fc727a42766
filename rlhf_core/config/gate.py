"""Requirements for reward models, and for language models that judge."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from rlhf_core.config.base import Fraction, Section
from rlhf_core.config.data import ALL_FILES, SourceConfig

SUBSET = "subset"


class ExternalPairsConfig(Section):
    """Pairs that had no part in training, such as RewardBench's; subset names the column by which they are reported."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")  # in the report
    path: str  # a file or a folder
    format: Literal["preference", "hh"] = "preference"  # as of a data source
    columns: dict[str, str] = Field(default_factory=dict)  # name in the format -> column in the file
    implicit_prompt: bool | None = None  # as of a data source
    transcripts: bool | None = None  # as of a data source
    subset: str | None = None  # column with the name of each pair's subset
    # for the lower bound of the accuracy's interval; null: it is shown, not judged
    min_accuracy: float | None = Field(default=None, ge=0, le=1)

    def source(self) -> SourceConfig:
        """Return the pairs as a data source; the column `subset` becomes its slice SUBSET."""
        return SourceConfig(
            name=self.name,
            kind="file",
            uses=["preference"],
            path=self.path,
            dataset_split=ALL_FILES,
            format=self.format,
            columns=dict(self.columns),
            implicit_prompt=self.implicit_prompt,
            transcripts=self.transcripts,
            slices={SUBSET: self.subset} if self.subset is not None else {},
        )


class IncumbentConfig(Section):
    """A reward model that the registry has promoted (docs/registry.md): its version, and the md5 of its folder as in dvc.lock.

    sha256: of the folder; None if the version was registered by its md5 only.
    """

    version: str  # in the registry, such as v2.0.0
    md5: str = Field(pattern=r"^[0-9a-f]{32}\.dir$")  # of its folder, as in dvc.lock
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")


class RolledBackConfig(IncumbentConfig):
    """A reward model that was promoted and then rolled back, and why."""

    reason: str  # of the rollback


class JudgeGateConfig(Section):
    """Requirements for a language model that judges; those of GateConfig for accuracies hold too.

    pairs: held-out pairs that it is asked about at most, four times each.
    max_length_bias: for the upper bound of the accuracy where the chosen response is longer, less that where it is shorter.
    max_position_bias: for the interval of the share of verdicts for the first response less a half, in mode pairwise.
    min_consistency: for the lower bound of the share of pairs with the same verdict when asked again.
    max_without_verdict: for the share of answers that refuse or can't be read.
    """

    pairs: int = Field(default=250, ge=1)
    max_length_bias: float | None = Field(default=0.3, ge=0, le=1)
    max_position_bias: float | None = Field(default=0.2, ge=0, le=0.5)
    min_consistency: float | None = Field(default=0.6, ge=0, le=1)
    max_without_verdict: float | None = Field(default=0.05, ge=0, le=1)


class GateConfig(Section):
    """Requirements of gate_reward (docs/gate.md). A requirement of None shows the figure without judging it.

    min_first_error_f1: of a process reward model, in place of min_accuracy, for the lower bound of the F1 of finding the first wrong step.
    min_accuracy, min_slice_accuracy: for the lower bound of the accuracy's interval, over all pairs and in each slice.
    min_slice_pairs: a smaller slice is shown, not judged.
    max_ece: for the upper bound of the expected calibration error, after temperature scaling.
    min_shorter_accuracy: for the lower bound on the pairs whose chosen response is the shorter one.
    probe_pairs: pairs that are scored again, in other batches, with other padding and another length limit.
    max_score_difference: between such scores of one text.
    max_format_shift: by which added white space or markup may move a score, in standard deviations of the scores.
    incumbent, anchor: the promoted reward model, and the promoted one that no later one clearly beats; the flow writes both when it starts.
    max_regression: in accuracy; the lower bound of the difference to incumbent and anchor must not be below minus this.
    llm_judge: of rewarded scorers of kind llm_judge.
    rolled_back: reward models that were rolled back, which never pass; the flow writes them when it starts.
    override: the reason to use a reward model or a judge that does not pass.
    """

    min_accuracy: float = Fraction
    min_first_error_f1: float = Field(default=0.4, ge=0, le=1)
    confidence: float = Field(gt=0, lt=1)  # of the intervals that the requirements are held against
    min_pairs: int = Field(ge=1)  # with fewer test pairs the model is rejected
    slices: list[str]
    min_slice_accuracy: float | None = Field(default=None, ge=0, le=1)
    min_slice_pairs: int = Field(default=100, ge=1)
    max_ece: float | None = Field(default=None, ge=0, le=1)
    min_shorter_accuracy: float | None = Field(default=None, ge=0, le=1)
    probe_pairs: int = Field(default=64, ge=1)
    max_score_difference: float = Field(default=1e-5, gt=0)
    max_format_shift: float | None = Field(default=None, gt=0)
    incumbent: IncumbentConfig | None = None
    anchor: IncumbentConfig | None = None
    max_regression: float = Field(ge=0, le=1)
    external: list[ExternalPairsConfig]
    llm_judge: JudgeGateConfig = Field(default=JudgeGateConfig())
    rolled_back: list[RolledBackConfig] = Field(default_factory=list)
    override: str | None = Field(default=None, min_length=1)

    def conflicts(self) -> Iterator[str]:
        if self.llm_judge.pairs < self.min_pairs:
            yield f"llm_judge.pairs: expected at least min_pairs={self.min_pairs}, got {self.llm_judge.pairs}; raise it, or lower min_pairs"
        for key, names in (("slices", self.slices), ("external", [e.name for e in self.external])):
            if len(set(names)) < len(names):
                yield f"{key}: expected different names, got {names}; take one out"
