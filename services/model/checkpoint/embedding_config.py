"""Reads how a checkpoint makes embeddings: from the files of sentence-transformers, if they are
there; else the state of the last token is the embedding.

    modules.json            the modules in order, each with its type and directory
    1_Pooling/config.json   which states are pooled
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from services.model.config.families import CLASSIFIER
from services.model.config.json_fields import JsonFields, read_json
from services.runtime.errors import StartupError

MODULES_FILE = "modules.json"
CONFIG_FILE = "config.json"

Mode = Literal["last", "mean"]
"""The states that are pooled: the last token's, or all."""

Activation = Literal["sigmoid", "identity"]

_MODES: dict[str, Mode] = {"lasttoken": "last", "mean": "mean"}
_FLAGS = {"pooling_mode_lasttoken": "lasttoken", "pooling_mode_mean_tokens": "mean"}
"""Names of modes in files that have a flag for each mode."""


_ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "identity"}


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """How a checkpoint makes embeddings."""

    mode: Mode = "last"
    dimensions: tuple[int, ...] | None = ()
    """The numbers of leading values that are embeddings, too; None allows any number."""
    problem: str = ""
    """The reason for which the embeddings cannot be computed; empty if they can."""
    score: Activation | None = None
    """The function that turns a cross-encoder's logit into its score; None for any other model."""

    @classmethod
    def from_directory(cls, directory: Path) -> "EmbeddingConfig":
        """Read the files, if there are any. Raises StartupError if a file is not readable."""
        mode: Mode = "last"
        problem = ""
        for kind, path in _modules(directory):
            if kind == "Pooling":
                mode, problem = _mode(JsonFields.read(path / CONFIG_FILE), problem)
            elif kind not in ("Transformer", "Normalize"):
                problem = problem or f"its module {kind} is not supported"
        config = directory / CONFIG_FILE
        fields = JsonFields.read(config) if config.is_file() else JsonFields(config, {})
        score = _activation(fields)
        return cls("last" if score else mode, _dimensions(fields), problem, score)


def _modules(directory: Path) -> Iterator[tuple[str, Path]]:
    """The kind and the directory of each module."""
    file = directory / MODULES_FILE
    if not file.is_file():
        return
    try:
        for module in read_json(file):
            yield str(module["type"]).rpartition(".")[2], directory / str(module["path"])
    except (TypeError, KeyError) as error:
        raise StartupError(
            f"{file}: not a list of modules with type and path: {error!r}"
        ) from error


def _mode(fields: JsonFields, problem: str) -> tuple[Mode, str]:
    modes = [fields.text("pooling_mode")] if fields.has("pooling_mode") else []
    flags = {name: value for name, value in fields.values.items() if value is True}
    modes += [_FLAGS.get(name, name) for name in flags if name.startswith("pooling_mode_")]
    if len(modes) == 1 and modes[0] in _MODES:
        return _MODES[modes[0]], problem
    found = ", ".join(modes) or "none"
    return "last", problem or f"its pooling is {found}, not one of lasttoken and mean"


def _activation(fields: JsonFields) -> Activation | None:
    """The function that config.json applies to the logit of its classification head, as vLLM reads
    it. Raises StartupError for another number of labels than 1, or another function."""
    names = fields.value("architectures")
    if not (isinstance(names, list) and names and str(names[0]).endswith(CLASSIFIER)):
        return None
    number = fields.integer("num_labels", len(fields.object("id2label").values) or 2)
    if number != 1:
        raise fields.wrong("num_labels", f"{number}: only heads with 1 label, a score, are served")
    old = fields.text("sbert_ce_default_activation_function", "Sigmoid")
    name = fields.object("sentence_transformers").text("activation_fn", old)
    kind = name.rpartition(".")[2]
    if kind not in _ACTIVATIONS:
        raise fields.wrong("sentence_transformers.activation_fn", f"{name} is not supported")
    return _ACTIVATIONS[kind]


def _dimensions(fields: JsonFields) -> tuple[int, ...] | None:
    values: Any = fields.value("matryoshka_dimensions")
    if values is None:
        return None if fields.boolean("is_matryoshka", default=False) else ()
    if not isinstance(values, list) or not all(type(each) is int and each > 0 for each in values):
        raise fields.wrong("matryoshka_dimensions", f"{values!r} is not a list of numbers above 0")
    return tuple(values)
