"""Tensor parallelism: several processes, the ranks of a worker, compute each step together.

    rank 0      engine, scheduler, stamps | Runner -> LeadModel --tells--> its own shard ──┐
    rank 1..    `follow`: receives each call ------------------------------> its shard ────┤
                                                      sums of partial outputs (Collectives) ┘

Every rank has a shard of the weights, and an arena with its KV heads of the same blocks.
"""
