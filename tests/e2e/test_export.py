"""`agl export` and `result.report()` after a run of the `agl` program."""

import json
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

AGL = str(Path(sys.executable).parent / "agl")


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("lora", [[], ["policy.lora={r=4}"]], ids=["all weights", "lora"])
def test_a_run_is_exported_in_every_form(job, lora):
    done = job.run(job.command("--run", "run", "algorithm.steps=1", *lora))
    assert done.returncode == 0, done.stderr
    for form in ("hf", "gguf-ready"):
        done = job.run([AGL, "export", "run", "--to", form, "--out", form, "--json"])
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["merged"] == bool(lora)
        model = AutoModelForCausalLM.from_pretrained(job.directory / form)
        tokenizer = AutoTokenizer.from_pretrained(job.directory / form)
        assert model.generate(**tokenizer("say", return_tensors="pt"), max_new_tokens=2).shape[1] > 2
    done = job.run([AGL, "export", "run", "--to", "gguf"])
    assert done.returncode == 1
    assert "divides text into words in a way that has no name in GGUF" in done.stderr
    for form in ("openai-jsonl", "trl-jsonl"):
        done = job.run([AGL, "export", "run", "--to", form, "--json"])
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["records"] == 16
    done = job.run([AGL, "export", "run", "--to", "hf", "--agent", "x"])
    assert done.returncode == 2
    assert "--target-agent select rollouts" in done.stderr
