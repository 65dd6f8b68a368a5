"""The chat format of a Hugging Face tokenizer: its chat template, and the tool-call format detected from it.

It never guesses: a tokenizer without a chat template is rejected, and a malformed tool call stays in the content.

What the template does with tools is found by rendering them, a call and its result. The format that parses the call is
the model's; a tokenizer that declares its response format takes precedence, and an explicit option over both. A
template that has no place for one of the three gets all of them in its messages, in Hermes' format. One that writes
calls which no format parses is refused tools.
"""

from __future__ import annotations

import asyncio
import copy
import io
import json
import logging
import re
import shutil
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jinja2

from agentlightning.chat.base import ChatFormat, Message
from agentlightning.chat.token_escaping import TokenEscaper
from agentlightning.chat.tool_calls.format import (
    ARGUMENTS,
    IDS,
    KEY,
    NAME,
    CallFormat,
    Tools,
    parse_answer,
    probe_layout,
)
from agentlightning.chat.tool_calls.formats import FORMATS, HERMES, call_format, response_template_format
from agentlightning.errors import ConfigError, MissingExtraError
from agentlightning.util.templates import TemplateLimitError, bounded, check_length

LONG = 4096
"""Characters from which a text is encoded without the interpreter lock; for shorter texts, releasing it costs more."""
PIECE = 32 * 1024
"""Characters encoded at once when tokens are only counted."""
_SLACK = 16
"""The most tokens that a cut between two pieces adds."""


def _piece_end(text: str, start: int) -> int:
    """End of the piece from `start`: between two words, if there are any."""
    end = start + PIECE
    if end >= len(text):
        return len(text)
    space = text.rfind(" ", start + PIECE // 2, end)
    return space if space > 0 else end


_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError)
_TRAILING_MARKER = re.compile(r"(<[^<>]+>|\[[^\[\]]+\])\s*\Z")
"""A marker at the end of a prompt."""
_RESERVED = frozenset(
    {
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)
"""Parameters of transformers that are no template variables."""
_MAX_VIEWS = 64
_LONG_IDS = ("call_probe1",)
IN_MESSAGES = "messages"
BY_TEMPLATE = "template"
_THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": KEY,  # Some templates write names and no descriptions.
        "description": "x",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": []},
    },
}
_QUESTION: Message = {"role": "user", "content": "?"}
_logger = logging.getLogger(__name__)


class HFChatFormat(ChatFormat):
    """`ChatFormat` over a transformers tokenizer.

    `eos_token_ids` are added to those of the tokenizer, its `generation_config.json` and its template. `tool_calls`
    names the tool-call format (a key of `FORMATS`); None detects it, and writes tools into the messages
    where the template has no place for them. "messages" always does that, "template" never: tools are then refused.
    Raises ConfigError if the tokenizer has no chat template, no fast form or no end-of-turn token, and for an unknown
    format.
    """

    _fits = True
    """Whether the template writes tools, calls and results."""
    _unread: str | None = None
    """A call as the template writes it, where no format parses it."""
    _takes_system = True
    _wants_parts = False
    """Whether the template reads content as a list of parts only."""
    _thought_key: str | None = None

    def __init__(self, tokenizer: Any, eos_token_ids: Iterable[int] = (), tool_calls: str | None = None) -> None:
        self._name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"the tokenizer of {self._name} has no chat template; use an instruction-tuned model, or set "
                "`chat_template` in its tokenizer_config.json (or put a chat_template.jinja beside it)"
            )
        # A copy: the trainer may change padding and truncation of its own, and several threads read this one.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        """The Rust tokenizer. Calling it directly takes half the time for a short text."""
        if self._backend is None:
            raise ConfigError(
                f"the tokenizer of {self._name} has no form of the `tokenizers` library (tokenizer.json); use another"
                " model"
            )
        self._backend.no_truncation()
        self._backend.no_padding()
        self.template_kwargs: Mapping[str, Any] = {}
        self._views: dict[str, HFChatFormat] = {}
        # It escapes nothing while the template is probed.
        self._escaper = TokenEscaper(self._tokenizer, self._encode, (), ())
        self.option = tool_calls
        """The constructor's, for a format of the same model elsewhere."""
        self._said = set[str]()
        named = tool_calls not in (None, IN_MESSAGES, BY_TEMPLATE)
        self.tool_calls: CallFormat = call_format(str(tool_calls)) if named else HERMES
        """The detected format; `tool_calls.name` names it."""
        self._detect_content()
        self.eos_token_ids: frozenset[int] = self._find_eos(eos_token_ids)
        self.markers: Mapping[str, int] | None = _markers(self._tokenizer)
        self._detect_tool_calls()
        special = [token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        turns = self._turn_markers()
        self._escaper = TokenEscaper(self._tokenizer, self._encode, _unpaired(self._tokenizer, special), turns)

    def render(self, messages: Sequence[Message], tools: Tools = None, add_generation_prompt: bool = True) -> str:
        """See `ChatFormat.render`. The error quotes the template's message."""
        has_calls = any("tool_calls" in message for message in messages)
        self._check_tools(bool(tools), bool(tools) or has_calls or any(each["role"] == "tool" for each in messages))
        if self.tool_calls.short_ids:
            messages = [_with_ids(message, self.tool_calls) for message in messages]
        if self._thought_key not in (None, _THOUGHT_KEYS[0]):
            messages = [_renamed(message, _THOUGHT_KEYS[0], str(self._thought_key)) for message in messages]
        if has_calls and not self.tools_in_messages and self._wants_objects:
            messages = [_with_objects(message) for message in messages]
        messages, tools = self._escaper.escape_messages(messages, tools)
        try:
            return self._apply(messages, tools, add_generation_prompt)
        except (*_TEMPLATE_ERRORS, TemplateLimitError) as error:
            raise ConfigError(f"the chat template of {self._name} cannot hold these messages: {error}") from error

    def _check_tools(self, offered: bool, used: bool) -> None:
        """Raises ConfigError for tools, calls and results that the model would not see, and tools whose calls nothing
        parses."""
        way_out = f'set policy.tool_calls = "{IN_MESSAGES}", which writes tools into the messages in Hermes\' format'
        if offered and self._unread is not None:
            raise ConfigError(
                f"the chat template of {self._name} writes a tool call as {self._unread!r}, and no format parses it"
                f" ({', '.join(FORMATS)}); {way_out}, or name the format that the model writes"
            )
        if used and not self._fits and not self.tools_in_messages:
            raise ConfigError(f"the chat template of {self._name} has no place for tools, calls or results; {way_out}")
        if used and self.tools_in_messages and IN_MESSAGES not in self._said:
            self._said.add(IN_MESSAGES)
            _logger.warning(
                "the chat template of %s has no place for tools, calls or results, so they stand in its messages, in "
                'Hermes\' format; policy.tool_calls = "%s" refuses them instead',
                self._name,
                BY_TEMPLATE,
            )

    def encode(self, text: str) -> list[int]:
        """See `ChatFormat.encode`. Special tokens in message text are encoded as text (`chat.token_escaping`)."""
        return self._escaper.encode(text)

    def encode_after(self, before: str, text: str) -> tuple[list[int], bool]:
        """See `ChatFormat.encode_after`. Texts between markers are encoded by themselves, so the last marker will do as
        what is before."""
        place = max((found.start() for found in self._borders.finditer(before)), default=0)
        return super().encode_after(before[place:], text)

    @cached_property
    def _borders(self) -> re.Pattern[str]:
        """The tokens that split a text before it is encoded."""
        added = self._tokenizer.added_tokens_decoder.values()
        texts = [token.content for token in added if token.content and not token.normalized]
        return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")

    @cached_property
    def end_of_turn(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The token that the template writes after an answer, or the tokenizer's end of a sequence."""
        eos = self._tokenizer.eos_token_id
        return next(iter(self._template_eos()), min(self.eos_token_ids) if eos is None else int(eos))

    def escape(self, text: str) -> str:
        return self._escaper.escape(text)

    def unescape(self, text: str) -> str:
        return self._escaper.unescape(text)

    def _encode(self, text: str) -> list[int]:
        """The tokens of a text: special tokens are recognised, none is added. A long one is encoded without the
        interpreter lock, so that other threads are not blocked."""
        if len(text) < LONG:
            return self._backend.encode(text, add_special_tokens=False).ids
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def min_token_count(self, text: str, limit: int) -> int:
        """See `ChatFormat.min_token_count`. It encodes piece by piece, so that a prompt of 20 MB costs no more than one
        that just fits. 0 for a text with too few characters."""
        text = self.unescape(text)
        if len(text) <= limit:
            return 0
        count, position = 0, 0
        while position < len(text) and count <= limit:
            end = _piece_end(text, position)
            count += max(0, len(self._encode(text[position:end])) - _SLACK)
            position = end
        return count

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """See `ChatFormat.decode`. Invalid UTF-8 becomes U+FFFD."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def save_tokenizer(self, directory: Path) -> None:
        """Write the tokenizer, with its chat template, as transformers does."""
        self._tokenizer.save_pretrained(directory)

    def with_template_kwargs(self, kwargs: Mapping[str, Any]) -> HFChatFormat:
        """See `ChatFormat.with_template_kwargs`. Raises ConfigError for a name that transformers reserves."""
        if reserved := sorted(_RESERVED & kwargs.keys()):
            raise ConfigError(f"chat_template_kwargs sets {', '.join(reserved)}, which is no variable of a template")
        key = json.dumps(kwargs, sort_keys=True)
        if (view := self._views.get(key)) is None:
            view = copy.copy(self)
            view.template_kwargs = dict(kwargs)
            if len(self._views) < _MAX_VIEWS:
                self._views[key] = view
        return view

    def _apply(self, messages: Sequence[Message], tools: Tools, generate: bool) -> str:
        if self.tools_in_messages:
            messages = write_results(write_calls(messages))
            messages, tools = offer_tools(messages, tools, self._takes_system) if tools else messages, None
        if self._wants_parts:
            messages = [_with_parts(message) for message in messages]
        with bounded():
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=generate,
                tokenize=False,
                **self.template_kwargs,
            )
        return check_length(text)

    def _try(self, messages: Sequence[Message], tools: Tools = None, generate: bool = False) -> str:
        """What the template writes; "" if it refuses."""
        try:
            return self._apply(messages, tools, generate)
        except _TEMPLATE_ERRORS:
            return ""

    def _detect_content(self) -> None:
        """What the template takes as content, system messages and thoughts."""
        asked: Message = {"role": "user", "content": KEY}
        answer: Message = {"role": "assistant", "content": "!"}
        if KEY not in self._try([asked]):
            self._wants_parts = True
            self._wants_parts = KEY in self._try([asked])
        self._takes_system = KEY in self._try([{"role": "system", "content": KEY}, _QUESTION])
        for key in _THOUGHT_KEYS:
            if self._thought_key is None and KEY in self._try([_QUESTION, {**answer, key: KEY}]):
                self._thought_key = key
        self.takes_thoughts = self._thought_key is not None

    @cached_property
    def _wants_objects(self) -> bool:
        """Whether the template takes tool-call arguments as an object (most do) or as JSON text."""
        text = self._render_probe({KEY: 1})
        return KEY in text and f"'{KEY}'" not in text

    def _render_probe(self, arguments: Any, ids: Sequence[str] = IDS[:1]) -> str:
        """What the template writes for a turn with one call per id; "" if it refuses."""
        before = self._try([_QUESTION], generate=True)
        text = self._try([_QUESTION, _called(arguments, ids)])
        # Some templates begin a thought in the prompt and omit it from a turn without one.
        return text.removeprefix(before if text.startswith(before) else _TRAILING_MARKER.sub("", before))

    def _detect_tool_calls(self) -> None:
        """See the module."""
        option = self.option
        arguments: Any = ARGUMENTS if self._wants_objects else json.dumps(ARGUMENTS)
        text = self._render_probe(arguments)
        lists = KEY in self._try([_QUESTION], [_PROBE_TOOL])
        result: Message = {"role": "tool", "tool_call_id": IDS[0], "name": NAME, "content": KEY * 2}
        results = KEY * 2 in self._try([_QUESTION, _called(arguments, IDS[:1]), result])
        writes = KEY in text
        declared = response_template_format(self._tokenizer) if option in (None, BY_TEMPLATE) else None
        if option in (None, BY_TEMPLATE):
            parsing = (format for format in FORMATS.values() if self._parses(format, text))
            known = declared or next(parsing, None)
            self._unread = text if known is None and writes else None
            self.tool_calls = known or HERMES
        self._fits = lists and writes and results
        can_write = (option is None and declared is None) or option == HERMES.name
        if option == IN_MESSAGES or (not self._fits and can_write):
            self.tools_in_messages, self._unread, self.tool_calls = True, None, HERMES
            arguments = json.dumps(ARGUMENTS)
            text = self._render_probe(arguments)
        if KEY in text:
            two = self._render_probe(arguments, IDS)
            long = self._render_probe(arguments, _LONG_IDS) != ""
            found = replace(self.tool_calls, parallel=two != "", short_ids=not long)
            self.tool_calls = replace(found, layout=probe_layout(found, text, two, self._turn_ends()))
            self.eos_token_ids |= self._call_eos(text)

    def _call_eos(self, text: str) -> frozenset[int]:
        """The token after which results follow, where it is not the end of a turn: Harmony's and Gemma's."""
        if any(end in text for end in self._turn_ends()):
            return frozenset()
        _, closing, after = text.rpartition(self.tool_calls.closing or "\0")
        ids = self._encode(after.strip() if closing else self.tool_calls.end)
        return frozenset(ids if len(ids) == 1 and ids[0] in self._tokenizer.added_tokens_decoder else ())

    def _parses(self, format: CallFormat, text: str) -> bool:
        # A template that rewrites the history writes other turns here too.
        turns = re.split("|".join(map(re.escape, self._turn_ends())), text)
        calls = parse_answer(format, next((turn for turn in turns if KEY in turn), "")).tool_calls
        return [(call.name, json.loads(call.arguments)) for call in calls] == [(NAME, ARGUMENTS)]

    def _turn_ends(self) -> list[str]:
        """The texts that end a turn."""
        return [end for token in self.eos_token_ids if (end := self.decode([token]))]

    def _turn_markers(self) -> frozenset[str]:
        """Markers that the template writes around turns, and the texts that end a turn."""
        question: Message = {"role": "user", "content": KEY}
        answer: Message = {"role": "assistant", "content": KEY}
        text = self._try([question, answer, question], generate=True)
        added = [token.content for token in self._tokenizer.added_tokens_decoder.values()]
        found = [marker for marker in added if marker.strip() and marker in text]
        return frozenset([*_unpaired(self._tokenizer, found), *self._turn_ends()])

    def _find_eos(self, extra: Iterable[int]) -> frozenset[int]:
        found = {*extra, *self._generation_eos(), *self._template_eos()}
        if self._tokenizer.eos_token_id is not None:
            found.add(int(self._tokenizer.eos_token_id))
        if not found:
            raise ConfigError(
                f"the tokenizer of {self._name} names no token that ends a turn; set `eos_token` in its "
                "tokenizer_config.json"
            )
        return frozenset(found)

    def _generation_eos(self) -> list[int]:
        path = Path(self._name) / "generation_config.json"
        if not path.is_file():
            return []
        eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        return [] if eos is None else [int(token) for token in (eos if isinstance(eos, list) else [eos])]

    def _template_eos(self) -> list[int]:
        """The special token that the template writes right after an assistant's answer."""
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": KEY}]
        _, found, after = self.render(turn, add_generation_prompt=False).partition(KEY)
        tokens = self.encode(after.lstrip()) if found else []
        return [token for token in tokens[:1] if token in self._tokenizer.added_tokens_decoder]


def _unpaired(tokenizer: Any, markers: Iterable[str]) -> list[str]:
    """`markers` without paired tags; `<s>` and `</s>` are no pair."""
    known: set[str] = {*tokenizer.get_added_vocab()}
    tags = {name for marker in known if len(name := marker.removeprefix("</")) > len("s>") and marker != name}
    return [each for each in markers if each.removeprefix("</") not in tags and each[1:] not in tags]


def _markers(tokenizer: Any) -> dict[str, int]:
    """The tokens that llguidance treats as special: special tokens, and others that look like them. Runs of spaces,
    which some tokenizers add as tokens, are text."""
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    return {
        token.content: number
        for number, token in added.items()
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    }


def _with_ids(message: Message, format: CallFormat) -> Message:
    """With call ids that the template accepts, consistent between calls and results."""
    if isinstance(name := message.get("tool_call_id"), str):
        message = {**message, "tool_call_id": format.convert_id(name)}
    if calls := message.get("tool_calls"):
        calls = [{**call, "id": format.convert_id(call.get("id") or "")} for call in calls]
        message = {**message, "tool_calls": calls}
    return message


def _called(arguments: Any, ids: Sequence[str]) -> Message:
    """A turn of the assistant with one call per id."""
    function = {"name": NAME, "arguments": arguments}
    calls = [{"id": name, "type": "function", "function": function} for name in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _renamed(message: Message, key: str, new: str) -> Message:
    return {new if each == key else each: value for each, value in message.items()}


def _with_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_objects(message: Message) -> Message:
    """With arguments of calls as objects. Text that is not a JSON object stays as the model wrote it."""
    calls: list[dict[str, Any]] = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"].get("arguments")
        with suppress(TypeError, ValueError, RecursionError):
            if isinstance(value := json.loads(arguments), dict):
                call = {**call, "function": {**call["function"], "arguments": value}}
        calls.append(call)
    return {**message, "tool_calls": calls} if calls else message


async def load_chat_format(
    model: str | Path, tool_calls: str | None = None, eos_token_ids: Iterable[int] = ()
) -> HFChatFormat:
    """The chat format of a model's tokenizer; `tool_calls` and `eos_token_ids` as in `HFChatFormat`. Raises ConfigError
    if it has none, MissingExtraError without transformers."""
    return await asyncio.to_thread(_load_chat_format, str(model), tool_calls, tuple(eos_token_ids))


def _load_chat_format(model: str, tool_calls: str | None, eos_token_ids: Sequence[int]) -> HFChatFormat:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError("transformers", "train") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{model} holds no tokenizer that transformers loads: {error}") from error
    return HFChatFormat(tokenizer, eos_token_ids, tool_calls)


# -- tools in messages -------------------------------------------------------------------------------------------------

# Tools, calls and results as the text of messages, for chat templates that have no place for them.
#
# In Hermes' format: the system message lists the tools between `<tools>` and `</tools>`, one JSON object a line; a call
# is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in an assistant's turn; results follow as a turn of the
# user, each between `<tool_response>` and `</tool_response>`.

OFFER = """\
You can call tools. They are listed here, one JSON object a line:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments as a JSON object:
<tool_call>
{{"name": "the tool's name", "arguments": {{"the argument's name": "its value"}}}}
</tool_call>
You may call several, one after another. Results come back between <tool_response> and </tool_response>."""


def offer_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]], takes_system: bool) -> list[Message]:
    """The messages with the tools in the system message, or before the first message of the user where the template
    takes no system message."""
    offer = OFFER.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    found = [*messages]
    if takes_system and not (found and found[0]["role"] == "system"):
        return [{"role": "system", "content": offer}, *found]
    place = 0 if takes_system else next((at for at, each in enumerate(found) if each["role"] == "user"), None)
    if place is None:
        return [{"role": "user", "content": offer}, *found]
    own = found[place]["content"]
    before, after = (own, offer) if takes_system else (offer, own)
    found[place] = {**found[place], "content": _joined(before, after)}
    return found


def write_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages with calls in the content of their turns."""
    found: list[Message] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            text = "\n".join(f"<tool_call>\n{_call_text(call['function'])}\n</tool_call>" for call in calls)
            message = {key: value for key, value in message.items() if key != "tool_calls"}
            message["content"] = _joined(message.get("content") or "", text, "\n")
        found.append(message)
    return found


def _call_text(function: dict[str, Any]) -> str:
    """A call in JSON; arguments that are not JSON are a string."""
    arguments = function["arguments"]
    with suppress(ValueError, RecursionError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)


def write_results(messages: Sequence[Message]) -> list[Message]:
    """The messages with results as turns of the user; what the user writes right after them is in the same turn."""
    found: list[Message] = []
    follows = False
    for message in messages:
        result = message["role"] == "tool"
        content = message["content"]
        if result:
            content = f"<tool_response>\n{content}\n</tool_response>"
        if follows and (result or message["role"] == "user"):
            found[-1] = {"role": "user", "content": _joined(found[-1]["content"], content, "\n")}
            follows = result
            continue
        follows = result
        found.append({"role": "user", "content": content} if result else message)
    return found


def _joined(first: Any, second: Any, between: str = "\n\n") -> Any:
    """Two contents as one; lists hold images too."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{between}{second}" if first and second else first or second
    lists = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in (first, second)]
    return [*lists[0], *lists[1]]


# -- tokenizers as bytes -----------------------------------------------------------------------------------------------

# A tokenizer as bytes: what another machine needs to render and tokenize conversations exactly as this one does.

MAX_BYTES = 256 * 1024 * 1024
"""The most that an archive unpacks to."""
PROBE = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 3? Grüße, 你好."},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "And twice that?"},
)
"""A conversation that both machines must tokenize alike."""


def probe_tokens(chat: ChatFormat) -> list[int]:
    """The tokens of `PROBE`, without its system message where the template has no place for one."""
    try:
        return chat.encode(chat.render(list(PROBE)))
    except ConfigError:
        return chat.encode(chat.render(list(PROBE[1:])))


def pack_tokenizer(chat: ChatFormat) -> bytes:
    """The files of a tokenizer, as a ZIP archive. Raises ConfigError for a chat format of another kind."""
    if not isinstance(chat, HFChatFormat):
        raise ConfigError(f"{type(chat).__name__} is no tokenizer of transformers, and cannot be sent to a server")
    with TemporaryDirectory(prefix="agl-tokenizer-") as directory:
        files = Path(directory) / "tokenizer"
        chat.save_tokenizer(files)
        return Path(shutil.make_archive(str(files), "zip", files)).read_bytes()


def unpack_tokenizer(packed: bytes, directory: Path) -> None:
    """Write the files of `pack_tokenizer` below `directory`. Raises ConfigError for anything else."""
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            if (size := sum(entry.file_size for entry in archive.infolist())) > MAX_BYTES:
                raise ConfigError(f"the tokenizer unpacks to {size} bytes, and this server takes {MAX_BYTES}")
            archive.extractall(directory)  # It keeps every path below the directory.
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise ConfigError(f"the archive of the tokenizer cannot be read: {error}") from error
