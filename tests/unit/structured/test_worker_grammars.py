"""The grammars that a worker keeps."""

from pathlib import Path

from bench.make_checkpoint import make_checkpoint
from services.model.checkpoint.reading import read_model_config
from services.model.structured.structure import Structure, StructureKind
from services.worker.grammars import Grammars


def test_the_vocabulary_is_read_once_and_before_the_first_form(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model")
    config = read_model_config(directory)
    grammars = Grammars(directory, config.vocab_size, config.eos_token_ids)
    grammars.warm_up()
    grammars._thread.submit(lambda: None).result()
    (directory / "tokenizer.json").unlink()
    assert grammars.get(Structure(StructureKind.REGEX, "a")).compiled.result()
