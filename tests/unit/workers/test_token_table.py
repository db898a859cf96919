"""The token table of a device: which sequence has which entry of it."""

import numpy as np
import pytest
import torch

from services.engine.batch import Draw, Owner, Row
from services.engine.device.token_table import TokenTable
from services.engine.sampling.sampling_batch import SamplingBatch

from .fakes import GREEDY

DRAW = Draw(GREEDY, 0)


def row(owner: Owner | None, num_on_device: int = 0) -> Row:
    return Row((7,), 0, (0,), draws=(DRAW,), owner=owner, num_on_device=num_on_device)


def draw(table: TokenTable, owners: list[Owner], token: int, position: int) -> None:
    """One step draws this token for all of these sequences."""
    arrays = table.draw_places(SamplingBatch.of([row(owner) for owner in owners]))
    placed = {name: torch.from_numpy(array) for name, array in arrays.items()}
    number = len(owners)
    table.write(placed, torch.full((number,), position), torch.full((number,), token))


def known(table: TokenTable, owner: Owner | None, position: int) -> int:
    """The token at this position, as the next step reads it."""
    places = table.read_places([row(owner, 1)], np.array([2]))
    placed = {name: torch.from_numpy(array) for name, array in places.items()}
    placed |= {"positions": torch.tensor([0, position]), "token_ids": torch.zeros(2).long()}
    table.read(placed)
    return int(placed["token_ids"][1])


def test_sequences_keep_their_entries_while_the_table_grows() -> None:
    table, owners = TokenTable(torch.device("cpu")), [Owner() for _ in range(200)]
    for number, owner in enumerate(owners):
        draw(table, [owner], 1000 + number, 5)
    draw(table, list(owners), 9, 6)
    assert [known(table, owner, 5) for owner in owners] == list(range(1000, 1200))
    assert {known(table, owner, 6) for owner in owners} == {9}


def test_the_entry_of_a_sequence_that_is_gone_is_free_again() -> None:
    table, kept = TokenTable(torch.device("cpu")), Owner()
    draw(table, [kept], 3, 5)
    for number in range(300):
        draw(table, [Owner()], number, 5)
    assert len(table._tokens) < 100
    assert known(table, kept, 5) == 3


def test_a_token_that_no_step_has_drawn_is_refused() -> None:
    """The engine would be wrong to launch such a row: its token would be another sequence's."""
    table = TokenTable(torch.device("cpu"))
    draw(table, [Owner()], 3, 5)
    for owner in (Owner(), None):
        with pytest.raises(ValueError, match="no step has drawn"):
            known(table, owner, 5)


def test_draws_of_several_sequences_after_one_token_belong_to_none() -> None:
    """These sequences part there, so the host knows the tokens before their next step."""
    table, owner = TokenTable(torch.device("cpu")), Owner()
    shared = Row((7,), 0, (0,), draws=(DRAW, DRAW), owner=owner)
    assert table.draw_places(SamplingBatch.of([shared]))["draw_entries"].tolist() == [0, 0]
