"""Reinforcement learning of an agent in one file: sampling, rows of tokens, credit, loss and step, and nothing hidden.

    python loop.py [--steps 200] [--seed 0]

The agent is shown three numbers, one after the other, and answers each with the next: 1 to 0, 2 to 1, 0 to 2. Its
reward is the share of its answers that are right. The policy is a Llama of some 40,000 weights that starts at random,
so it has to learn what an answer looks like, too.

This is what `agl.LightningRL()` does with its default settings, `credit="group_relative"`, `loss="ppo"` and
`aggregate="rollout"`, written out with torch and transformers alone: the tests hold both to the same gradients. What
it leaves out is what makes that a framework: agents that are programs of their own, stores, engines, crashes.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

# -- tokens ------------------------------------------------------------------------------------------------------------

NUMBERS = 3
END, START = NUMBERS, NUMBERS + 1
"""0, 1 and 2 are the numbers; END ends an answer."""
VOCABULARY = NUMBERS + 2
CALLS = 3
MOST_TOKENS = 2
"""Of an answer: a number and END."""


@dataclass(frozen=True)
class Call:
    """One model call: the tokens that the policy saw, those that it sampled, and log p of each of these."""

    prompt: tuple[int, ...]
    sampled: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass
class Rollout:
    """One run of the agent on one task."""

    task: tuple[int, ...]
    """The numbers that it is shown, one for each call."""
    calls: list[Call] = field(default_factory=list)
    reward: float = 0.0


# -- the agent ---------------------------------------------------------------------------------------------------------


def play(model: LlamaForCausalLM, tasks: Sequence[tuple[int, ...]], generator: torch.Generator | None) -> list[Rollout]:
    """A rollout of each task, in lockstep. Without a generator the policy takes the most likely tokens."""
    rollouts = [Rollout(task) for task in tasks]
    prompts: list[tuple[int, ...]] = [(START,)] * len(tasks)
    for turn in range(CALLS):
        seen = [(*prompt, task[turn]) for prompt, task in zip(prompts, tasks, strict=True)]
        calls = sample(model, seen, generator)
        for rollout, call in zip(rollouts, calls, strict=True):
            rollout.calls.append(call)
        # The next prompt continues the very tokens of this call: no text, so nothing is tokenised anew.
        prompts = [(*call.prompt, *call.sampled) for call in calls]
    for rollout in rollouts:
        rollout.reward = reward_of(rollout)
    return rollouts


def reward_of(rollout: Rollout) -> float:
    """The share of answers that are right."""
    wanted = [((number + 1) % NUMBERS, END) for number in rollout.task]
    return statistics.fmean(call.sampled == right for call, right in zip(rollout.calls, wanted, strict=True))


# -- sampling ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def sample(
    model: LlamaForCausalLM, prompts: Sequence[tuple[int, ...]], generator: torch.Generator | None
) -> list[Call]:
    """An answer to each prompt, at temperature 1, up to END or `MOST_TOKENS`."""
    sampled: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    running = list(range(len(prompts)))
    while running:
        rows = [[*prompts[i], *sampled[i]] for i in running]
        ids_RL, _ = padded(rows)
        last_R = torch.tensor([len(row) - 1 for row in rows])
        logprobs_RV = model(input_ids=ids_RL).logits[torch.arange(len(rows)), last_R].log_softmax(-1)
        if generator is None:
            chosen_R = logprobs_RV.argmax(-1)
        else:
            chosen_R = torch.multinomial(logprobs_RV.exp(), 1, generator=generator)[:, 0]
        for i, token, logprob_V in zip(running, chosen_R.tolist(), logprobs_RV, strict=True):
            sampled[i].append(token)
            logprobs[i].append(logprob_V[token].item())
        running = [i for i in running if sampled[i][-1] != END and len(sampled[i]) < MOST_TOKENS]
    return [
        Call(prompt, tuple(tokens), tuple(own)) for prompt, tokens, own in zip(prompts, sampled, logprobs, strict=True)
    ]


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Token ids [R, L], and which of them are none [R, L]. Rows are padded on the right, where a causal model does not
    look, so that it needs no mask."""
    length = max(map(len, rows))
    ids_RL = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])
    return ids_RL, torch.arange(length)[None] >= torch.tensor([[len(row)] for row in rows])


# -- rows: every token once --------------------------------------------------------------------------------------------


@dataclass
class Row:
    """Calls of which each continues the one before it: all their tokens, each once."""

    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    """Which of the tokens the policy chose, and so are trained."""
    logprobs: list[float] = field(default_factory=list)
    """log p of each token when it was sampled; 0 for the others."""
    advantage: float = 0.0
    weight: float = 0.0
    """The share of each sampled token in the loss of the batch."""

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        self.tokens += tokens
        self.sampled += [logprobs is not None] * len(tokens)
        self.logprobs += logprobs if logprobs is not None else [0.0] * len(tokens)


def rows_of(rollout: Rollout) -> list[Row]:
    """A call whose prompt begins with the tokens of the calls before it joins their row; any other begins a new one.

    The three calls of a rollout are one row. Trained call by call they would be three, and the first tokens computed
    three times: the cost of a conversation would grow with the square of its length. The framework's token trees
    share what rollouts and branches have in common, too.
    """
    rows: list[Row] = []
    for call in rollout.calls:
        known = len(rows[-1].tokens) if rows else 0
        if not rows or list(call.prompt[:known]) != rows[-1].tokens:
            rows.append(Row())
            known = 0
        rows[-1].extend(call.prompt[known:])
        rows[-1].extend(call.sampled, call.logprobs)
    return rows


# -- credit ------------------------------------------------------------------------------------------------------------


def batch_of(groups: Sequence[Sequence[Rollout]]) -> list[Row]:
    """Rows with their advantages and weights.

    A = (R - mean R) / std R over the group (GRPO, arXiv:2402.03300, section 4.1.2), the same for every token of the
    rollout. Every rollout has the same weight, however many tokens it has: that of a token is
    1 / (rollouts * tokens of its rollout). Groups of equal rewards have A = 0: they count, and need no pass.
    """
    useful = [group for group in groups if len({rollout.reward for rollout in group}) > 1]
    rollouts = sum(map(len, groups))
    batch: list[Row] = []
    for group in useful:
        rewards = [rollout.reward for rollout in group]
        mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
        for rollout, reward in zip(group, rewards, strict=True):
            rows = rows_of(rollout)
            tokens = sum(sum(row.sampled) for row in rows)
            for row in rows:
                row.advantage = (reward - mean) / spread
                row.weight = 1 / (rollouts * tokens)
            batch += rows
    return batch


# -- loss --------------------------------------------------------------------------------------------------------------

CLIP_LOW, CLIP_HIGH = 0.2, 0.28


def policy_loss(model: LlamaForCausalLM, rows: Sequence[Row]) -> Tensor:
    """The clipped importance ratio of each sampled token (PPO, arXiv:1707.06347, equation 7),

        loss = - sum_t  w_t  min( r_t A,  clip(r_t, 1 - CLIP_LOW, 1 + CLIP_HIGH) A ),   r_t = p(t) / p_sampled(t)

    Suffixes of tensors are their dimensions: R rows, L tokens, V vocabulary. The model's output at a place is for the
    token after it: hence `[:, :-1]` beside `[:, 1:]`. The first token of a row is never sampled.
    """
    ids_RL, padding_RL = padded([row.tokens for row in rows])
    logits_RLV = model(input_ids=ids_RL).logits[:, :-1]
    logprobs_RL = logits_RLV.log_softmax(-1).gather(-1, ids_RL[:, 1:, None])[..., 0]
    length = ids_RL.shape[1]
    old_RL = torch.tensor([[*row.logprobs, *[0.0] * (length - len(row.logprobs))] for row in rows])[:, 1:]
    sampled_RL = torch.tensor([[*row.sampled, *[False] * (length - len(row.sampled))] for row in rows])[:, 1:]
    assert not (sampled_RL & padding_RL[:, 1:]).any()
    advantage_R1 = torch.tensor([[row.advantage] for row in rows])
    weight_R1 = torch.tensor([[row.weight] for row in rows])
    ratio_RL = (logprobs_RL - old_RL).exp()
    clipped_RL = ratio_RL.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    objective_RL = torch.minimum(ratio_RL * advantage_R1, clipped_RL * advantage_R1)
    return -(weight_R1 * objective_RL * sampled_RL).sum()


# -- the loop ----------------------------------------------------------------------------------------------------------


def make_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=START,
        eos_token_id=END,
    )
    return LlamaForCausalLM(config).eval()


def improve(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[Rollout]]) -> int:
    """One update of the weights; returns the number of rows that were trained."""
    batch = batch_of(groups)
    if batch:
        policy_loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return len(batch)


def success(model: LlamaForCausalLM) -> float:
    """The reward of the most likely answers, over all tasks."""
    every = list(itertools.product(range(NUMBERS), repeat=CALLS))
    return statistics.fmean(rollout.reward for rollout in play(model, every, None))


def train(steps: int = 200, seed: int = 0, tasks: int = 8, group_size: int = 16, lr: float = 5e-4) -> list[float]:
    """The mean reward of the rollouts of each step, and last that of the trained policy's most likely answers."""
    model = make_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
    rewards: list[float] = []
    for step in range(steps):
        # 1. Rollouts: some tasks, a group of rollouts of each.
        drawn = [tuple(draw.choices(range(NUMBERS), k=CALLS)) for _ in range(tasks)]
        rollouts = play(model, [task for task in drawn for _ in range(group_size)], generator)
        groups = [rollouts[start : start + group_size] for start in range(0, len(rollouts), group_size)]
        rewards.append(statistics.fmean(rollout.reward for rollout in rollouts))
        # 2. Credit, loss and step.
        rows = improve(model, optimizer, groups)
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:3}: reward {rewards[-1]:.2f}, {rows} rows")
    return [*rewards, success(model)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # So small a model is slower on several.
    reward = train(options.steps, options.seed)[-1]
    print(f"the trained policy: reward {reward:.2f}")
