"""Asks the kernel to interleave memory over NUMA nodes.

Memory that one node uses needs no call: the kernel places a page on the node of the thread that
touches it first, and a worker's threads are bound to its node. Only memory that several nodes use
is interleaved, so that all memory controllers serve it.

A kernel that refuses (containers without CAP_SYS_NICE have no such calls) changes no result: the
pages are then where they are touched first. The refusal is logged once.
"""

import ctypes
import mmap
import os
import platform
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from services.runtime.logging import get_logger

log = get_logger(__name__)

_CALLS = {"x86_64": (237, 238), "aarch64": (235, 237)}
"""The numbers of mbind and set_mempolicy."""

_MBIND, _SET_MEMPOLICY = _CALLS.get(platform.machine(), (-1, -1))
_DEFAULT, _INTERLEAVE = 0, 3
_MASK_BITS = 1024

SystemCall = Callable[..., int]
"""Takes the call's number and arguments; returns 0, or the errno of the refusal."""

_libc = ctypes.CDLL(None, use_errno=True)


def _system_call(number: int, *arguments: object) -> int:
    return 0 if _libc.syscall(ctypes.c_long(number), *arguments) == 0 else ctypes.get_errno()


class InterleavePolicy:
    """Interleaves memory over `node_ids`; over fewer than two it makes no call."""

    def __init__(self, node_ids: Collection[int] = (), call: SystemCall = _system_call) -> None:
        self.node_ids = tuple(node_ids)
        self._call = call
        self._is_refused = len(self.node_ids) < 2

    def interleave_file(self, fd: int, num_bytes: int) -> None:
        """Interleave the pages of a tmpfs file that are allocated from now on, by any process."""
        if self._is_refused:
            return
        with mmap.mmap(fd, num_bytes) as mapped:
            start = ctypes.c_char.from_buffer(mapped)
            address = ctypes.addressof(start)
            self._ask(
                "mbind", _MBIND, ctypes.c_void_p(address), ctypes.c_ulong(num_bytes), _INTERLEAVE
            )
            del start  # an exported buffer would keep the mapping open

    @contextmanager
    def interleaved(self) -> Iterator[None]:
        """Interleave what this thread allocates or reads from files within the `with` block."""
        if self._is_refused:
            yield
            return
        self._ask("set_mempolicy", _SET_MEMPOLICY, _INTERLEAVE)
        try:
            yield
        finally:
            self._call(_SET_MEMPOLICY, _DEFAULT, None, ctypes.c_ulong(0))

    def _ask(self, name: str, number: int, *arguments: object) -> None:
        mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
        for node_id in self.node_ids:
            mask[node_id // 64] |= 1 << node_id % 64
        rest = (ctypes.c_uint(0),) if name == "mbind" else ()
        # The kernel reads one bit less than it is told.
        code = self._call(number, *arguments, mask, ctypes.c_ulong(_MASK_BITS + 1), *rest)
        if code:
            self._is_refused = True
            log.warning(
                "memory_not_interleaved",
                call=name,
                nodes=list(self.node_ids),
                reason=os.strerror(code),
            )
