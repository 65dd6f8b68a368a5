"""Made-up rollouts of an agent that solves word problems with a calculator, token by token."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from agentlightning import span as names
from agentlightning.engine.likeliest_tokens import Row, likeliest_to_text
from agentlightning.rollouts import Attempt, Rollout, RolloutMode
from agentlightning.span import Span
from agentlightning.store.types import RolloutRecord

SYSTEM: Final = "Use the calculator, then reply ### ANSWER: number ###"
THINGS: Final = ("apples", "boxes", "books", "tickets", "stones", "letters")
PEOPLE: Final = ("Ada", "Ben", "Chloe", "Dan", "Eve", "Finn")
PIECE: Final = re.compile(r"\s?[A-Za-z]+|\s?\d|\s|[^\sA-Za-z\d]")
SPECIAL: Final = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")


@dataclass(frozen=True, slots=True)
class Problem:
    """A word problem."""

    question: str
    expression: str
    answer: int

    def task(self) -> dict[str, Any]:
        return {"question": self.question, "answer": self.answer}


def problem(number: int) -> Problem:
    """The problem of a number, always the same."""
    own = random.Random(f"problem {number}")
    many, price, given = own.randint(3, 19), own.randint(2, 12), own.randint(1, 9)
    who, what = own.choice(PEOPLE), own.choice(THINGS)
    question = (
        f"{who} has {many} {what} <b>& sells</b> each for {price} coins, then gives {given} coins away. What is left?"
    )
    return Problem(question, f"{many} * {price} - {given}", many * price - given)


class Vocabulary:
    """Pieces of text as tokens, numbered as they come."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {piece: number for number, piece in enumerate(SPECIAL)}

    def encode(self, text: str) -> list[int]:
        return [self.ids.setdefault(piece.replace(" ", "\u2581"), len(self.ids)) for piece in PIECE.findall(text)]

    def special(self, name: str) -> int:
        return self.ids[f"<|{name}|>"]

    def document(self) -> dict[str, Any]:
        """A `tokenizer.json`."""
        added = [{"id": self.ids[piece], "content": piece, "special": True} for piece in SPECIAL]
        return {
            "model": {"type": "WordLevel", "vocab": self.ids},
            "decoder": {"type": "Metaspace"},
            "added_tokens": added,
        }


@dataclass(slots=True)
class Writer:
    """Makes the records of rollouts."""

    vocabulary: Vocabulary
    rng: random.Random
    clock: float

    def rollout(
        self,
        rollout_id: str,
        asked: Problem,
        skill: float,
        version: int,
        *,
        mode: RolloutMode = "train",
        group: str = "",
    ) -> tuple[RolloutRecord, float | None]:
        """A finished rollout of a policy that does right with probability `skill`, and its reward; None: it failed."""
        start, attempt_id = self.clock, f"at-{rollout_id}"
        self.clock += self.rng.uniform(0.05, 0.3)
        if self.rng.random() < 0.03:
            return self._failed(rollout_id, attempt_id, asked, start, mode, group), None
        spans, answer = self._spans(rollout_id, attempt_id, asked, skill, version, start)
        reward = 1.0 if answer == str(asked.answer) else 0.1 if answer.lstrip("-").isdecimal() else 0.0
        spans.append(self._reward(rollout_id, attempt_id, reward, start + 2, len(spans) + 1))
        attempt = Attempt(
            rollout_id, attempt_id, 1, start, "succeeded", start + 2.1, f"worker-{self.rng.randrange(3)}",
            metadata={"output": f"### ANSWER: {answer} ###"},
        )  # fmt: skip
        return RolloutRecord(
            self._rollout(rollout_id, asked, start, "succeeded", mode, group), (attempt,), tuple(spans)
        ), reward

    def _rollout(
        self, rollout_id: str, asked: Problem, start: float, status: Any, mode: RolloutMode, group: str
    ) -> Rollout:
        return Rollout(
            rollout_id, asked.task(), start, status, mode, None, start + 2.1, metadata={"group": group}, queue=mode
        )

    def _failed(
        self, rollout_id: str, attempt_id: str, asked: Problem, start: float, mode: RolloutMode, group: str
    ) -> RolloutRecord:
        error = {
            "type": "ConnectionError",
            "message": "the calculator did not answer within 5 seconds",
            "traceback": 'Traceback (most recent call last):\n  File "agent.py", line 41, in solve\nConnectionError',
        }
        attempt = Attempt(rollout_id, attempt_id, 1, start, "failed", start + 5, "worker-1", metadata={"error": error})
        return RolloutRecord(self._rollout(rollout_id, asked, start, "failed", mode, group), (attempt,), ())

    def _spans(
        self, rollout_id: str, attempt_id: str, asked: Problem, skill: float, version: int, start: float
    ) -> tuple[list[Span], str]:
        """The calls of the model and of the tool, and the answer."""
        conversation: list[dict[str, Any]] = [_text("system", SYSTEM), _text("user", asked.question)]
        tokens = self._prompt("system", SYSTEM) + self._prompt("user", asked.question)
        spans: list[Span] = []
        uses_tool = self.rng.random() < 0.25 + 0.75 * skill
        right, answer = self.rng.random() < 0.35 + 0.65 * skill, ""
        if uses_tool:
            expression = (
                asked.expression if right else asked.expression.replace("*", "x" if self.rng.random() < 0.6 else "+")
            )
            call = {"type": "tool_call", "id": "c1", "name": "calculator", "arguments": {"expression": expression}}
            said = f'I compute. calculator {{"expression": "{expression}"}}'
            message = {"role": "assistant", "parts": [{"type": "reasoning", "content": "I compute."}, call]}
            spans.append(
                self._call((rollout_id, attempt_id), conversation, message, tokens, said, version, start, skill, 1)
            )
            failed = "x" in expression
            result = "error: invalid syntax at 'x'" if failed else str(_evaluate(expression))
            spans.append(self._tool((rollout_id, attempt_id), expression, result, start + 0.8, failed))
            conversation += [
                message,
                {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": result}]},
            ]
            own = spans[0].attributes
            tokens = [*own[names.PROMPT_TOKEN_IDS], *own[names.RESPONSE_TOKEN_IDS], *self._prompt("tool", result)]
            answer = result if not failed else str(asked.answer + self.rng.randint(1, 9))
        else:
            answer = str(asked.answer if self.rng.random() < 0.15 else asked.answer + self.rng.randint(-30, 30))
        reply = f"### ANSWER: {answer} ###" if self.rng.random() < 0.6 + 0.4 * skill else f"I think it is {answer}."
        if reply.startswith("I think"):
            answer = "no number"
        spans.append(
            self._call(
                (rollout_id, attempt_id), conversation, _text("assistant", reply), tokens, reply, version, start + 1,
                skill, len(spans) + 1,
            )
        )  # fmt: skip
        return spans, answer

    def _prompt(self, role: str, text: str) -> list[int]:
        return [self.vocabulary.special(role), *self.vocabulary.encode(text), self.vocabulary.special("end")]

    def _call(
        self,
        ids: tuple[str, str],
        conversation: Sequence[dict[str, Any]],
        answer: dict[str, Any],
        tokens: Sequence[int],
        said: str,
        version: int,
        start: float,
        skill: float,
        place: int,
    ) -> Span:
        prompt = [*tokens, self.vocabulary.special("assistant")]
        sampled = [*self.vocabulary.encode(said), self.vocabulary.special("end")]
        logprobs = [-self.rng.expovariate(1 / (0.03 + 0.9 * (1 - skill) ** 2)) for _ in sampled]
        attributes: dict[str, Any] = {
            names.OPERATION_NAME: "chat",
            names.REQUEST_MODEL: "policy",
            names.RESPONSE_MODEL: "policy",
            names.AGENT_NAME: "solver",
            names.REQUEST_TEMPERATURE: 1.0,
            names.INPUT_MESSAGES: orjson.dumps(conversation).decode(),
            names.OUTPUT_MESSAGES: orjson.dumps([answer]).decode(),
            names.PROMPT_TOKEN_IDS: prompt,
            names.RESPONSE_TOKEN_IDS: sampled,
            names.LOGPROBS: logprobs,
            names.TOP_LOGPROBS: likeliest_to_text(self._likeliest(sampled, logprobs)),
            names.POLICY_VERSION: version,
            names.FINISH_REASONS: ["stop"],
        }
        if version > 0 and self.rng.random() < 0.15:  # the weights changed while this was sampled
            attributes[names.POLICY_VERSIONS] = [
                version - 1,
                len(sampled) // 2,
                version,
                len(sampled) - len(sampled) // 2,
            ]
        rollout_id, attempt_id = ids
        seconds = 0.02 * len(sampled)
        return Span(
            rollout_id, attempt_id, "chat policy", start, start + seconds, place, _trace(attempt_id),
            _span_id(attempt_id, place), attributes=attributes,
        )  # fmt: skip

    def _likeliest(self, sampled: Sequence[int], logprobs: Sequence[float]) -> list[Row]:
        """Three of the vocabulary for each token, the sampled one among them if it was likely enough."""
        own = random.Random(sum(sampled))
        words, found = len(self.vocabulary.ids), list[Row]()
        for token, logprob in zip(sampled, logprobs, strict=True):
            rest, row = 1.0 - math.exp(logprob), {token: logprob}
            while len(row) < 4 and rest > 1e-4:
                share = rest * own.uniform(0.5, 0.95)
                row.setdefault(own.randrange(len(SPECIAL), max(len(SPECIAL) + 4, words)), math.log(share))
                rest -= share
            found.append(tuple(sorted(row.items(), key=lambda pair: -pair[1])[:3]))
        return found

    def _tool(self, ids: tuple[str, str], expression: str, result: str, start: float, failed: bool) -> Span:
        rollout_id, attempt_id = ids
        attributes: dict[str, Any] = {
            names.OPERATION_NAME: "execute_tool",
            names.TOOL_NAME: "calculator",
            names.TOOL_ARGUMENTS: orjson.dumps({"expression": expression}).decode(),
            names.TOOL_RESULT: result,
            **({names.ERROR_TYPE: "SyntaxError"} if failed else {}),
        }
        return Span(
            rollout_id, attempt_id, "execute_tool calculator", start, start + 0.05, 2, _trace(attempt_id),
            _span_id(attempt_id, 2), _span_id(attempt_id, 1), "ERROR" if failed else "OK", result if failed else None,
            attributes,
        )  # fmt: skip

    def _reward(self, rollout_id: str, attempt_id: str, reward: float, start: float, place: int) -> Span:
        return Span(
            rollout_id, attempt_id, names.REWARD, start, start, place, _trace(attempt_id), _span_id(attempt_id, place),
            attributes={names.SCORE_VALUE: reward, names.EVALUATION_NAME: "reward"},
        )  # fmt: skip


def _evaluate(expression: str) -> int:
    left, operator, middle, _, right = expression.split()
    return (int(left) * int(middle) if operator == "*" else int(left) + int(middle)) - int(right)


def _text(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def _trace(attempt_id: str) -> str:
    return f"{random.Random(attempt_id).getrandbits(128):032x}"


def _span_id(attempt_id: str, place: int) -> str:
    return f"{random.Random(f'{attempt_id} {place}').getrandbits(64):016x}"


def skill_at(step: int, steps: int, pace: float) -> float:
    """How well the policy does after a step: a curve that rises and flattens."""
    return 0.06 + 0.9 / (1 + math.exp(-pace * (step / steps - 0.45)))
