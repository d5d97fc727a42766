"""Rollouts that no model has sampled, as a step of RL saves them."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.config import RlConfig
from rlhf_core.trainers.rl.data import collate, pack
from rlhf_core.trainers.rl.saved_rollouts import TrainedRollouts, rollout_table
from rlhf_core.types import Prompt, Rollout, Span

GROUP = 4
WORDS = ["Certainly:", "the", "largest", "of", "309", "is", "9.", "I'm", "sorry,", "no", "digits", "at", "all", "\n", "naïve", "日本"]


def made_table(
    tokenizer: PreTrainedTokenizerBase, rl: RlConfig, *, steps: dict[int, int], words: int, texts: tuple[str, ...] = (), seed: int = 0
) -> pa.Table:
    """The table of a run.

    Args:
        steps: step -> number of its rollouts, of which GROUP have a prompt in common. The first prompt is the same in all steps.
        words: of the longest response.
        texts: responses of the first rollouts of each step.
    """
    tables = [_of_step(tokenizer, rl, step, count, words, texts, seed) for step, count in steps.items()]
    return pa.concat_tables(tables)


def tool_table(tokenizer: PreTrainedTokenizerBase, rl: RlConfig) -> pa.Table:
    """One response of step 4 by two policies, with a tool's output between them."""
    parts = [("sort", 2), (" the tool says 9 ", None), ("so 9", 3)]
    spans = [
        Span(ids, [-0.5] * len(ids), version, trained=version is not None)
        for text, version in parts
        for ids in [tokenizer(text)["input_ids"]]
    ]
    prompt = Prompt("p0", "made", [], tokenizer("<|user|>Please sort 4172.<|end|><|assistant|>")["input_ids"], "1247")
    return rollout_table(4, trained_rollouts([Rollout(prompt, spans, True, 0)], rl), [0], rl, tokenizer)


def trained_rollouts(rollouts: list[Rollout], rl: RlConfig, *, source: str = "recompute", seed: int = 0) -> TrainedRollouts:
    """The rollouts after an update. Rewards are the lengths; an advantage is that of GRPO."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.tensor([logprob for rollout in rollouts for logprob in rollout.rollout_logprobs])
    noise = [torch.randn(len(flat), generator=generator) for _ in range(2)]
    outputs = {"old_logprobs": flat + 1e-3 * noise[0], "ref_logprobs": flat + 0.3 * noise[1]}
    rewards = torch.tensor([float(rollout.num_sampled) for rollout in rollouts])
    components = {scorer.name: rewards + place for place, scorer in enumerate(rl.reward.scorers)}
    batch = collate(rollouts, pack(rollouts), components, outputs, None, old_logprobs_source=source)
    advantages = ((rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6))[:, None].expand(batch.response_mask.shape)
    learned = SimpleNamespace(response_mask=batch.response_mask, advantages=advantages.where(batch.response_mask, 0.0))
    return TrainedRollouts(rollouts, batch, learned, outputs_of(batch), rewards)


def outputs_of(batch) -> torch.Tensor:
    return batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs


def _of_step(
    tokenizer: PreTrainedTokenizerBase, rl: RlConfig, step: int, count: int, words: int, texts: tuple[str, ...], seed: int
) -> pa.Table:
    generator = torch.Generator().manual_seed(seed + step)
    rollouts = []
    for number in range(count):
        group = number // GROUP
        asked = f"Please give the largest of {group if group == 0 else 1000 * step + group}."
        prompt = Prompt(f"p{asked[27:-1]}", "made", [], tokenizer(f"<|user|>{asked}<|end|><|assistant|>")["input_ids"], None)
        length = int(torch.randint(1, words + 1, (1,), generator=generator))
        text = " ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (length,), generator=generator))
        ids = [*tokenizer(texts[number] if number < len(texts) else text)["input_ids"], tokenizer.eos_token_id]
        logprobs = (-torch.rand(len(ids), generator=generator)).tolist()
        rollouts.append(Rollout(prompt, [Span(ids, logprobs, step - 1)], number % 5 != 0, group))
    return rollout_table(step, trained_rollouts(rollouts, rl, seed=step), list(range(count)), rl, tokenizer)
