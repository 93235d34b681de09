"""Goes on as another program inside a network namespace of `_links.links`: that of this process' rank.

    python _netns.py PREFIX RANK_0_ADDRESS SCRIPT [ARGUMENT...]

The process stays the same, and with it the pipe by which it ends with its launcher.
"""

from __future__ import annotations

import os
import sys

from _launch import PROGRAM
from jax_ep.distributed import ADDRESS, INDEX

if __name__ == "__main__":
    prefix, host, *command = sys.argv[1:]
    port = os.environ[ADDRESS].rpartition(":")[2]
    os.environ[ADDRESS] = f"{host}:{port}"
    rank = [sys.executable, "-u", str(PROGRAM), *command]
    os.execvp("ip", ["ip", "netns", "exec", f"{prefix}{os.environ[INDEX]}", *rank])
