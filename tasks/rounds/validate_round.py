"""Stage validate_round of a round of iterative DPO: check its pairs against the expectations for prepared data.

    python -m tasks.rounds.validate_round <number of the round>

The verdict is in rounds/<n>/metrics/validation.json. Refused data doesn't fail the stage; the round then trains nothing and keeps the
previous policy.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf_core.data.schema import open_rows
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.paths import PREPARED, TOKENIZER, round_folder
from rlhf_core.preparation.validation.measures import measure_table
from rlhf_core.stage.files import write_json
from rlhf_core.stage.run import Stage, round_argument

if TYPE_CHECKING:
    from rlhf_core.preparation.validation.validate import Finding

# Prompts are checked too, since a pair with a held-out prompt would be a leak.
NEEDED = (("preference", "train"), ("prompt", "promotion"))
# Pairs are samples of the policy here, and no reward model is trained on them.
ADVICE = {"length_bias": "DPO would learn length: use scorers that don't prefer it, or raise validation.max_length_bias in another series"}

log = logging.getLogger("rlhf")


def main() -> None:
    number = round_argument(__doc__)
    with Stage("validate_round", resumable=False, round_number=number) as stage:
        pairs = open_rows(round_folder(number) / "data" / "preference.parquet")
        tables = {"preference": pairs, "prompt": open_rows(PREPARED / "prompt.parquet")}
        logging.getLogger("great_expectations").setLevel(logging.WARNING)
        from rlhf_core.preparation.validation.validate import summary, validate  # takes seconds

        params = stage.params
        config = params.validation.model_copy(update={"min_pairs": params.iterative.min_pairs})
        tokenizer = load_tokenizer(str(TOKENIZER), trust_remote_code=params.model.trust_remote_code)
        findings = validate(
            tables,
            lambda use: measure_table(use, tables[use], tokenizer),
            config,
            max_length=params.model.max_length,
            needed=NEEDED,
        )
        verdict = summary(findings, tables, max_reported_ids=config.max_reported_ids)
        messages = [with_advice(finding).message() for finding in findings if not finding.passed]
        write_json(round_folder(number) / "metrics" / "validation.json", {**verdict, "messages": messages})
        for message in messages:
            log.warning("validate_round@%d: %s", number, message)
        if messages:
            log.warning("validate_round@%d: nothing is trained on this data; the round keeps the policy before it", number)
        else:
            log.info("%d expectations met by %d pairs", len(findings), pairs.metadata.num_rows)


def with_advice(finding: Finding) -> Finding:
    return replace(finding, advice=ADVICE[finding.name]) if finding.name in ADVICE else finding


if __name__ == "__main__":
    main()
