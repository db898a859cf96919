"""Tensor parallelism: several processes, the ranks of a worker, compute each step together.

    rank 0      engine, scheduler, stamps | Runner -> SharedSteps --calls--> its own shard ──┐
    rank 1..    `follow`: executes each call ------------------------------> its own shard ──┤
                                                 sums of partial outputs (`Collectives`) ────┘

Every rank has a shard of the weights, and an arena with its KV heads of the same blocks. All ranks
execute the same methods (`rank.Rank`) on the same batch, which rank 0 broadcasts.
"""
