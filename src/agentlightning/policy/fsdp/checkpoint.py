"""The training state of ranks on disk, by torch's distributed checkpoint: each rank writes its share, and any number of
ranks can read it.

    weight/OWNER/NAME          float32, or the frozen dtype
    moment/OWNER/NAME/KIND     what the optimiser remembers of it
    average/OWNER/NAME         the moving average, where one is kept

An owner is the model, an adapter or the value head. Counters are no tensors; `load` is given what `save` returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from agentlightning.errors import ConfigError, PolicyError
from agentlightning.policy.fsdp.sharding import Ranks
from agentlightning.policy.update.optimizer import Optimizer, WeightAverage
from agentlightning.policy.update.updater import EntropyHistory, Updater

FOLDER = "ranks"
"""In a checkpoint of a policy."""
READ_ERRORS = (CheckpointException, OSError, RuntimeError, ValueError, KeyError, EOFError)


class TrainedParameters:
    """The weights that an updater trains, and their names."""

    def __init__(self, owner: str, module: nn.Module, optimizer: Optimizer, updater: Updater) -> None:
        self.owner, self.optimizer, self.updater = owner, optimizer, updater
        """`updater`: whose counters and average are those of `optimizer`."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.by_name = {names[id(parameter)]: parameter for parameter in optimizer.masters}

    @property
    def average(self) -> WeightAverage | None:
        """The moving average of these weights, where one is kept."""
        return self.updater.average if self.updater.optimizer is self.optimizer else None

    def tensors(self) -> dict[str, Tensor]:
        moments, average = self.optimizer.moments(), self.average
        found: dict[str, Tensor] = {}
        for i, (name, parameter) in enumerate(self.by_name.items()):
            found[f"weight/{self.owner}/{name}"] = parameter.detach()
            for kind, value in moments.get(parameter, {}).items():
                found[f"moment/{self.owner}/{name}/{kind}"] = value
            if average is not None:
                found[f"average/{self.owner}/{name}"] = average.weights[i]
        return found

    def counters(self) -> dict[str, Any]:
        history = self.updater.entropy
        return {
            "type": self.optimizer.config.type,
            "steps": self.optimizer.steps,
            "entropy": [history.mean, history.steps],
            "average": None if self.average is None else self.average.rate,
        }

    def parts(self, keys: Iterable[str]) -> Iterator[tuple[str, str, str, str]]:
        """(key, what it is, name, kind of moment) of those of the saved `keys` that are of these weights."""
        for key in keys:
            part, _, rest = key.partition(f"/{self.owner}/")
            name, _, kind = rest.rpartition("/") if part == "moment" else (rest, "", "")
            if name in self.by_name:
                yield key, part, name, kind

    def empty(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """New tensors for those of the saved `keys` that are of these weights."""
        return {
            key: torch.zeros(()) if kind == "step" else torch.zeros_like(self.by_name[name].detach())
            for key, _, name, kind in self.parts(keys)
        }

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor], counters: Mapping[str, Any]) -> None:
        """Continue from saved tensors and counters."""
        moments: dict[Tensor, dict[str, Tensor]] = {}
        averages: dict[str, Tensor] = {}
        for key, part, name, kind in self.parts(tensors):
            if part == "moment":
                moments.setdefault(self.by_name[name], {})[kind] = tensors[key]
            elif part == "weight":
                self.by_name[name].copy_(tensors[key])
            else:
                averages[name] = tensors[key]
        self.optimizer.set_moments(moments)
        self.optimizer.steps = int(counters["steps"])
        if self.updater.optimizer is self.optimizer:
            mean, steps = counters["entropy"]
            self.updater.entropy = EntropyHistory(float(mean), int(steps))
            self.updater.set_average(counters["average"], [averages[name] for name in self.by_name if name in averages])


def save(ranks: Ranks, trained: Iterable[TrainedParameters], directory: Path) -> dict[str, Any]:
    """Write the state of all ranks to `directory`, and return the counters. Raises PolicyError."""
    trained = list(trained)
    tensors = {key: value for each in trained for key, value in each.tensors().items()}
    try:
        state_dict_saver.save(cast(Any, tensors), checkpoint_id=directory, process_group=ranks.control)
    except READ_ERRORS as error:
        raise PolicyError(f"the ranks cannot save to {directory}: {error}; free space or choose another") from error
    return {each.owner: each.counters() for each in trained}


def load(ranks: Ranks, trained: Iterable[TrainedParameters], directory: Path, counters: Mapping[str, Any]) -> None:
    """Continue from the state in `directory`. Raises PolicyError for one that is damaged or of another model, and
    ConfigError for one of another optimiser, before anything changes."""
    trained = list(trained)
    tensors = _empty(trained, directory, counters)
    try:
        state_dict_loader.load(cast(Any, tensors), checkpoint_id=directory, process_group=ranks.control)
    except READ_ERRORS as error:
        raise _damaged(directory, error) from error
    for each in trained:
        each.take(tensors, counters[each.owner])


def _empty(trained: Iterable[TrainedParameters], directory: Path, counters: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors for all that is saved and used. Raises as `load` does."""
    described = _metadata(directory).state_dict_metadata.items()
    saved = {key: value for key, value in described if isinstance(value, TensorStorageMetadata)}
    tensors: dict[str, Tensor] = {}
    for each in trained:
        own = each.empty(saved)
        missing = [name for name in each.by_name if f"weight/{each.owner}/{name}" not in own]
        unlike = [key for key, value in own.items() if tuple(saved[key].size) != tuple(value.shape)]
        if missing or unlike or each.owner not in counters:
            raise PolicyError(
                f"{directory} holds another model: {each.owner} {(missing + unlike)[:1] or ''} and "
                f"{max(0, len(missing + unlike) - 1)} more differ; continue with the model and policy.lora it was saved"
                " with"
            )
        if counters[each.owner]["type"] != each.optimizer.config.type:
            raise ConfigError(
                f'the optimiser type="{counters[each.owner]["type"]}" was saved, and "{each.optimizer.config.type}" is'
                " set; continue with the type it was saved with"
            )
        tensors |= own
    return tensors


def _metadata(directory: Path) -> Metadata:
    try:
        return FileSystemReader(directory).read_metadata()
    except READ_ERRORS as error:
        raise _damaged(directory, error) from error


def _damaged(directory: Path, error: BaseException) -> PolicyError:
    return PolicyError(
        f"{directory} holds no state of ranks that can be read: {error}; choose an earlier checkpoint, and with ranks"
        " on other machines a directory that all of them share"
    )


def check_complete(directory: Path) -> None:
    """Raises PolicyError where files of a saved state are not in `directory`, as those of another machine's disk."""
    files = {str(each.relative_path) for each in (_metadata(directory).storage_data or {}).values()}
    if missing := sorted(name for name in files if not (directory / name).is_file()):
        raise PolicyError(
            f"{directory} lacks {missing[0]} and {len(missing) - 1} more files that ranks have written: machines that"
            " train together need a directory of runs that all of them share"
        )
