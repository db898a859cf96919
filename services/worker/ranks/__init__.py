"""The processes of a worker of several ranks. A rank that ends, ends the whole worker.

supervisor -> rank 0, `services.prefill` or `services.decode` -> rank 1.., this package
"""
