"""Chat templates like those of model families, and a tokenizer with their special tokens."""

from __future__ import annotations

from transformers import AddedToken, PreTrainedTokenizerFast

from rlhf_core.models.tokenizer import build_tokenizer

TEXTS = ["Please sort 4172.", "Certainly: 1247.", "<think>\nThe digits are 4, 1, 7 and 2.\n</think>\n\nSorted: 1247.", '{"a": 1}'] * 20

# name -> (special tokens, eos token, template). A turn ends with eos only where stated.
CHATML = """\
{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Trims texts, has a BOS, names the assistant "model", and refuses system messages and two turns in a row of one role.
TRIMMED = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role not in ['user', 'assistant'] or (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Turns have to go user, model, user') }}
{%- endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

# Writes the date, trims, and has a role for tool results.
DATED = """\
{{- bos_token }}
{%- if not date_string is defined %}
{%- if strftime_now is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% else %}{% set date_string = "01 Jan 2000" %}{% endif %}
{%- endif %}
{{- '<|header|>system<|/header|>\\n\\nToday: ' + date_string + '<|eot|>' }}
{%- for m in messages %}
{{- '<|header|>' + (m.role if m.role != 'tool' else 'ipython') + '<|/header|>\\n\\n' }}
{%- if m.tool_calls is defined %}{{ {'name': m.tool_calls[0].function.name, 'parameters': m.tool_calls[0].function.arguments} | tojson }}
{%- else %}{{ m.content | trim }}{% endif %}
{{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\\n\\n' }}{% endif %}"""

# A role is a token; line breaks precede the text and follow the end.
ROLE_TOKENS = """\
{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|stop|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

# Drops thoughts of earlier turns; the last turn has thoughts, possibly empty; thinking is an option.
THINKS = """\
{%- set last = namespace(user=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set thoughts, answer = '', m.content or '' %}
{%- if m.role == 'assistant' and '</think>' in answer %}
{%- set thoughts = answer.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set answer = answer.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' }}
{%- if m.role == 'assistant' and loop.index0 > last.user and (loop.last or thoughts) %}
{{- '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}
{%- endif %}
{{- ('<tool_response>\\n' + answer + '\\n</tool_response>') if m.role == 'tool' else answer }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

# The generation prompt opens the thoughts; an assistant turn is dropped up to their end.
DISTILLED = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|assistant|>' + m.content.split('</think>')[-1] + eos_token }}
{%- else %}{{ '<|user|>' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}"""

# A turn ends only where the next one begins.
ENDLESS = """\
{{- '[start]' }}
{%- for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

# No generation prompt; spaces around the trimmed response, eos at the end; the system message is part of the first question.
BRACKETS = """\
{%- set first = '' %}
{%- if messages[0].role == 'system' %}{% set first, messages = messages[0].content + '\\n\\n', messages[1:] %}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}{{ bos_token + '[INST] ' + (first if loop.first else '') + m.content | trim + ' [/INST]' }}
{%- else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}
{%- endfor %}"""

# The answer is in a channel; the last turn has another end than earlier ones.
CHANNELS = """\
{%- for m in messages %}
{{- '<|start|>' + m.role }}
{%- if m.role == 'assistant' %}{{ '<|channel|>final' }}{% endif %}
{{- '<|message|>' + m.content + ('<|return|>' if m.role == 'assistant' and loop.last else '<|end|>') }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

# All content is a list of parts.
PARTS = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + ':' }}
{%- for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"""

TEMPLATES = {
    "chatml": CHATML,
    "trimmed": TRIMMED,
    "dated": DATED,
    "role_tokens": ROLE_TOKENS,
    "thinks": THINKS,
    "distilled": DISTILLED,
    "endless": ENDLESS,
    "brackets": BRACKETS,
    "channels": CHANNELS,
    "parts": PARTS,
}
# name -> end of the last turn, and what follows it
ENDS = {
    "chatml": ("<|im_end|>", "\n"),
    "trimmed": ("<end_of_turn>", "\n"),
    "dated": ("<|eot|>", ""),
    "role_tokens": ("<|stop|>", "\n"),
    "thinks": ("<|im_end|>", "\n"),
    "distilled": ("<eos>", ""),
    "endless": ("<eos>", ""),
    "brackets": (" <eos>", ""),
    "channels": ("<|return|>", ""),
    "parts": ("<|im_end|>", "\n"),
}
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|header|>", "<|/header|>", "<|eot|>", "<|stop|>", "<|tool|>",
    "<|start|>", "<|channel|>", "<|message|>", "<|return|>", "[start]",
]  # fmt: skip


def templated(name: str, *, thoughts_are_special: bool = False) -> PreTrainedTokenizerFast:
    """A small tokenizer with one of the templates; <think> and similar tags are tokens, mostly not special ones."""
    tokenizer = build_tokenizer(TEXTS, vocab_size=330)
    tokenizer.add_special_tokens({"bos_token": "<bos>", "eos_token": "<eos>", "additional_special_tokens": [*SPECIAL, "<|end|>"]})
    tokenizer.add_tokens([AddedToken(t, special=thoughts_are_special) for t in ("<think>", "</think>")])
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer
