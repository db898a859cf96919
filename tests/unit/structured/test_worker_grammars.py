"""The grammars that a worker keeps."""

from pathlib import Path

import pytest

from services.model.structured.structure import Structure, StructureKind
from services.model.structured.vocabulary import Vocabulary
from services.worker.grammars import Grammars
from tests.forms import EOS, VOCAB_SIZE, Forms


def test_the_vocabulary_is_read_once_and_before_the_first_form(
    forms: Forms, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def load(*_: object) -> Vocabulary:
        read.append(forms.vocabulary)
        return forms.vocabulary

    monkeypatch.setattr(Vocabulary, "load", load)
    grammars = Grammars(Path("model"), VOCAB_SIZE, [EOS])
    grammars.warm_up()
    grammars._thread.submit(lambda: None).result()
    assert len(read) == 1
    assert grammars.get(Structure(StructureKind.REGEX, "a")).compiled.result()
    assert len(read) == 1
