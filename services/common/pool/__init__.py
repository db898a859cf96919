"""A KV pool on one host: a directory that every worker and the block manager open (no torch here).

    <root>/host.lock              serializes making, joining, leaving and removing pools
    <root>/<pool_id>/header.json  what the pool is; written once, before the directory appears
    <root>/<pool_id>/kv           the arena: num_blocks x block_bytes
    <root>/<pool_id>/stamps       what each block holds
    <root>/<pool_id>/workers/<worker_id>.lock    locked while that worker lives

Names are never reused. Directories are 0700, files 0600.
"""
