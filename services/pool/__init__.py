"""A KV pool on one host: a directory that all workers and the block manager open. No PyTorch here.

    <root>/host.lock                 serializes making, joining, leaving and removing pools
    <root>/<pool_id>/header.json     geometry and identity; replaced when a recovery begins
    <root>/keeper.sock               where the block manager keeps the memory of pools on GPUs
    <root>/<pool_id>/kv              the arena: num_blocks x block_bytes; not of a pool on a GPU
    <root>/<pool_id>/kv.1 ...        the arenas of further ranks: the same blocks, other KV heads
    <root>/<pool_id>/stamps          a stamp for each block
    <root>/<pool_id>/recovery.lock   held by the process that recovers the pool's ledger
    <root>/<pool_id>/gone            exists once the GPU with the arena is lost
    <root>/<pool_id>/workers/<worker_id>.lock    locked while that worker lives
    <root>/<pool_id>/workers/<worker_id>.process     the process of a worker on a GPU, or of a mover
    <root>/<pool_id>/workers/<worker_id>.finished    exists if it drops its lock and lives on

Names are never reused. Directories have mode 0700, files 0600.
"""
