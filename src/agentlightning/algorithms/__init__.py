"""Algorithms: what a training run does at each step, found by the `type` in their settings."""

from agentlightning.algorithms.apo.algorithm import APO
from agentlightning.algorithms.base import Algorithm, class_name, make_algorithm, register
from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.preference import DPO
from agentlightning.algorithms.sequential import Sequential
from agentlightning.algorithms.sft import RejectionSampling, SFTAlgorithm
from agentlightning.algorithms.training import Training

__all__ = [
    "APO",
    "DPO",
    "Algorithm",
    "LightningRL",
    "RejectionSampling",
    "SFTAlgorithm",
    "Sequential",
    "Training",
    "class_name",
    "make_algorithm",
    "register",
]
