"""A reward model is shown what its own template makes of the whole conversation, whoever asks it and however a response ended."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from chat_templates import TEMPLATES, templated
from classifiers import own_scores_alone, save_classifier, tiny_classifier
from tiny_models import MAX_LENGTH, tiny_params, tiny_tokenizer
from transformers import BertTokenizer, PreTrainedTokenizerBase

from rlhf_core.config import ScorerConfig
from rlhf_core.engines.rollout.requests import Sample
from rlhf_core.gate.scoring import LoadedModel
from rlhf_core.models.tokenizer import encode_prompt, encode_scored, load_tokenizer, turn_end
from rlhf_core.progress import Reasons
from rlhf_core.sampling.scoring import LocalScorers, ResponseScorer
from rlhf_core.scorers.reward.input import RewardModelInput
from rlhf_core.trainers.sft.conditional import RatedResponse, reward_scores
from rlhf_core.types import Prompt

QUESTION = [{"role": "user", "content": "Please sort 4172."}]
ANSWER = "Certainly: 1247."


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def rendered(tokenizer: PreTrainedTokenizerBase, response: str, messages=QUESTION) -> str:
    return tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": response}], tokenize=False)


def shown(
    policy: PreTrainedTokenizerBase,
    reward: PreTrainedTokenizerBase,
    response_ids: list[int],
    *,
    finished: bool = True,
    messages=QUESTION,
    stops: tuple[int, ...] = (),
    report: Reasons | None = None,
) -> list[int] | None:
    prompt = Prompt("p", "mine", messages, encode_prompt(policy, messages), None)
    (ids,) = RewardModelInput(policy, reward, max_length=200, stops=stops, report=report).sequences([(prompt, response_ids, finished)])
    return ids


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("name", sorted({*TEMPLATES} - {"endless"}))  # which ends no turn: eos does there
def test_a_finished_response_is_shown_as_the_template_renders_the_conversation(name: str, same: bool):
    """CORRECTNESS, reward models from elsewhere: with what comes behind the end, such as ChatML's line break."""
    reward = templated(name)
    policy = templated(name) if same else tiny_tokenizer()
    sampled = [*ids_of(policy, ANSWER), *turn_end(policy).trained]
    found = shown(policy, reward, sampled)
    if name == "parts":
        expected = f"<|im_start|>user:{QUESTION[0]['content']}<|im_end|>\n<|im_start|>assistant:{ANSWER}<|im_end|>\n"
    else:
        expected = rendered(reward, ANSWER)
    assert reward.decode(found) == expected
    assert found == encode_scored(reward, QUESTION, ANSWER)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("name", ["chatml", "trimmed", "brackets", "role_tokens"])
def test_a_truncated_response_has_neither_end(name: str, same: bool):
    reward = templated(name)
    policy = templated(name) if same else tiny_tokenizer()
    found = shown(policy, reward, ids_of(policy, "Certainly: 12"), finished=False)
    text, whole = reward.decode(found), rendered(reward, "Certainly: 12")
    assert text.endswith("Certainly: 12") and whole.startswith(text)


def test_the_built_in_templates_finished_response_is_the_very_ids_that_were_sampled(tokenizer):
    sampled = [*ids_of(tokenizer, ANSWER), tokenizer.eos_token_id]
    assert shown(tokenizer, tiny_tokenizer(), sampled) == encode_prompt(tokenizer, QUESTION) + sampled


@pytest.mark.parametrize("name", ["built-in", "chatml"])
def test_a_response_that_a_stop_string_ended_is_shown_as_finished_with_that_string(name: str):
    """CORRECTNESS, stop strings: the reward model sees what it saw of finished responses in training."""
    tokenizer, twin = (tiny_tokenizer() if name == "built-in" else templated(name) for _ in range(2))
    end = turn_end(tokenizer)
    sampled = ids_of(tokenizer, "Certainly: 1247.\nUser")
    found = shown(tokenizer, twin, sampled)
    assert found == [*encode_prompt(tokenizer, QUESTION), *sampled, *end.trained, *end.after]
    assert found == encode_scored(twin, QUESTION, "Certainly: 1247.\nUser")


def test_a_response_that_another_end_token_ended_is_shown_with_the_templates():
    tokenizer, twin = templated("chatml"), templated("chatml")
    content = ids_of(tokenizer, ANSWER)
    expected = encode_scored(twin, QUESTION, ANSWER)
    assert shown(tokenizer, twin, [*content, tokenizer.eos_token_id]) == expected  # not <|im_end|>
    assert shown(tokenizer, twin, [*content, tokenizer.convert_tokens_to_ids("<|im_end|>")]) == expected
    # A token that is said and not special: a stop string may end with it.
    call = [*content, tokenizer.convert_tokens_to_ids("</tool_call>")]
    assert shown(tokenizer, twin, call)[: -len([*turn_end(twin).trained, *turn_end(twin).after])] == encode_prompt(twin, QUESTION) + call


@pytest.mark.parametrize("same", [True, False])
def test_an_end_token_that_is_not_special_is_no_part_of_a_finished_response(same: bool):
    """Such as generation_config.json may name."""
    policy, reward = templated("chatml"), templated("chatml" if same else "trimmed")
    end = policy.convert_tokens_to_ids("</tool_call>")
    sampled = [*ids_of(policy, ANSWER), end]
    assert shown(policy, reward, sampled, stops=(end,)) == encode_scored(reward, QUESTION, ANSWER)
    assert "</tool_call>" in reward.decode(shown(policy, reward, sampled))


def test_texts_are_scored_without_an_end_token_that_is_not_special(tmp_path: Path):
    tokenizer = templated("chatml")
    end = tokenizer.convert_tokens_to_ids("</tool_call>")
    config = ScorerConfig(name="is", kind="regex", weight=1.0, normalization="none", pattern="call")
    prompt = Prompt("p", "mine", QUESTION, encode_prompt(tokenizer, QUESTION), None)
    samples = [[Sample([*ids_of(tokenizer, ANSWER), end], [], finished) for finished in (True, False)]]
    scorers = LocalScorers([config], reward_model=tmp_path, source_judges={}, model=tiny_params().model)
    ((ended, cut),) = ResponseScorer(scorers, tokenizer, stops=(end,)).score_groups([prompt], samples)
    assert ended.text == ANSWER and cut.text == ANSWER + "</tool_call>"


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("response", [" Certainly: 1247.", "Certainly: 1247.\n", "\n 1247 \n\n"])
def test_a_template_that_trims_is_no_end_of_the_run_for_a_response_with_white_space_at_an_edge(same: bool, response: str):
    reward = templated("trimmed")
    policy = templated("trimmed") if same else tiny_tokenizer()
    found = shown(policy, reward, [*ids_of(policy, response), *turn_end(policy).trained])
    assert reward.decode(found) == rendered(reward, response) and found == ids_of(reward, rendered(reward, response))


def test_a_conversation_that_the_template_refuses_is_unscored_for_a_reason_that_is_logged_once(caplog):
    policy, reward, report = tiny_tokenizer(), templated("trimmed"), Reasons("manners")
    system = [{"role": "system", "content": "Be brief."}, *QUESTION]
    sampled = [*ids_of(policy, ANSWER), policy.eos_token_id]
    for _ in range(2):
        assert shown(policy, reward, sampled, messages=system, report=report) is None
    assert shown(policy, reward, sampled, report=report) is not None
    message = [r.getMessage() for r in caplog.records if "manners" in r.getMessage()]
    assert len(message) == 1 and "got none for 1" in message[0] and "Turns have to go user, model, user" in message[0]


def test_a_response_that_is_too_long_is_unscored_for_a_reason_that_is_logged_with_the_number_of_them(caplog):
    tokenizer = tiny_tokenizer()
    prompt = Prompt("p", "mine", QUESTION, encode_prompt(tokenizer, QUESTION), None)
    requested = [(prompt, [9] * n, False) for n in (MAX_LENGTH, 1, MAX_LENGTH)]
    found = RewardModelInput(tokenizer, tiny_tokenizer(), max_length=MAX_LENGTH, report=Reasons("manners")).sequences(requested)
    assert [ids is None for ids in found] == [True, False, True]
    (message,) = (r.getMessage() for r in caplog.records if "manners" in r.getMessage())
    assert f"got none for 2; more than {MAX_LENGTH} tokens" in message


# One way from conversation to score


@pytest.fixture
def chatml_folder(tmp_path: Path) -> Path:
    """A ready-made reward model that is read at the line break behind its end token."""
    return save_classifier(tmp_path / "ready", "qwen2", templated("chatml"), vocab_size=400, max_position_embeddings=MAX_LENGTH)


def own_score(folder: Path, response: str) -> float:
    """As its authors would ask it: transformers' model on the template's rendering."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    return float(own_scores_alone(model, [ids_of(tokenizer, rendered(tokenizer, response))])[0, 0])


def by_response_scorer(folder: Path, response: str, **changes: str) -> float:
    tokenizer = tiny_tokenizer()
    config = ScorerConfig(name="ready", kind="reward_model", weight=1.0, normalization="none", path=str(folder))
    model = tiny_params(**{key.replace("__", "."): value for key, value in changes.items()}).model
    scorers = LocalScorers([config], reward_model=folder, source_judges={}, model=model)
    prompt = Prompt("p", "mine", QUESTION, encode_prompt(tokenizer, QUESTION), None)
    sample = Sample([*ids_of(tokenizer, response), tokenizer.eos_token_id], [], True)
    return ResponseScorer(scorers, tokenizer).score_groups([prompt], [[sample]])[0][0].components["ready"]


def by_gate(folder: Path, response: str) -> float:
    return float(LoadedModel.load(folder, max_length=MAX_LENGTH, trust_remote_code=False).score_texts([(QUESTION, response)])[0])


def by_conditional_sft(folder: Path, response: str) -> float:
    how = {"max_length": MAX_LENGTH, "trust_remote_code": False, "stop_requested": lambda: False}
    return reward_scores(folder, [RatedResponse(QUESTION, response, 0, 0)], **how)[0]


@pytest.mark.parametrize("ask", [by_response_scorer, by_gate, by_conditional_sft])
def test_a_ready_made_model_scores_as_its_authors_do(chatml_folder: Path, ask):
    for response in (ANSWER, "no", "Sorry, I can't help with that."):
        assert ask(chatml_folder, response) == pytest.approx(own_score(chatml_folder, response), abs=1e-5)
    assert abs(own_score(chatml_folder, ANSWER) - own_score(chatml_folder, "no")) > 0.05


def test_gate_and_conditional_sft_leave_a_conversation_that_is_not_rendered_unscored(tmp_path: Path):
    folder = save_classifier(tmp_path, "qwen2", templated("trimmed"), vocab_size=400, max_position_embeddings=MAX_LENGTH)
    system = [{"role": "system", "content": "Be brief."}, *QUESTION]
    scores = LoadedModel.load(folder, max_length=MAX_LENGTH, trust_remote_code=False).score_texts([(system, "a"), (QUESTION, " a ")])
    assert math.isnan(scores[0]) and math.isfinite(scores[1])
    how = {"max_length": MAX_LENGTH, "trust_remote_code": False, "stop_requested": lambda: False}
    scores = reward_scores(folder, [RatedResponse(system, "a", 0, 0), RatedResponse(QUESTION, " a ", 0, 0)], **how)
    assert math.isnan(scores[0]) and math.isfinite(scores[1])


# Tokenizers of encoders

# Question and answer as the pair that such a tokenizer makes of two texts. A generation prompt is what comes before an answer: nothing.
PAIR = (
    "{{ '[CLS]' }}{% for m in messages %}{{ m.content + ('[SEP]' if m.role == 'assistant' or loop.last or "
    "messages[loop.index].role == 'assistant' else '\\n') }}{% endfor %}"
)


def bert_tokenizer(folder: Path, template: str | None) -> BertTokenizer:
    """WordPiece without an end token, as encoders have."""
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "please",
        "sort",
        "certainly",
        ":",
        ".",
        *"0123456789",
        *(f"##{d}" for d in range(10)),
    ]
    (folder / "vocab.txt").write_text("\n".join(words))
    tokenizer = BertTokenizer(vocab=str(folder / "vocab.txt"))
    tokenizer.chat_template = template
    return tokenizer


def test_an_encoders_tokenizer_without_an_end_token_is_enough_for_a_reward_model(tmp_path: Path):
    folder = save_classifier(tmp_path / "bert", "bert", bert_tokenizer(tmp_path, PAIR), pad_token_id=0)
    tokenizer = load_tokenizer(str(folder), trust_remote_code=False, scores=True)
    with pytest.raises(ValueError, match="expected an eos token, got none"):
        load_tokenizer(str(folder), trust_remote_code=False)
    ids = encode_scored(tokenizer, QUESTION, ANSWER)
    assert ids == tokenizer(QUESTION[0]["content"], ANSWER)["input_ids"]  # as a pair, which is how such models are trained
    for ask in (by_response_scorer, by_gate):
        assert ask(folder, ANSWER) == pytest.approx(own_score(folder, ANSWER), abs=1e-5)


def test_a_reward_model_without_a_template_is_refused_in_words(tmp_path: Path):
    folder = save_classifier(tmp_path / "bert", "bert", bert_tokenizer(tmp_path, None), pad_token_id=0)
    with pytest.raises(ValueError, match=r"expected a reward model's own chat template, .* got none; add a chat_template.jinja"):
        by_gate(folder, ANSWER)


def test_a_reward_models_template_writes_the_day_of_the_model_section(tmp_path: Path):
    tokenizer = templated("chatml")
    tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d') }}" + tokenizer.chat_template
    folder = save_classifier(tmp_path / "dated", "qwen2", tokenizer, vocab_size=400, max_position_embeddings=MAX_LENGTH)
    day = "2019-01-02"
    how = {"max_length": MAX_LENGTH, "trust_remote_code": False, "template_date": day}
    gate = LoadedModel.load(folder, **how)
    assert gate.tokenizer.decode(gate.encode(QUESTION, ANSWER)).startswith(day)
    expected = gate.score_texts([(QUESTION, ANSWER)])[0]
    found = reward_scores(folder, [RatedResponse(QUESTION, ANSWER, 0, 0)], **how, stop_requested=lambda: False)
    assert found == pytest.approx([expected], abs=1e-5)
    assert by_response_scorer(folder, ANSWER, model__template_date=day) == pytest.approx(expected, abs=1e-5)
    assert by_response_scorer(folder, ANSWER) != pytest.approx(expected, abs=1e-5)


def test_scores_of_a_classifier_with_labels_are_those_of_the_chosen_one(tmp_path: Path):
    names = {0: "NEGATIVE", 1: "POSITIVE"}
    folder = save_classifier(tmp_path, "llama", templated("chatml"), vocab_size=400, num_labels=2, id2label=names)
    config = ScorerConfig(name="mood", kind="reward_model", weight=1.0, normalization="none", path=str(folder), label="POSITIVE")
    tokenizer = templated("chatml")
    prompt = Prompt("p", "mine", QUESTION, encode_prompt(tokenizer, QUESTION), None)
    sample = Sample([*ids_of(tokenizer, "no"), *turn_end(tokenizer).trained], [], True)
    model = tiny_params().model
    scorers = LocalScorers([config], reward_model=folder, source_judges={}, model=model)
    ((scored,),) = ResponseScorer(scorers, tokenizer).score_groups([prompt], [[sample]])
    expected = own_scores_alone(tiny_classifier("llama", vocab_size=400, num_labels=2), [encode_scored(tokenizer, QUESTION, "no")])
    assert scored.components["mood"] == pytest.approx(float(expected[0, 1]), abs=1e-5)
    with pytest.raises(ValueError, match="label: expected none for a scorer of kind length"):
        ScorerConfig(name="l", kind="length", weight=1.0, normalization="none", target_length=3, label=1)
