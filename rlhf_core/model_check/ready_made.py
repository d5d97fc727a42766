"""Check that a third-party reward model's scores equal those of its own forward pass, on a small copy of it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig

from rlhf_core.config import ModelConfig, ScorerConfig
from rlhf_core.engines.deepspeed_engine import device
from rlhf_core.model_check.miniature import random_model, smaller
from rlhf_core.model_check.trial import Finding, judged, largest, random_sequences, refused
from rlhf_core.models.build import classifier
from rlhf_core.models.folder import check_model_folder, refusals
from rlhf_core.models.forward import ScalarModule
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.scorers.needs import check_ready_made, ready_made_folder
from rlhf_core.scorers.reward_model import score_sequences


def try_ready_made(scorer: ScorerConfig, model: ModelConfig) -> Finding:
    """The largest difference of a score from that of the model's own forward of each sequence alone, or why there is no score."""
    column = f"scorer {scorer.name}"
    try:
        return judged(column, _difference(scorer, ready_made_folder(scorer), model))
    except Exception as error:  # libraries raise anything on a model that they can't compute
        return refused(column, error)


def _difference(scorer: ScorerConfig, folder: Path, model: ModelConfig) -> float:
    check_model_folder(folder)
    check_ready_made(scorer, folder)
    load_tokenizer(str(folder), trust_remote_code=model.trust_remote_code, template_date=model.template_date, scores=True)
    with refusals(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    cut = smaller(config, kind=classifier(type(config)), trust_remote_code=model.trust_remote_code)
    copy = random_model(cut, seed=0, labels=cut.num_labels, trust_remote_code=model.trust_remote_code).to(device()).eval()
    module = ScalarModule(copy, label=scorer.label)
    longest = min(model.max_length, module.score_head.max_tokens or model.max_length)
    sequences = random_sequences(cut.get_text_config().vocab_size, longest, seed=0)
    ours = score_sequences(module, sequences, pad_id=0, microbatch_tokens=4 * longest, device=device())
    with torch.no_grad():
        rows = [copy(input_ids=torch.tensor([ids], device=device())).logits[0].float().cpu() for ids in sequences]
    number = {str(name): i for i, name in copy.config.id2label.items()}.get(str(scorer.label), scorer.label or 0)
    return largest(ours, torch.stack(rows)[:, number])
