"""The table of docs/sizing.md has the real sizes of a pool."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.pool.layout import KVDtype, PoolLayout

SIZING = Path(__file__).parents[2] / "docs" / "sizing.md"
NUMBER = r" ([\d,.]+)(?: KiB)? \|"
ROW = re.compile(rf"^\| (.+?) \|{NUMBER * 6}$", re.MULTILINE)


def layout(num_layers: int, num_kv_heads: int, head_dim: int, dtype: KVDtype) -> PoolLayout:
    return PoolLayout("", "", num_layers, num_kv_heads, head_dim, dtype, block_size=16)


@pytest.mark.parametrize("row", ROW.findall(SIZING.read_text()), ids=lambda row: row[0])
def test_row_of_the_sizing_table_agrees_with_the_pools_layout(row: tuple[str, ...]) -> None:
    shape = (int(row[1]), int(row[2]), int(row[3]))
    in_bf16 = layout(*shape, "bfloat16").block_bytes / 16
    in_int8 = layout(*shape, "int8").block_bytes / 16
    assert [float(row[4]), float(row[5])] == [in_bf16 / 1024, in_int8 / 1024]
    assert int(row[6].replace(",", "")) == int(2**30 // in_bf16)


def test_sizing_table_has_rows() -> None:
    assert len(ROW.findall(SIZING.read_text())) >= 10
