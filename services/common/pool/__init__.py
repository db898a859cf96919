"""A KV pool on one host: a directory that all workers and the block manager open. No PyTorch here.

    <root>/host.lock                 serializes making, joining, leaving and removing pools
    <root>/<pool_id>/header.json     geometry and identity; replaced when a recovery begins
    <root>/<pool_id>/kv              the arena: num_blocks x block_bytes
    <root>/<pool_id>/stamps          a stamp for each block
    <root>/<pool_id>/recovery.lock   held by the process that recovers the pool's ledger
    <root>/<pool_id>/workers/<worker_id>.lock    locked while that worker lives

Names are never reused. Directories have mode 0700, files 0600.
"""
