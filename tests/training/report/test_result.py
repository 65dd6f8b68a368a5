"""The report of a run as JSON, which other programs read."""

from __future__ import annotations

from pathlib import Path

from agentlightning.evaluation.intervals import Gain
from agentlightning.resources import PromptTemplate
from agentlightning.training.report.result import Cost, StageResult, TrainingResult


def test_the_report_of_a_run_has_these_fields() -> None:
    result = TrainingResult(
        held_out={"greedy": Gain(0.25, 0.5, 0.25, (0.1, 0.4), 7, 2, 1), "sampled": Gain(0.5, 0.5, 0.0, (-1.0, 1.0), 8)},
        missing={"before-greedy": {"failed": 2}, "after-greedy": {"bad_reward": 1}},
        rollouts=64,
        failed_rollouts=3,
        rejected_rollouts={"missing_reward": 2},
        skipped_groups=1,
        warnings=("slow",),
        warning_counts={"slowness": 4},
        rollbacks=1,
        gate_rejections=2,
        steps=9,
        best_step=6,
        seconds=1.23456,
        checkpoint=Path("run/checkpoint"),
        curve=Path("run/curve.png"),
        run_dir=Path("run"),
        start_prompts={"prompt": PromptTemplate(template="Be quick.\nSay {word}.")},
        prompts={"prompt": PromptTemplate(template="Be kind.\nSay {word}.")},
        stages=(
            StageResult("apo", 0, 5, 40, {"greedy": Gain(0.25, 0.5, 0.25, (0.1, 0.4), 7)}, Cost(search_tokens=90)),
        ),
        cost=Cost(12, 3, 90, 0.5, 4, 30, 0.25, 1),
    )
    nothing = {
        "sampled_tokens": 0,
        "search_calls": 0,
        "search_tokens": 90,
        "search_money": None,
        "provider_calls": 0,
        "provider_tokens": 0,
        "provider_dollars": None,
        "provider_calls_without_price": 0,
    }
    gain = {"before": 0.25, "after": 0.5, "gain": 0.25, "interval": [0.1, 0.4], "tasks": 7}
    gain |= {"missing_before": 0, "missing_after": 0}
    stage = {"name": "apo", "first_step": 0, "steps": 5, "rollouts": 40, "held_out": {"greedy": gain}, "cost": nothing}
    greedy = {
        "before": 0.25,
        "after": 0.5,
        "gain": 0.25,
        "interval": [0.1, 0.4],
        "tasks": 7,
        "missing_before": 2,
        "missing_after": 1,
        "reasons_before": {"failed": 2},
        "reasons_after": {"bad_reward": 1},
    }
    sampled = {"before": 0.5, "after": 0.5, "gain": 0.0, "interval": [-1.0, 1.0], "tasks": 8}
    sampled |= {"missing_before": 0, "missing_after": 0, "reasons_before": {}, "reasons_after": {}}
    assert result.as_json() == {
        "held_out": {"greedy": greedy, "sampled": sampled},
        "rollouts": 64,
        "failed_rollouts": 3,
        "rejected_rollouts": {"missing_reward": 2},
        "skipped_groups": 1,
        "warnings": ["slow"],
        "warning_counts": {"slowness": 4},
        "rollbacks": 1,
        "gate_rejections": 2,
        "steps": 9,
        "best_step": 6,
        "seconds": 1.23,
        "checkpoint": "run/checkpoint",
        "curve": "run/curve.png",
        "run_dir": "run",
        "prompts": {"prompt": "Be kind.\nSay {word}."},
        "prompt_diff": result.diff(),
        "stages": [stage],
        "cost": {
            "sampled_tokens": 12,
            "search_calls": 3,
            "search_tokens": 90,
            "search_money": 0.5,
            "provider_calls": 4,
            "provider_tokens": 30,
            "provider_dollars": 0.25,
            "provider_calls_without_price": 1,
        },
        "tracker_failures": {},
        "recorded": None,
        "gateways": None,
    }
    assert result.best_prompt.template == "Be kind.\nSay {word}."
    assert result.diff().splitlines()[-3:] == ["-Be quick.", "+Be kind.", " Say {word}."]
