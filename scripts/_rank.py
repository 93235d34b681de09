"""The program of a rank that _launch.py starts: a script, which ends with the process that started it.

    python _rank.py SCRIPT [ARGUMENT...]

Standard input is a pipe that only the launcher holds. SIGUSR1 makes it print where its threads are.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
import threading
from pathlib import Path


def _end_with_launcher() -> None:
    """Waits for the end of the pipe, then ends this process with all that it started."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
