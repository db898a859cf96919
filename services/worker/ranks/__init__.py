"""The processes of a worker of several ranks. When a rank ends, the whole worker ends.

supervisor -> rank 0, `services.worker` -> rank 1.., this package
"""
