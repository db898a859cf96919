"""Operations on paged KV caches, behind one interface for every device.

    ops = kvops.backend("cpu")
    ops.store_kv(kv[:, layer], k, v, slot_mapping)
    out = ops.paged_attention(q, kv[:, layer], block_tables, cu_query_lens, context_lens, scale,
                              max_query_len=longest)

`ops.py` defines what each operation does; `kernels.py` is the interface that a device implements.
"""

from kvops.attention.choice import ATTENTION, choose_attention
from kvops.backend import BACKENDS, BackendUnavailable, backend
from kvops.ops import Backend
from kvops.step import AttentionShape

__all__ = [
    "ATTENTION",
    "BACKENDS",
    "AttentionShape",
    "Backend",
    "BackendUnavailable",
    "backend",
    "choose_attention",
]
