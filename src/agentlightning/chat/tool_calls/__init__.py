"""The table of tool-call formats by name; `agentlightning.chat.hf` detects which one a template uses.

hermes       Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4    <tool_call>{"name": ..., "arguments": {...}}</tool_call>
qwen_coder   Qwen3-Coder, Qwen 3.5, Nemotron 3, Seed-OSS   <tool_call><function=NAME><parameter=KEY>VALUE
glm          GLM 4.5 to 4.7                                <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE
invoke       MiniMax M2                                    <minimax:tool_call><invoke name="NAME"><parameter name=
llama3       Llama 3.1 to 3.3                              {"name": ..., "parameters": {...}}
pythonic     Llama 4, small Llama 3.2                      [name(key="value")]
lfm2         LFM2                                          <|tool_call_start|>[name(key="value")]<|tool_call_end|>
mistral      Mistral                                       [TOOL_CALLS][{...}], [TOOL_CALLS]name[ARGS]{...}
deepseek     DeepSeek V3, R1, V3.1                         name and JSON between markers
kimi         Kimi K2                                       likewise, with ids such as functions.name:0
granite      Granite 3, Phi-4-mini                         <|tool_call|>[{"name": ..., "arguments": {...}}]
functools    Phi-4-mini                                    functools[{...}]
nemotron     Nemotron Nano 2, Super 49B                    <TOOLCALL>[{...}]</TOOLCALL>
tool_calls   Jamba, Hunyuan                                <tool_calls>[{...}]</tool_calls>
cohere       Command R7B, Command A                        <|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]
gemma        Gemma 4                                       <|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>
harmony      gpt-oss                                       <|channel|>commentary to=functions.name<|message|>{...}
"""

import re
from typing import Final

from agentlightning.chat.tool_calls.format import CallFormat
from agentlightning.chat.tool_calls.formats import (
    Gemma,
    Harmony,
    JsonCalls,
    Llama3,
    Mistral,
    NamedCalls,
    Pythonic,
    TaggedCalls,
)
from agentlightning.errors import ConfigError

HERMES: Final = JsonCalls("hermes", opening="<tool_call>", closing="</tool_call>")

FORMATS: Final[dict[str, CallFormat]] = {
    format.name: format
    for format in (
        HERMES,
        TaggedCalls("qwen_coder", opening="<tool_call>", closing="</tool_call>"),
        TaggedCalls(
            "glm",
            opening="<tool_call>",
            closing="</tool_call>",
            function=("", r"([\w.\-/:]+)\s*(?=<)", "<"),
            parameter=("<arg_key>", r"<arg_key>([^<>\n]+)</arg_key>\s*<arg_value>", "<arg_value>"),
            value_end="</arg_value>",
            function_end="",
            padding="",
        ),
        TaggedCalls(
            "invoke",
            opening="<minimax:tool_call>",
            closing="</minimax:tool_call>",
            function=("<invoke name=", r'<invoke name="([^"<>\n]+)">', ">"),
            parameter=("<parameter name=", r'<parameter name="([^"<>\n]+)">', ">"),
            function_end="</invoke>",
            padding="",
        ),
        Llama3("llama3", opening="<|python_tag|>"),
        Pythonic("pythonic", opening="<|python_start|>", end="<|python_end|>"),
        Pythonic("lfm2", opening="<|tool_call_start|>", end="<|tool_call_end|>", bare=False),
        Mistral(
            "mistral",
            short_ids=True,
            opening="[TOOL_CALLS]",
            head=re.compile(r"(?P<name>[\w.\-/:]+)(?:\[CALL_ID\](?P<id>[0-9A-Za-z]{9}))?\[ARGS\]\s*"),
        ),
        NamedCalls(
            "deepseek",
            opening="<｜tool▁calls▁begin｜>",
            end="<｜tool▁calls▁end｜>",
            head=re.compile(
                r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>\s*(?P<fenced>[^\n`{]+?)\s*\n```(?:json)?\n"
                r"|\s*(?P<name>[^\n`{<]+?)\s*<｜tool▁sep｜>)\s*(?=\{|\Z)"
            ),
            ends=("```", "<｜tool▁call▁end｜>"),
        ),
        NamedCalls(
            "kimi",
            opening="<|tool_calls_section_begin|>",
            end="<|tool_calls_section_end|>",
            head=re.compile(
                r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[\w.\-]+?)(?::\d+)?)\s*"
                r"<\|tool_call_argument_begin\|>\s*"
            ),
            ends=("<|tool_call_end|>",),
        ),
        JsonCalls("granite", opening="<|tool_call|>", end="<|/tool_call|>"),
        JsonCalls("functools", opening="functools"),
        JsonCalls("nemotron", opening="<TOOLCALL>", closing="</TOOLCALL>"),
        JsonCalls("tool_calls", opening="<tool_calls>", closing="</tool_calls>"),
        JsonCalls(
            "cohere",
            opening="<|START_ACTION|>",
            closing="<|END_ACTION|>",
            name_key="tool_name",
            argument_keys=("parameters",),
        ),
        Gemma("gemma", opening="<|tool_call>", closing="<tool_call|>"),
        Harmony("harmony", end="<|call|>"),
    )
}
"""In the order in which they are tried on what a template writes."""


def call_format(name: str) -> CallFormat:
    """The format of this name. Raises ConfigError that lists the known ones."""
    if name not in FORMATS:
        raise ConfigError(f"tool_calls={name!r} is not a format of tool calls; use one of {', '.join(FORMATS)}")
    return FORMATS[name]
