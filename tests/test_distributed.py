"""Processes find out from the environment that they are several, and meet, or say who is missing."""

import contextlib
import os
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from _launch import free_port
from jax_ep.config import ConfigError
from jax_ep.distributed import ADDRESS, COUNT, INDEX, Job, JoinError, Watchdog, job_of, join, meet

# Who is there, by the environment.

PLAIN = {ADDRESS: "10.0.0.1:1234", COUNT: "4", INDEX: "2"}
SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_NODELIST": "gpu[007-009,012],other1",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


@pytest.mark.parametrize(
    ("variables", "want"),
    [
        ({}, None),
        (PLAIN, Job("10.0.0.1:1234", 4, 2, "deactivate")),
        (PLAIN | {ADDRESS: "[::1]:1234"}, Job("[::1]:1234", 4, 2, "deactivate")),
        (PLAIN | {COUNT: "1", INDEX: "0"}, None),
        (SLURM, Job("gpu007:62344", 8, 3, "slurm")),
        (SLURM | {"SLURM_STEP_NODELIST": "one"}, Job("one:62344", 8, 3, "slurm")),
        (SLURM | {"SLURM_STEP_NODELIST": "n-1,n-2"}, Job("n-1:62344", 8, 3, "slurm")),
        (SLURM | {"JAX_COORDINATOR_PORT": "99"}, Job("gpu007:99", 8, 3, "slurm")),
        (SLURM | {ADDRESS: "a:1"}, Job("a:1", 8, 3, "slurm")),
        (SLURM | {"SLURM_NTASKS": "1"} | PLAIN, Job("10.0.0.1:1234", 4, 2, "deactivate")),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}, None),  # in sbatch's script, outside srun
    ],
)
def test_the_environment_says_who_is_there(variables, want):
    assert job_of(variables | {"HOME": "/"}) == want


def test_slurm_is_read_as_jax_reads_it(monkeypatch):
    from jax._src.clusters.slurm_cluster import SlurmCluster

    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    for nodes in ("gpu[007-009,012],other1", "one", "n-1,n-2", "a[1,3]", "b10,c[1-2]"):
        monkeypatch.setenv("SLURM_STEP_NODELIST", nodes)
        assert SlurmCluster.is_env_present()
        assert job_of(os.environ).address == SlurmCluster.get_coordinator_address(1, None)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({INDEX: None}, f"{INDEX}=None: must be set where {ADDRESS} and {COUNT} are; {INDEX}='0' works"),
        ({INDEX: "", COUNT: ""}, f"{COUNT}=None: must be set where {ADDRESS} is"),
        ({ADDRESS: None}, f"{ADDRESS}=None: must be set where"),
        ({COUNT: "two"}, f"{COUNT}='two': must be an integer"),
        ({COUNT: "0"}, f"{COUNT}=0: must be at least 1"),
        ({INDEX: "4"}, f"{INDEX}=4: must be from 0 to {COUNT} - 1, which is 3; {INDEX}=3 works"),
        ({INDEX: "-1"}, f"{INDEX}=-1: must be from 0"),
        ({ADDRESS: "10.0.0.1"}, "must be \"host:port\"; JAX_COORDINATOR_ADDRESS='10.0.0.1:12345' works"),
    ],
)
def test_half_an_environment_is_refused(monkeypatch, changed, words):
    for name in (*PLAIN, *SLURM):
        monkeypatch.delenv(name, raising=False)
    for name, value in (PLAIN | changed).items():
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        join()
    assert words in str(caught.value)


def test_one_process_joins_nobody(monkeypatch, tmp_path):
    for name in (*PLAIN, *SLURM):
        monkeypatch.delenv(name, raising=False)
    join()
    assert not jax.distributed.is_initialized()
    with Watchdog(tmp_path / "run") as watchdog:
        watchdog.beat("step 1")
    assert list(tmp_path.iterdir()) == []
    for deadline in (0, 2.9, 3001, float("nan")):
        with pytest.raises(ConfigError, match=r"deadline=.*must be from 3 to 3000 seconds; deadline=300.0 works"):
            Watchdog(tmp_path, deadline)


# The roll call.


def meetings(port, ranks, wait):
    """What `meet` says in each rank, a thread each; ranks as (index, count). A job's name as "met ..."."""

    def one(rank):
        try:
            name = meet(Job(f"127.0.0.1:{port}", rank[1], rank[0], "deactivate"), wait)
        except JoinError as error:
            return str(error)
        if rank[0] == 0:  # as JAX' coordinator would
            server = socket.create_server(("127.0.0.1", port))
            threading.Timer(1, server.close).start()
        return f"met {name}"

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def test_all_meet():
    begun = time.monotonic()
    said = meetings(free_port(), [(2, 4), (0, 4), (1, 4), (3, 4)], 20)
    assert time.monotonic() - begun < 5
    assert said == said[:1] * 4 and re.fullmatch("met [0-9a-f]{8}", said[0])
    assert meetings(free_port(), [(0, 2), (1, 2)], 20)[0] != said[0]  # another job


def test_a_missing_rank_is_named_in_all_others():
    said = meetings(free_port(), [(1, 5), (0, 5), (4, 5)], 1)
    assert said == ["3 of 5 processes joined in 1 s; rank 2, rank 3 are missing"] * 3


def test_a_missing_first_rank_is_named():
    port = free_port()
    (said,) = meetings(port, [(1, 2)], 0.5)
    assert "rank 1 of 2 asked rank 0 at" in said and f"127.0.0.1:{port}" in said and "refused" in said


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([(0, 4), (1, 4), (1, 4)], "JAX_PROCESS_ID=1: two processes say so; each needs another one, from 0 to 3"),
        ([(0, 4), (1, 3)], "JAX_NUM_PROCESSES=3 in rank 1 and 4 in rank 0: must be the same in all processes"),
    ],
)
def test_ranks_that_contradict_each_other_are_told(ranks, words):
    begun = time.monotonic()
    assert meetings(free_port(), ranks, 20) == [words] * len(ranks)
    assert time.monotonic() - begun < 5


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        (said,) = meetings(server.getsockname()[1], [(0, 2)], 1)
    assert "rank 0 cannot listen there" in said and "another port works" in said


def test_strangers_at_the_door_do_not_count():
    port, told = free_port(), threading.Event()

    def knock(text):
        while not told.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as peer:
                peer.sendall(text)
                told.wait()  # one that says nothing waits, too
            time.sleep(0.02)

    strangers = [threading.Thread(target=knock, args=(text,)) for text in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\n", b"")]
    for stranger in strangers:
        stranger.start()
    said = meetings(port, [(0, 3), (1, 3)], 4)
    told.set()
    for stranger in strangers:
        stranger.join()
    assert said == ["2 of 3 processes joined in 4 s; rank 2 is missing"] * 2
