"""The demo's recipe: how its policy comes to be and how it is trained. Measured, and no secret of the demo.

The starting policy is honest about what it cannot do. It sees clean demonstrations first, so it can transcribe a
problem and copy a result; then a share of demonstrations that skip the calculator and guess, so it guesses: decoded
greedily it hardly ever asks the tool. Reinforcement learning has to find out that asking pays.
"""

from __future__ import annotations

from typing import Final

from agentlightning.policy.optimizer import OptimizerConfig

# -- warm start ------------------------------------------------------------------------------------------------------

SFT_STEPS: Final = 320
SFT_BATCH: Final = 16
CLEAN: Final = 0.7
"""Share of the demonstrations, the first ones, that are clean."""
HABIT: Final = 0.65
"""Share of the others that guess."""
SFT_OPTIMIZER: Final = OptimizerConfig(
    type="muon", muon_lr=0.02, lr=6e-3, schedule="linear", total_steps=SFT_STEPS, warmup_steps=10, clip_norm=1.0
)

# -- reinforcement learning ------------------------------------------------------------------------------------------

RL_STEPS: Final = 20
TASKS_PER_STEP: Final = 16
GROUP_SIZE: Final = 8
MINIBATCHES: Final = 2
RL_OPTIMIZER: Final = OptimizerConfig(
    lr=2e-4, schedule="cosine", total_steps=RL_STEPS * MINIBATCHES, warmup_steps=4, clip_norm=1.0
)
HELD_OUT: Final = 128
VALIDATION: Final = 64
