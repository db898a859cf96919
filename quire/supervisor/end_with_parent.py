"""Runs a program that ends with its parent: `python end_with_parent.py PARENT_PID PROGRAM ARGS...`

For programs that do not watch the supervisor's pipe (Valkey). The kernel sends SIGKILL when the
thread that started this process dies (PR_SET_PDEATHSIG), also after exec, so no extra process
stays. The supervisor starts it as a file, so it imports only the standard library.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent):
        sys.exit("the parent died before it was watched")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
