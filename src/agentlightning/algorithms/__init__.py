"""Algorithms: what a training run does at each step, found by the `type` in their settings."""

from agentlightning.algorithms.apo.algorithm import APO
from agentlightning.algorithms.base import Algorithm, class_name, make_algorithm, register
from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.sequential import Sequential
from agentlightning.algorithms.training import Training

__all__ = ["APO", "Algorithm", "LightningRL", "Sequential", "Training", "class_name", "make_algorithm", "register"]
