"""Short chat templates in the style of common model families. Needs no torch.

    tokenizer = tiny_tokenizer(LLAMA3.template, special=LLAMA3.special, eos=LLAMA3.eos)

Each template keeps what matters about its family: where tools are listed, how turns begin and end, how calls are
written, and what the template rejects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Family:
    """A template and its special tokens."""

    name: str
    """Name of its tool-call format."""
    template: str
    special: tuple[str, ...]
    eos: str


_CHATML_TURNS: Final = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}CALL{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""
_CHATML_TOOLS: Final = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif -%}
"""
_HERMES_CALL: Final = """
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>"""
_QWEN_CODER_CALL: Final = """
<tool_call>
<function={{ call.function.name }}>
{%- for key, value in call.function.arguments | items %}
<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{%- endfor %}
</function>
</tool_call>"""
_IM: Final = ("<|im_start|>", "<|im_end|>")

HERMES: Final = Family("hermes", _CHATML_TOOLS + _CHATML_TURNS.replace("CALL", _HERMES_CALL), _IM, "<|endoftext|>")
QWEN_CODER: Final = Family(
    "qwen_coder", _CHATML_TOOLS + _CHATML_TURNS.replace("CALL", _QWEN_CODER_CALL), _IM, "<|endoftext|>"
)

LLAMA3: Final = Family(
    "llama3",
    """\
<|begin_of_text|><|start_header_id|>system<|end_header_id|>

Answer, or call a tool as {"name": its name, "parameters": an object}. {{ tools | tojson if tools }}<|eot_id|>
{%- for message in messages -%}
<|start_header_id|>{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>

{% if message.tool_calls -%}
{%- if message.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif -%}
{%- set call = message.tool_calls[0].function -%}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- else -%}{{ message.content | trim }}{%- endif -%}
<|eot_id|>
{%- endfor -%}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif -%}""",
    special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    eos="<|end_of_text|>",
)

PYTHONIC: Final = Family(
    "pythonic",
    """\
<|begin_of_text|><|header_start|>system<|header_end|>

Answer, or call tools as [name(key=value)]. {{ tools | tojson if tools }}<|eot|>
{%- for message in messages -%}
<|header_start|>{{ 'ipython' if message.role == 'tool' else message.role }}<|header_end|>

{{ message.content }}
{%- if message.tool_calls -%}[
{%- for call in message.tool_calls -%}
{{ call.function.name }}(
{%- for key, value in call.function.arguments | items -%}
{{ key }}={{ value | tojson }}{{ ', ' if not loop.last }}
{%- endfor -%}
){{ ', ' if not loop.last }}
{%- endfor -%}
]{%- endif -%}
<|eot|>
{%- endfor -%}
{%- if add_generation_prompt %}<|header_start|>assistant<|header_end|>

{% endif -%}""",
    special=(
        "<|begin_of_text|>",
        "<|header_start|>",
        "<|header_end|>",
        "<|eot|>",
        "<|python_start|>",
        "<|python_end|>",
    ),
    eos="<|end_of_text|>",
)

_MISTRAL_ID: Final = """
{%- if call.id is not defined or call.id | length != 9 -%}
{{ raise_exception('ids of tool calls are nine letters and digits') }}
{%- endif -%}"""
_MISTRAL_RESULT: Final = """
{%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 -%}
{{ raise_exception('ids of tool calls are nine letters and digits') }}
{%- endif -%}
[TOOL_RESULTS] {"content": {{ message.content | tojson }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]"""

MISTRAL: Final = Family(
    "mistral",
    f"""\
<s>
{{%- set asked = messages | selectattr('role', 'equalto', 'user') | list -%}}
{{%- for message in messages -%}}
{{%- if message.role == 'user' -%}}
{{%- if tools and message == asked[-1] -%}}[AVAILABLE_TOOLS] {{{{ tools | tojson }}}}[/AVAILABLE_TOOLS]{{%- endif -%}}
[INST] {{{{ message.content }}}}[/INST]
{{%- elif message.tool_calls -%}}
[TOOL_CALLS] [
{{%- for call in message.tool_calls -%}}{_MISTRAL_ID}
{{"name": {{{{ call.function.name | tojson }}}}, "arguments": {{{{ call.function.arguments | tojson }}}}, "id": "
{{{{- call.id }}}}"}}{{{{ ', ' if not loop.last }}}}
{{%- endfor -%}}]</s>
{{%- elif message.role == 'tool' -%}}{_MISTRAL_RESULT}
{{%- else -%}} {{{{ message.content }}}}</s>
{{%- endif -%}}
{{%- endfor -%}}""",
    special=(
        "<s>",
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ),
    eos="</s>",
)

MISTRAL_NAMED: Final = Family(
    "mistral",
    f"""\
<s>[AVAILABLE_TOOLS]{{{{ tools | tojson if tools }}}}[/AVAILABLE_TOOLS]
{{%- for message in messages -%}}
{{%- if message.role == 'user' -%}}[INST]{{{{ message.content }}}}[/INST]
{{%- elif message.role == 'tool' -%}}{_MISTRAL_RESULT}
{{%- else -%}}{{{{ message.content }}}}
{{%- for call in message.tool_calls or [] -%}}{_MISTRAL_ID}
[TOOL_CALLS]{{{{ call.function.name }}}}[CALL_ID]{{{{ call.id }}}}[ARGS]{{{{ call.function.arguments | tojson }}}}
{{%- endfor -%}}</s>
{{%- endif -%}}
{{%- endfor -%}}""",
    special=(
        "<s>",
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ),
    eos="</s>",
)

_DEEPSEEK_SPECIAL: Final = (
    *("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
)


def _deepseek(separator: str, call: str) -> str:
    return f"""\
<｜begin▁of▁sentence｜>{{{{ tools | tojson if tools }}}}
{{%- for message in messages -%}}
{{%- if message.role == 'user' -%}}<｜User｜>{{{{ message.content }}}}
{{%- elif message.role == 'tool' -%}}
<｜tool▁outputs▁begin｜>{{{{ message.content }}}}<｜tool▁outputs▁end｜>
{{%- elif message.tool_calls -%}}
<｜Assistant｜>{{{{ message.content or '' }}}}<｜tool▁calls▁begin｜>
{{%- for call in message.tool_calls -%}}
<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>{{{{ '{separator}' if not loop.last }}}}
{{%- endfor -%}}
<｜tool▁calls▁end｜><｜end▁of▁sentence｜>
{{%- else -%}}<｜Assistant｜>{{{{ message.content }}}}<｜end▁of▁sentence｜>
{{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt %}}<｜Assistant｜>{{% endif -%}}"""


DEEPSEEK: Final = Family(
    "deepseek",
    _deepseek("", "{{ call.function.name }}<｜tool▁sep｜>{{ call.function.arguments | tojson }}"),
    _DEEPSEEK_SPECIAL,
    "<｜end▁of▁sentence｜>",
)
DEEPSEEK_FENCED: Final = Family(
    "deepseek",
    _deepseek(
        "\\n", "function<｜tool▁sep｜>{{ call.function.name + '\\n```json\\n' + call.function.arguments + '\\n```' }}"
    ),
    _DEEPSEEK_SPECIAL,
    "<｜end▁of▁sentence｜>",
)

FAMILIES: Final[dict[str, Family]] = {
    **{family.name: family for family in (HERMES, QWEN_CODER, LLAMA3, PYTHONIC, MISTRAL, DEEPSEEK)},
    "mistral_named": MISTRAL_NAMED,
    "deepseek_fenced": DEEPSEEK_FENCED,
}
