"""The processes of a worker of several ranks. A rank that ends, ends the whole worker.

supervisor -> rank 0, `services.worker` -> rank 1.., this package
"""
