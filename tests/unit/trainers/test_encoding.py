"""Texts tokenized together, in the background and by two ranks, beside one at a time."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from chat_templates import TEMPLATES, templated
from rank_processes import run_processes

from rlhf_core.data.tokens import EncodedTurns
from rlhf_core.engines.ports import free_ports
from rlhf_core.models import response_ids
from rlhf_core.models.tokenizer import Unrenderable, encode_scored_turns, encode_turns
from rlhf_core.trainers.supervised.encoding import in_background

PROMPT = [{"role": "user", "content": "Please sort 4172."}]
LONGER = [*PROMPT, {"role": "assistant", "content": "<think>\nb\n</think>\n\n1247."}, {"role": "user", "content": "Sort 21."}]
TEXTS = ["12.", " 12.\n", "<think>\n2 and 1.\n</think>\n\n12.", "<|im_end|>", "", "12."]
ASKED = [(messages, text) for messages in (PROMPT, LONGER, PROMPT) for text in TEXTS]
TURNS = [(messages, {"role": "assistant", "content": text}) for messages, text in ASKED]
REFUSED = [{"role": "system", "content": "Be brief."}, *PROMPT]  # by the template `trimmed`


def values(turns: EncodedTurns) -> list[tuple[list[int], int, int]]:
    return [(turns.ids(i), turns.start(i), turns.thoughts[i]) for i in range(len(turns))]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(("encode", "asked"), [(encode_turns, TURNS), (encode_scored_turns, ASKED)])
def test_ids_are_those_of_each_conversation_alone(name, encode, asked, monkeypatch):
    tokenizer = templated(name)
    alone = [value for one in asked for value in values(encode(tokenizer, [one]))]
    monkeypatch.setattr(response_ids, "TEXTS_AT_ONCE", 7)
    assert values(encode(tokenizer, asked)) == alone
    assert values(in_background(encode, tokenizer, asked)()) == alone


def on_rank(rank: int, port: int, folder: str) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=120))
    tokenizer = templated("trimmed")
    whole = [values(in_background(encode_turns, tokenizer, asked)()) for asked in (TURNS[:5], TURNS[:1], [])]
    with pytest.raises(Unrenderable, match="have to go user, model"):
        in_background(encode_turns, tokenizer, [*TURNS[:3], (REFUSED, TURNS[0][1])])()  # in the share of rank 1
    (Path(folder) / f"{rank}.json").write_text(json.dumps(whole))
    dist.destroy_process_group()


def test_two_ranks_share_the_work_and_both_raise_what_one_does(tmp_path: Path):
    (port,) = free_ports(1)
    run_processes(on_rank, [(rank, port, str(tmp_path)) for rank in (0, 1)], deadline=240)
    tokenizer = templated("trimmed")
    expected = json.loads(json.dumps([values(encode_turns(tokenizer, asked)) for asked in (TURNS[:5], TURNS[:1], [])]))
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)] == [expected, expected]
