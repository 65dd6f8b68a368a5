"""A policy over whole words: a Llama of about 20,000 weights whose tokens are the words of an environment.

It is a `LocalPolicy`, trained as any other. Sampling is done here, for all calls at once: a forward pass for each word,
over prompts that differ, without a request for each call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentlightning.policy.config import LocalPolicyConfig, OptimizerConfig, ValueHeadConfig
from agentlightning.policy.local import LocalPolicy
from tasks.base import Call, Environment

END, ENDED = ".", 0
"""The end of an answer, and its token."""
TEMPLATE = "{% for message in messages %}{{ message.content }}{% if not loop.last %} {% endif %}{% endfor %}"
Answer = tuple[tuple[int, ...], tuple[float, ...]]
"""Token ids and their log-probabilities."""


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate((END, *words))}, unk_token=END))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=END)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def word_model(tokenizer: PreTrainedTokenizerFast, seed: int, hidden: int = 32, layers: int = 1) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    ).eval()


def imitate(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    demonstrations: Sequence[tuple[Call, str]],
    *,
    batch: int = 64,
    lr: float = 1e-2,
) -> None:
    """Supervised learning of the answers, once over all demonstrations in their order, with a falling learning rate."""
    steps = len(demonstrations) // batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    for step in range(steps):
        part = demonstrations[step * batch : (step + 1) * batch]
        rows = [(tokenizer.encode(call.prompt), _answer_ids(tokenizer, call, answer)) for call, answer in part]
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids = torch.tensor([_padded([*prompt, *answer], width, 0) for prompt, answer in rows])
        labels = torch.tensor([_padded([-100] * len(prompt) + answer, width, -100) for prompt, answer in rows])
        logits = model(input_ids=ids).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def _padded(row: list[int], width: int, filler: int) -> list[int]:
    return row + [filler] * (width - len(row))


def _answer_ids(tokenizer: PreTrainedTokenizerFast, call: Call, answer: str) -> list[int]:
    return tokenizer.encode(answer if call.max_words == 1 else f"{answer} {END}")


class WordPolicy:
    """A word model as a `LocalPolicy`, and its samples."""

    def __init__(self, environment: Environment, *, seed: int = 0, hidden: int = 32, layers: int = 1) -> None:
        self.tokenizer = word_tokenizer(environment.words)
        self.words = (END, *environment.words)
        self._ids = {word: number for number, word in enumerate(self.words)}
        self._known: dict[tuple[int, ...], torch.Tensor] = {}
        """Log-probabilities of the next word by row, under the weights of `_version`."""
        self._version = -1
        self.model = word_model(self.tokenizer, seed, hidden, layers)

    def start(
        self,
        weights: Mapping[str, torch.Tensor],
        optimizer: OptimizerConfig,
        seed: int,
        value_head: ValueHeadConfig | None = None,
    ) -> None:
        """Begin a training run from these weights, with a new value head if one is asked for."""
        self.model.load_state_dict(weights)
        config = LocalPolicyConfig(model="words", device="cpu", optimizer=optimizer, value_head=value_head, seed=seed)
        self.local = LocalPolicy(config, self.model, self.tokenizer)
        self.generator = torch.Generator().manual_seed(seed)
        self._known.clear()

    @torch.inference_mode()
    def answers(self, calls: Sequence[Call], *, greedy: bool = False) -> list[Answer]:
        """One answer to each call, with the log-probabilities at temperature 1."""
        rows = [self.encode(call.prompt) for call in calls]
        sampled: list[list[int]] = [[] for _ in calls]
        logprobs: list[list[float]] = [[] for _ in calls]
        running = list(range(len(calls)))
        while running:
            logprobs_RV = self._next_words([(*rows[i], *sampled[i]) for i in running])
            chosen = logprobs_RV.argmax(-1) if greedy else _draw(logprobs_RV, self.generator)
            found = logprobs_RV.gather(1, chosen[:, None])[:, 0].tolist()
            for i, token, logprob in zip(running, chosen.tolist(), found, strict=True):
                sampled[i].append(token)
                logprobs[i].append(logprob)
            running = [i for i in running if sampled[i][-1] != ENDED and len(sampled[i]) < calls[i].max_words]
        return [(tuple(ids), tuple(own)) for ids, own in zip(sampled, logprobs, strict=True)]

    def _next_words(self, rows: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """`next_word`, computed once for each row as long as the weights are the same."""
        if self._version != self.local.policy_version:
            self._version = self.local.policy_version
            self._known.clear()
        if missing := list({row: None for row in rows if row not in self._known}):
            self._known.update(zip(missing, self.next_word(missing), strict=True))
        return torch.stack([self._known[row] for row in rows])

    def encode(self, text: str) -> list[int]:
        return [self._ids[word] for word in text.split()]

    @torch.no_grad()
    def next_word(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Log-probabilities of the word after each row of tokens [rows, V]. Rows are padded on the right, where a
        causal model does not look."""
        width = max(map(len, rows))
        ids = torch.tensor([_padded(list(row), width, 0) for row in rows])
        last = torch.tensor([len(row) - 1 for row in rows])
        return self.model(input_ids=ids).logits[torch.arange(len(rows)), last].log_softmax(-1)

    def text(self, token_ids: Sequence[int]) -> str:
        """The words of an answer, without its end."""
        return " ".join(self.words[token] for token in token_ids if token != ENDED)


def _draw(logprobs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0]
