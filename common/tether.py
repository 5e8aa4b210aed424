"""Run a program that dies with its parent: `python tether.py PARENT_PID PROGRAM ARGS...`.

A program of its own, run between fork and exec of every child, so that no Python code runs in a forked
copy of a process with threads. Imports nothing of ours, to start in milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Ask the kernel for SIGKILL when the parent dies, then become the program."""
    parent, *program = arguments
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(parent):
            sys.exit("the parent died before its child started")
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
