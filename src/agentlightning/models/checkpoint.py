"""Models of transformers: checkpoints, directories that it loads, written atomically; and what their calls raise."""

from __future__ import annotations

import inspect
import os
import pickle
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import logging

from agentlightning.errors import AgentLightningError, PolicyError
from agentlightning.models import INPUT_EMBEDDING, OUTPUT_HEAD

TRAINING_STATE = "training_state.pt"


@contextmanager
def without_progress_bars() -> Generator[None]:
    """Hide the progress bars of transformers, which write over other output of the terminal."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def save(directory: Path, state: Mapping[str, Any] | None, *writers: Callable[[Path], object]) -> None:
    """Write a directory, each part by one of `writers`, and any training state; an older checkpoint is replaced.

    Raises PolicyError if writing fails; `directory` is then unchanged.
    """
    directory = directory.absolute()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as beside:
            new = Path(beside) / "new"
            new.mkdir()
            with without_progress_bars():
                for write in writers:
                    write(new)
            if state is not None:
                torch.save(dict(state), new / TRAINING_STATE)
            for path in (*new.rglob("*"), new):
                flush_file(path)
            if directory.exists():
                directory.rename(Path(beside) / "old")
            new.rename(directory)
            flush_file(directory.parent)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save reports a failed write as RuntimeError.
        raise PolicyError(f"cannot save a checkpoint to {directory}: {error}; free space or choose another") from error


def read_model(directory: Path, model: PreTrainedModel) -> PreTrainedModel:
    """The model saved in `directory`, of the shape and dtype of `model`. Raises PolicyError for weights that are
    damaged or do not fit."""
    saved = load_model(directory, model.dtype)
    _check_alike(directory, "model", saved.state_dict(), model.state_dict())
    return saved


def read_tensors(path: Path, what: str, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in a file of safetensors, with the names and shapes of `own`: of a model, an adapter, or `what` it
    is. Raises PolicyError for a damaged file, and for other tensors."""
    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
        raise PolicyError(f"{path} cannot be read: {error}; choose another checkpoint") from error
    _check_alike(path, what, saved, own)
    return saved


def _check_alike(path: Path, what: str, saved: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> None:
    """Raises PolicyError for tensors of other names or shapes."""
    shapes, own_shapes = ({name: each.shape for name, each in found.items()} for found in (saved, own))
    if unlike := {name for name, _ in shapes.items() ^ own_shapes.items()}:
        raise PolicyError(
            f"{path} holds another {what}: {min(unlike)} and {len(unlike) - 1} more weights differ in name or shape;"
            f" continue with the {what} it was saved with, and its settings"
        )


def empty_model(source: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """A model of the shape that `from_pretrained` gives, on the meta device: without memory for its weights."""
    settings = AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(settings, dtype=dtype).eval()


def read_scorer(
    directory: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    *,
    weights: bool = True,
) -> PreTrainedModel:
    """The model saved in `directory`, of any shape, that gives the tokens of `model` a probability; without `weights`,
    on the meta device. Raises PolicyError if it cannot be loaded or has another vocabulary."""
    saved = load_model(directory, dtype, weights).eval()
    try:
        vocabulary = AutoTokenizer.from_pretrained(directory, local_files_only=True).get_vocab()
    except (OSError, ValueError, KeyError):
        vocabulary = None  # Only its weights were saved.
    sizes = [each.config.get_text_config(decoder=True).vocab_size for each in (saved, model)]
    if (vocabulary is None and sizes[0] != sizes[1]) or (vocabulary or tokenizer.get_vocab()) != tokenizer.get_vocab():
        raise PolicyError(
            f"{directory} holds a model with another tokenizer (vocabularies of {sizes[0]} and {sizes[1]} tokens) and "
            "cannot score the policy's tokens; choose one of the same family"
        )
    return saved


def load_model(directory: str | Path, dtype: torch.dtype, weights: bool = True) -> PreTrainedModel:
    """The model in a directory; without `weights`, on the meta device. Raises PolicyError."""
    with reading(directory):
        if not weights:
            return empty_model(directory, dtype)
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)


@contextmanager
def reading(source: str | Path) -> Generator[None]:
    """Within, a model or tokenizer in a directory that transformers does not load is a PolicyError."""
    try:
        with without_progress_bars():
            yield
    except SafetensorError as error:
        raise PolicyError(
            f"the weights in {source} cannot be read: {error}; a file is cut short or damaged: fetch it again, or"
            " choose another checkpoint"
        ) from error
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise PolicyError(
            f"{source} cannot be loaded as a causal language model with a tokenizer: {error}; give a directory written"
            " by save_pretrained, or another model"
        ) from error


def named_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of `model`, by their names there; copied only if the model has another form of them.

    A tied output layer is included under its own name, too (`weight_sync.disk`)."""
    state = dict(model.state_dict())
    has_output = OUTPUT_HEAD in state
    for name in model._keys_to_ignore_on_save or ():  # pyright: ignore[reportPrivateUsage]
        state.pop(name, None)
    kept = remove_tied_weights_from_state_dict(state, model)
    named = revert_weight_conversion(model, kept)
    if has_output and INPUT_EMBEDDING in named and OUTPUT_HEAD not in named:
        named[OUTPUT_HEAD] = named[INPUT_EMBEDDING]
    return named


def load_state(directory: Path) -> dict[str, Any]:
    """The training state saved in `directory`. Raises PolicyError if there is none."""
    path = directory / TRAINING_STATE
    if not path.is_file():
        raise PolicyError(
            f"{directory} holds no {TRAINING_STATE}, so training cannot continue from it; choose a checkpoint saved "
            "with training_state=True, or open it as a new policy"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise PolicyError(f"{path} cannot be read: {error}; choose an earlier checkpoint") from error


def flush_file(path: Path) -> None:
    """Make a file survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- calls of a model --------------------------------------------------------------------------------------------------

# Calls of a model: the name of the argument for its key-value cache, and what it raises where it cannot be used, which
# is a typed error when it is opened in place of any other at the first call.

FORWARD_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError)
"""What the forward pass of a model raises for inputs that it does not know."""


@contextmanager
def refusing(model: PreTrainedModel) -> Generator[None]:
    """Within, whatever the model raises is the PolicyError that it cannot be used."""
    try:
        yield
    except (torch.OutOfMemoryError, AgentLightningError):
        raise
    except FORWARD_ERRORS as error:
        raise PolicyError(
            f"{type(model).__name__} cannot be used here ({type(error).__name__}: {error}); use another model, or serve"
            " this one with vLLM"
        ) from error


def configured_window(model: PreTrainedModel) -> int | None:
    """The sliding window that a configuration names, whether or not it names layers with one; None: there is none."""
    config: Any = model.config.get_text_config(decoder=True)
    return getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None


def cache_argument(model: Any) -> str:
    """`cache` since transformers 5.24, `past_key_values` in versions before and in models that patch their forward.
    `model` may be a model of peft, which passes its arguments on."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"
