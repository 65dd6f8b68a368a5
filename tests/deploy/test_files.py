"""Images, the compose file, and the examples for SkyPilot and Slurm: they name what exists."""

import re
import shlex
import subprocess
import tomllib

import pytest
import yaml
from tests.deploy.commands import check_command
from tests.deploy.kubernetes import ROOT

from agentlightning.config import TrainConfig
from agentlightning.util.settings import load_settings

DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
SLURM = ROOT / "deploy" / "slurm" / "train.sbatch"
SKY = yaml.safe_load((ROOT / "deploy" / "skypilot" / "train.yaml").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STAGES = re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE)


def agl_commands(script):
    """The command lines of `agl` in a shell script, without redirections and arrays."""
    joined = re.sub(r"\\\n\s*", " ", script)
    for line in joined.splitlines():
        found = re.search(r"(?:^|[\s/])agl ((?:serve|runner|train|export)\b.*?)(?:&>|&$|$)", line.split(" # ")[0])
        if found and not line.lstrip().startswith("#"):
            words = shlex.split(found[1].replace('"${arguments[@]}"', ""))
            yield [re.sub(r"\$\(.*\)|\$\{[^}]*\}|\$\w+", "1", word) for word in words]


def test_the_images_install_extras_and_copy_files_that_exist():
    extras = {extra for found in re.findall(r"'\.\[([\w,-]+)\]'", DOCKERFILE) for extra in found.split(",")}
    assert extras
    assert extras <= set(PROJECT["optional-dependencies"])
    sources = [word for found in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) for word in found.split()]
    assert sources
    assert all((ROOT / source).exists() for source in sources)
    allowed = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    assert {f"!{source.removeprefix('./')}" for source in sources} <= set(allowed)


def test_the_core_image_is_the_default_has_no_torch_and_the_other_has_the_torch_of_the_makefile():
    core, train = DOCKERFILE.split(" AS core")[1].split("FROM core AS train")
    assert "torch" not in core
    [pinned] = re.findall(r"torch==[\d.]+", train)
    assert pinned in (ROOT / "Makefile").read_text()
    assert DOCKERFILE.rstrip().endswith("FROM core")


def test_the_images_do_not_run_as_root_and_start_commands_that_exist():
    assert DOCKERFILE.rindex("USER 1000") > DOCKERFILE.rindex("USER root")
    for found in re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE):
        words = yaml.safe_load(found)
        if "--help" not in words:
            check_command(words)


@pytest.mark.parametrize("name", ["server", "runner", "trainer"])
def test_the_compose_file_builds_a_stage_and_runs_a_command_that_agl_understands(name):
    service = COMPOSE["services"][name]
    assert service["build"]["target"] in STAGES
    check_command([re.sub(r"\$\{\w+:-(.*?)\}", r"\1", word) for word in service["command"]])
    assert set(service["depends_on"]) <= set(COMPOSE["services"])


def test_the_settings_in_compose_slurm_and_skypilot_are_settings_of_a_run():
    scripts = (SLURM.read_text(), SKY["run"], shlex.join(["agl", *COMPOSE["services"]["trainer"]["command"]]))
    checked = 0
    for script in scripts:
        [words] = [words for words in agl_commands(script) if words[0] == "train"]
        settings = [word for word in words if re.match(r"^\w+\.[\w.]+=", word)]
        given = [word.replace("=[1]", '=["http://a:1"]') for word in settings]
        load_settings(TrainConfig, overrides=[*given, "data.train=t.jsonl", "policy.model=tiny"])
        checked += len(settings)
    assert checked >= 15


@pytest.mark.parametrize("script", [SLURM.read_text(), SKY["run"]], ids=["slurm", "skypilot"])
def test_scripts_give_agl_options_that_it_has(script):
    found = list(agl_commands(script))
    assert len(found) >= 2
    for words in found:
        check_command(words)


@pytest.mark.parametrize("script", [SLURM.read_text(), SKY["run"], SKY["setup"]], ids=["slurm", "run", "setup"])
def test_scripts_are_valid_bash(script):
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
