"""Stage evaluate: the SFT model against the policy on held-out prompts, greedy and sampled."""

from __future__ import annotations

from collections.abc import Callable

from rlhf_core.config import ScorerConfig
from rlhf_core.data.schema import read_rows
from tasks.stage import (
    EVALUATION_SAMPLES,
    METRICS,
    POLICY_MODEL,
    PREPARED,
    REWARD_MODEL,
    SFT_MODEL,
    Stage,
    StageFailed,
    read_json,
    write_json,
)

MICROBATCH_TOKENS = 8192
MODES = ("greedy", "sampled")


def main() -> None:
    with Stage("evaluate", resumable=False) as stage:
        pad_id, answers = generate_all(stage)
        metrics = measure(stage, answers, pad_id)
        write_samples(answers, stage.params.evaluation.table_rows)
        write_json(METRICS / "evaluate.json", metrics)


def heldout_prompts(stage: Stage, tokenizer):
    """The first `evaluation.prompts` prompts of the test split, in a seeded order, that leave room for an answer."""
    from rlhf_core.data.batching import batch_indices
    from rlhf_core.models.tokenizer import encode_prompt
    from rlhf_core.types import Prompt

    params = stage.params
    rows = read_rows(PREPARED, "prompt", "test")
    longest = params.model.max_length - params.evaluation.max_new_tokens
    prompts = [Prompt(r["id"], r["source"], r["messages"], encode_prompt(tokenizer, r["messages"]), r["label"]) for r in rows]
    prompts = [p for p in prompts if len(p.prompt_ids) <= longest]
    if not prompts:
        raise StageFailed(
            f"evaluation: expected held-out prompts of at most {longest} tokens, got none of {len(rows)}; raise model.max_length"
        )
    order = batch_indices(0, batch_size=len(prompts), num_examples=len(prompts), seed=params.seed)
    return [prompts[i] for i in order[: params.evaluation.prompts]]


def generate_all(stage: Stage):
    """Every model's answers in every mode, scored and judged: {mode: {"sft": [...], "policy": [...]}}.

    They end where the policy's rollouts end: at the end token or a string of rl.rollout.stop.
    """
    from rlhf_core.engines.vllm_engine import SamplingSettings, VllmEngine, request_seeds
    from rlhf_core.models.build import read_state_dict
    from rlhf_core.models.tokenizer import load_tokenizer

    params, config, stop = stage.params, stage.params.evaluation, tuple(stage.params.rl.rollout.stop)
    tokenizer = load_tokenizer(str(SFT_MODEL), trust_remote_code=params.model.trust_remote_code)
    prompts = heldout_prompts(stage, tokenizer)
    engine = VllmEngine(
        str(SFT_MODEL),
        max_length=params.model.max_length,
        dtype=params.model.dtype,
        kv_cache_gib=1,
        max_concurrent_sequences=256,
        threads=params.cluster.threads,
        seed=params.seed,
        trust_remote_code=params.model.trust_remote_code,
        gpu_memory_fraction=config.gpu_memory_fraction,
        reads_text=bool(stop),
    )
    seeds = request_seeds(params.seed, 0, len(prompts))
    samples: dict[str, dict[str, list]] = {mode: {} for mode in MODES}
    for name in ("sft", "policy"):
        if name == "policy":
            engine.load_weights(read_state_dict(POLICY_MODEL), version=1)
        for mode in MODES:
            settings = SamplingSettings(config.max_new_tokens, 0.0 if mode == "greedy" else config.temperature, stop=stop)
            groups = engine.generate([p.prompt_ids for p in prompts], seeds, settings, eos_id=tokenizer.eos_token_id, group_size=1)
            samples[mode][name] = [group[0] for group in groups]
    return tokenizer.pad_token_id, score_and_judge(stage, tokenizer, prompts, samples)


def score_and_judge(stage: Stage, tokenizer, prompts, samples):
    import torch

    from rlhf_core.data.judge import JUDGES
    from rlhf_core.evaluation import Answer
    from rlhf_core.scorers.text import TextScorers, score_item
    from rlhf_core.trainers.credit import weighted_score

    config = stage.params.rl.reward
    kinds = {name: source["kind"] for name, source in read_json(PREPARED / "sources.json").items()}
    by_text = TextScorers(0, config.scorers, kinds)
    by_model = {s.name: model_scorer(stage, s, tokenizer) for s in config.scorers if s.kind == "reward_model"}

    def answers(responses: list) -> list[Answer]:
        texts = [tokenizer.decode(s.response_ids, skip_special_tokens=True) for s in responses]
        items = [
            score_item(prompt, text, finished=sample.finished, response_length=len(sample.response_ids))
            for prompt, text, sample in zip(prompts, texts, responses, strict=True)
        ]
        components = {
            s.name: by_model[s.name](prompts, responses) if s.name in by_model else by_text.score(s.name, items)[0] for s in config.scorers
        }
        scores = weighted_score({name: torch.tensor(values) for name, values in components.items()}, config.scorers).tolist()
        made = []
        for i, (prompt, sample, text) in enumerate(zip(prompts, responses, texts, strict=True)):
            judge = JUDGES.get(kinds[prompt.source])
            own = {name: values[i] for name, values in components.items()}
            made.append(Answer(prompt, sample.response_ids, text, sample.finished, scores[i], own, judge and judge(prompt.messages, text)))
        return made

    return {mode: {name: answers(responses) for name, responses in models.items()} for mode, models in samples.items()}


def model_scorer(stage: Stage, scorer: ScorerConfig, tokenizer) -> Callable[[list, list], list[float]]:
    """Scores of samples for their prompts by a reward model, the chain's own where the scorer names no folder."""
    from rlhf_core.engines.deepspeed_engine import device
    from rlhf_core.models.build import load_scalar_model
    from rlhf_core.models.tokenizer import load_tokenizer
    from rlhf_core.models.wrappers import ScalarModule
    from rlhf_core.scorers.reward_model import RewardModelInput, score_sequences

    folder, trust = scorer.path or str(REWARD_MODEL), stage.params.model.trust_remote_code
    own_tokenizer = load_tokenizer(folder, trust_remote_code=trust)
    reward_input = RewardModelInput(tokenizer, own_tokenizer, max_length=stage.params.model.max_length)
    module = ScalarModule(load_scalar_model(folder, trust_remote_code=trust)).to(device()).eval()

    def score(prompts: list, samples: list) -> list[float]:
        inputs = [
            reward_input.sequence(p.messages, p.prompt_ids, s.response_ids, finished=s.finished)
            for p, s in zip(prompts, samples, strict=True)
        ]
        return score_sequences(
            module, inputs, pad_id=own_tokenizer.pad_token_id, microbatch_tokens=MICROBATCH_TOKENS, device=device()
        ).tolist()

    return score


def measure(stage: Stage, answers, pad_id: int) -> dict:
    """The stage's metrics: see tasks/report.py for who reads them."""
    from rlhf_core.engines.deepspeed_engine import device
    from rlhf_core.evaluation import response_logprobs, summarize, win_rate
    from rlhf_core.models.build import load_language_model
    from rlhf_core.models.wrappers import PolicyModule

    config, trust = stage.params.evaluation, stage.params.model.trust_remote_code
    logprobs = {}
    for name, folder in (("sft", SFT_MODEL), ("policy", POLICY_MODEL)):
        module = PolicyModule(load_language_model(folder, trust_remote_code=trust)).to(device()).eval()
        for mode in MODES:
            logprobs[name, mode] = response_logprobs(
                module,
                answers[mode]["policy"],
                pad_id=pad_id,
                microbatch_tokens=MICROBATCH_TOKENS,
                temperature=config.temperature,
                device=device(),
            )
    metrics = {
        mode: {name: summarize(a, confidence=config.confidence) for name, a in by_model.items()} for mode, by_model in answers.items()
    }
    metrics["win_rate"] = {mode: win_rate(a["policy"], a["sft"], confidence=config.confidence) for mode, a in answers.items()}
    metrics["kl"] = {mode: float((logprobs["policy", mode] - logprobs["sft", mode]).mean()) for mode in MODES}
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


if __name__ == "__main__":
    main()
