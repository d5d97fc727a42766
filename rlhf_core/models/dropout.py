"""Training without dropout: the model computes in training what it computes as a reference, or as a rollout engine's copy."""

from __future__ import annotations

from torch import nn


def disable_dropout(module: nn.Module) -> None:
    """Put a module into evaluation mode, but for the dropout of adapters, which is their own setting (lora.dropout). Gradients flow.

    Rates aren't looked for and set to 0: an attention function takes its rate as a number, from an attribute (Llama, GPT-NeoX), a module
    that is never called (GPT-2) or the configuration (Falcon), and a router's noise or a dropped layer has yet other names. All of them
    ask whether they are in training. The configuration stays as it is, and so does what is saved of it.
    """
    module.eval()
    for name, part in module.named_modules():
        if name.endswith(".lora_dropout"):
            part.train()
