"""Stage evaluate: the SFT model against the policy on prompts of the test split, greedy and sampled."""

from __future__ import annotations

from collections import Counter

from rlhf_core.data.hashing import conversation_text
from rlhf_core.data.schema import read_rows
from rlhf_core.paths import EVALUATION_PROMPTS, EVALUATION_SAMPLES, METRICS, POLICY_MODEL, PREPARED, REWARD_MODEL, SFT_MODEL
from rlhf_core.progress import Bar, drawing
from rlhf_core.stage.files import source_judges, write_json
from rlhf_core.stage.run import Stage, StageFailed, no_arguments

MICROBATCH_TOKENS = 8192
MODES = ("greedy", "sampled")
MODELS = {"sft": SFT_MODEL, "policy": POLICY_MODEL}
SPLIT = "test"


def main() -> None:
    with Stage("evaluate", resumable=False) as stage:
        pad_id, answers = generate_all(stage)
        metrics = measure(stage, answers, pad_id)
        write_samples(answers, stage.params.evaluation.table_rows)
        write_prompts(answers)
        write_json(METRICS / "evaluate.json", metrics)


def heldout_prompts(stage: Stage, tokenizers: dict) -> dict[str, list]:
    """`evaluation.prompts` prompts of the test split, in a seeded order, each of them once, that leave room for an answer (`apart`: which
    ones).

    The same for every model, each in the words of that model's own template: a policy's may ask for something that the SFT model's doesn't.
    """
    from rlhf_core.models.tokenizer import encode_prompt
    from rlhf_core.rounds.pool import distinct_prompts
    from rlhf_core.sampling.drawing import choose_prompts

    params = stage.params
    longest = params.model.max_length - params.evaluation.max_new_tokens
    rows = distinct_prompts(read_rows(PREPARED, "prompt", SPLIT))
    fitting = [r for r in rows if all(len(encode_prompt(t, r["messages"])) <= longest for t in tokenizers.values())]
    if not fitting:
        raise StageFailed(
            f"evaluation: expected held-out prompts of at most {longest} tokens, got none of {len(rows)}; raise model.max_length"
        )
    known, count = gate_prompts(), params.evaluation.prompts
    order = {name: choose_prompts(fitting, t, longest=longest, count=None, seed=params.seed) for name, t in tokenizers.items()}
    return {name: apart(prompts, count, known) for name, prompts in order.items()}


def apart(prompts: list, count: int, known: set[str]) -> list:
    """`count` of the prompts: as many of each source as the first `count` have, and of a source those first that aren't among the known."""
    left = Counter(prompt.source for prompt in prompts[:count])
    chosen = []
    for prompt in sorted(prompts, key=lambda p: conversation_text(p.messages) in known):  # stable
        if left[prompt.source]:
            left[prompt.source] -= 1
            chosen.append(prompt)
    return chosen


def gate_prompts() -> set[str]:
    """Canonical texts of the conversations whose pairs the gate judges by."""
    if not (PREPARED / "preference.parquet").exists():
        return set()
    return {conversation_text(row["messages"]) for row in read_rows(PREPARED, "preference", SPLIT)}


def generate_all(stage: Stage):
    """Every model's answers in every mode, scored and judged: {mode: {"sft": [...], "policy": [...]}}.

    They end where the policy's rollouts end: at an end token or a string of rl.rollout.stop.
    """
    from rlhf_core.engines.in_process import open_engine
    from rlhf_core.models.build import read_state_dict
    from rlhf_core.models.tokenizer import load_tokenizer, stop_ids
    from rlhf_core.sampling.requests import SamplingSettings, request_seeds

    params, config, stop = stage.params, stage.params.evaluation, tuple(stage.params.rl.rollout.stop)
    tokenizers = {name: load_tokenizer(str(folder), trust_remote_code=params.model.trust_remote_code) for name, folder in MODELS.items()}
    prompts = heldout_prompts(stage, tokenizers)
    engine = open_engine(
        params.rl.rollout.backend,
        str(SFT_MODEL),
        max_length=params.model.max_length,
        dtype=params.model.dtype,
        max_concurrent_sequences=256,
        threads=params.cluster.threads,
        seed=params.seed,
        trust_remote_code=params.model.trust_remote_code,
        gpu_memory_fraction=config.gpu_memory_fraction,
        reads_text=bool(stop),
    )
    ends = {name: stop_ids(tokenizer, MODELS[name]) for name, tokenizer in tokenizers.items()}
    seeds = request_seeds(params.seed, 0, len(prompts["sft"]))
    samples: dict[str, dict[str, list]] = {mode: {} for mode in MODES}
    try:
        with drawing("answer", len(tokenizers) * len(MODES) * len(seeds)) as bar:
            for name in tokenizers:
                if name == "policy":
                    engine.load_weights(read_state_dict(POLICY_MODEL), version=1)
                ids = [p.prompt_ids for p in prompts[name]]
                for mode in MODES:
                    settings = SamplingSettings(config.max_new_tokens, 0.0 if mode == "greedy" else config.temperature, stop=stop)
                    samples[mode][name] = engine.generate(ids, seeds, settings, stop_ids=ends[name], group_size=1)
                    bar.reach(len(seeds) * sum(map(len, samples.values())))
    finally:
        engine.close()  # before another model is loaded
    del engine
    return tokenizers["sft"].pad_token_id, score_and_judge(stage, tokenizers, ends, prompts, samples)


def score_and_judge(stage: Stage, tokenizers: dict, ends: dict[str, tuple[int, ...]], prompts: dict[str, list], samples):
    from rlhf_core.evaluation import judged
    from rlhf_core.sampling.scoring import LocalScorers, ResponseScorer

    judges = source_judges()
    scorers = LocalScorers(stage.params.evaluation_scorers, reward_model=REWARD_MODEL, source_judges=judges, model=stage.params.model)

    with Bar("scored answer", sum(len(groups) for by_model in samples.values() for groups in by_model.values())) as bar:

        def answers(name: str, groups: list) -> list:
            scorer = ResponseScorer(scorers, tokenizers[name], stops=ends[name])
            found = [judged(r, judges) for (r,) in scorer.score_groups(prompts[name], groups)]
            bar.step(len(found))
            return found

        return {mode: {name: answers(name, groups) for name, groups in by_model.items()} for mode, by_model in samples.items()}


def measure(stage: Stage, answers, pad_id: int) -> dict:
    """The stage's metrics: see tasks/report.py for who reads them.

    The divergence is between what the two models make of a request as each is asked it.
    """
    from rlhf_core.evaluation import asked_as, differences, load_policy, response_logprobs, summarize, win_rate

    config = stage.params.evaluation
    logprobs = {}
    how = {"pad_id": pad_id, "microbatch_tokens": MICROBATCH_TOKENS, "temperature": config.temperature}
    with Bar("pass for log-probabilities", len(MODELS) * len(MODES)) as bar:
        for name, folder in MODELS.items():
            module = load_policy(folder, stage.params.model)
            for mode in MODES:
                logprobs[name, mode] = response_logprobs(module, asked_as(answers[mode]["policy"], answers[mode][name]), **how)
                bar.step()
            del module  # before the next one is loaded
    metrics = {
        mode: {name: summarize(a, confidence=config.confidence) for name, a in by_model.items()} for mode, by_model in answers.items()
    }
    metrics["win_rate"] = {mode: win_rate(a["policy"], a["sft"], confidence=config.confidence) for mode, a in answers.items()}
    metrics["difference"] = {mode: differences(a["policy"], a["sft"], confidence=config.confidence) for mode, a in answers.items()}
    metrics["kl"] = {mode: float((logprobs["policy", mode] - logprobs["sft", mode]).mean()) for mode in MODES}
    known = gate_prompts() if stage.params.reward.enabled else set()
    metrics["split"] = SPLIT
    metrics["prompts_of_gate"] = sum(conversation_text(a.prompt.messages) in known for a in answers["greedy"]["policy"])
    metrics["judge"] = any(a.judgement is not None for a in answers["greedy"]["policy"])
    return metrics


def write_samples(answers, rows: int) -> None:
    """The first prompts' answers side by side."""
    import pandas as pd

    table = [
        {
            "id": sft.prompt.id,
            "source": sft.prompt.source,
            "prompt": "\n".join(f"{m['role']}: {m['content']}" for m in sft.prompt.messages),
            "mode": mode,
            "sft_response": sft.text,
            "policy_response": policy.text,
            "sft_score": sft.score,
            "policy_score": policy.score,
            "sft_judge_ok": sft.judgement.ok if sft.judgement else None,
            "policy_judge_ok": policy.judgement.ok if policy.judgement else None,
        }
        for mode, by_model in answers.items()
        for sft, policy in list(zip(by_model["sft"], by_model["policy"], strict=True))[:rows]
    ]
    pd.DataFrame(table).to_parquet(EVALUATION_SAMPLES, index=False)


def write_prompts(answers) -> None:
    """Every prompt's results, for comparisons of runs that asked the same prompts."""
    import pandas as pd

    from rlhf_core.evaluation import by_prompt

    table = pd.DataFrame(by_prompt(answers)).convert_dtypes()
    table.to_csv(EVALUATION_PROMPTS, index=False, float_format="%.6g", lineterminator="\n")


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
