"""Tiny sequence classifiers of real architectures, with weights large enough that their scores differ clearly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_models import lively
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

PAD, END, POSITIONS = 1, 3, 40
SHAPE = {
    "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "embedding_size": 16,
    "max_position_embeddings": POSITIONS, "bos_token_id": 2, "eos_token_id": END,
}  # fmt: skip
OF_TOKENS = ("llama", "qwen2", "gemma2", "gpt2", "gpt_neox")  # a linear layer `score`, read at the last token
# Scored by their own forward: pooler, deeper head, mean, or a transform before the classifier.
OF_SEQUENCES = ("bert", "roberta", "deberta-v2", "electra", "distilbert", "albert", "modernbert", "modernbert-decoder", "fnet", "xlnet")
OWN_SHAPES = {
    "xlnet": {"vocab_size": 300, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32},
    "modernbert": {**SHAPE, "classifier_pooling": "mean"},
}


def tiny_classifier(kind: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(4)
    config = AutoConfig.for_model(kind, **{"num_labels": 1, "pad_token_id": PAD, **OWN_SHAPES.get(kind, SHAPE), **changes})
    model = lively(AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)).eval()
    biases = (p for p in model.parameters() if p.ndim == 1)
    with torch.no_grad():
        for bias in biases:
            bias.add_(0.1 * torch.randn_like(bias))
    return model


def save_classifier(folder: Path, kind: str, tokenizer: Any = None, **changes: Any) -> Path:
    tiny_classifier(kind, **changes).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def own_scores_alone(model: PreTrainedModel, sequences: list[list[int]]) -> torch.Tensor:
    """Scores [N, labels] by transformers' own forward of each sequence alone, without padding."""
    return torch.cat([model.eval()(torch.tensor([ids])).logits for ids in sequences])
