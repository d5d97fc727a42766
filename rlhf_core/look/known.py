"""Well-known data sets, by their columns."""

from __future__ import annotations

from collections.abc import Iterable

from rlhf_core.look.guess import Columns, Reading

# Name, columns, and the format with its further keys; "" if no format reads them.
KNOWN = (
    ("UltraFeedback (binarized)", {"prompt", "prompt_id", "chosen", "rejected", "messages", "score_chosen"}, "preference"),
    ("ORPO-DPO-mix", {"source", "prompt", "chosen", "rejected"}, "preference"),
    ("HelpSteer", {"prompt", "response", "helpfulness", "correctness", "coherence"}, ""),
    ("HelpSteer2-Preference", {"prompt", "response_1", "response_2", "preference_strength"}, "compared"),
    ("HelpSteer3-Preference", {"context", "response1", "response2", "overall_preference"}, "compared"),
    ("Nectar", {"prompt", "answers", "num_responses", "turns"}, "ranked"),
    ("UltraFeedback", {"instruction", "completions", "models", "source"}, "ranked"),
    ("Stanford Human Preferences (SHP)", {"history", "human_ref_A", "human_ref_B", "score_A", "score_B"}, "compared"),
    ("WebGPT comparisons", {"question", "answer_0", "answer_1", "score_0", "score_1"}, "compared"),
    ("Chatbot Arena's conversations", {"conversation_a", "conversation_b", "winner"}, "compared"),
    ("LMSYS's human preferences", {"prompt", "response_a", "response_b", "winner_model_a", "winner_tie"}, "compared"),
    ("PKU-SafeRLHF", {"prompt", "response_0", "response_1", "better_response_id"}, "compared"),
    ("OpenAssistant's trees", {"message_tree_id", "prompt"}, "tree"),
    ("OpenAssistant's messages", {"message_id", "parent_id", "text", "role"}, ""),
    ("OpenAI's preference files", {"input", "preferred_output", "non_preferred_output"}, "preference"),
    ("PRM800K", {"question", "label", "labeler"}, "prm800k"),
    ("Math-Shepherd", {"input", "label", "task"}, "math_shepherd"),
    ("TRL's stepwise supervision", {"prompt", "completions", "labels"}, "stepwise"),
    ("TRL's unpaired preference (KTO)", {"prompt", "completion", "label"}, "unpaired"),
    ("TRL's preference", {"prompt", "chosen", "rejected"}, "preference"),
    ("Anthropic's HH-RLHF", {"chosen", "rejected"}, "hh"),
    ("TRL's preference with an implicit prompt", {"chosen", "rejected"}, "preference"),
    ("ShareGPT", {"conversations"}, "messages"),
    ("Alpaca", {"instruction", "input", "output"}, "instruction"),
    ("Dolly", {"instruction", "context", "response"}, "instruction"),
    ("OpenAI's chat files", {"messages"}, "messages"),
    ("GSM8K", {"question", "answer"}, "instruction label_pattern"),
)


def known_as(columns: Columns, readings: Iterable[Reading]) -> str | None:
    """Return the well-known data set with such columns, if its format is the one of a reading or no format reads it."""
    formats = {form for r in readings for form in (r.format, " ".join([r.format, *r.options]))}
    return next((name for name, wanted, form in KNOWN if wanted <= set(columns) and form in ("", *formats)), None)
