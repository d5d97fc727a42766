"""Stage evaluate_round of a round of iterative DPO: compare the new policy with the one before it on the promotion split, and give a
verdict.

    python -m tasks.rounds.evaluate_round <number of the round>

In rounds/<n>/metrics/evaluate.json, `accepted` is whether the next round starts from the new policy, and `reason` why.
"""

from __future__ import annotations

import logging

from rlhf_core.data.schema import read_rows
from rlhf_core.paths import PREPARED, REWARD_MODEL, round_folder
from rlhf_core.rounds.pins import read_round
from rlhf_core.rounds.promotion import check_budget, verdict
from rlhf_core.stage.files import read_json, source_judges, write_json
from rlhf_core.stage.run import Stage, round_argument
from rlhf_core.stage.training import infer

log = logging.getLogger("rlhf")


def main() -> None:
    number = round_argument(__doc__)
    folder = round_folder(number)
    with Stage("evaluate_round", resumable=False, round_number=number) as stage:
        entry = read_round(number)
        entry.check(number)
        validation = read_json(folder / "metrics" / "validation.json")
        if validation["passed"]:
            from rlhf_core.rounds.comparison import compare

            promotion = stage.params.iterative.promotion
            check_budget(entry.budget, promotion.error_budget)
            rows = read_rows(PREPARED, "prompt", "promotion")
            metrics = infer(stage, compare, entry, number, folder / "policy", rows, REWARD_MODEL, source_judges())
            metrics |= {"trained": True, **verdict(metrics, promotion, entry.budget)}
        else:
            reason = f"the round's pairs were refused: {'; '.join(validation['messages'])}"
            metrics = {"trained": False, "accepted": False, "reason": reason}
        write_json(folder / "metrics" / "evaluate.json", {"round": number, "before": entry.policy.path, **metrics})
        log.info("evaluate_round@%d: %s: %s", number, "accepted" if metrics["accepted"] else "not accepted", metrics["reason"])


if __name__ == "__main__":
    main()
