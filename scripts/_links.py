"""Links of a chosen rate between processes of one machine: network namespaces joined by a bridge. Needs Linux, root and
iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from _common import UsageError

NETWORK = "10.77.0"
_HOSTS = Path("/etc/netns")  # a folder here is laid over /etc by `ip netns exec`


def address(index: int) -> str:
    """Of a rank."""
    return f"{NETWORK}.{index + 1}"


@contextlib.contextmanager
def links(count: int, rate: str) -> Iterator[str]:
    """Namespaces PREFIX0, PREFIX1, ... with `address(0)`, ..., each of which sends at `rate` at most ("500mbit"). Gone
    when the block ends.

    Yields:
      PREFIX.

    Raises:
      UsageError: this machine or user may not make them, or there is no such rate.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise UsageError(f"rate={rate}: links need {tool} of iproute2; without --rate it works, over loopback")
    prefix = f"ep{os.getpid()}x"
    bridge = f"{prefix}br"
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for index in range(count):
            name, here = f"{prefix}{index}", f"{prefix}v{index}"
            inside = ("ip", "netns", "exec", name)
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", here, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", here, "master", bridge, "up")
            _run(*inside, "ip", "address", "add", f"{address(index)}/24", "dev", "eth0")
            _run(*inside, "ip", "link", "set", "eth0", "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
            _run(*inside, "tc", "qdisc", "add", "dev", "eth0", *f"root tbf rate {rate} burst 1mb latency 100ms".split())
            folder = _HOSTS / name  # Gloo listens on what the machine's name stands for
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"{address(index)} {socket.gethostname()}\n127.0.0.1 localhost\n")
        yield prefix
    finally:
        for index in range(count):
            subprocess.run(["ip", "netns", "delete", f"{prefix}{index}"], capture_output=True)
            shutil.rmtree(_HOSTS / f"{prefix}{index}", ignore_errors=True)
        subprocess.run(["ip", "link", "delete", bridge], capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        rule = f"links between network namespaces: {' '.join(command)}: {said}"
        raise UsageError(f"{rule}; --rate 500mbit as root works, and so does leaving --rate out, over loopback")
