"""Every path on real processes gives what it gives on one, and a job that hangs or loses a rank is ended and says whose
fault it was.

Jobs, the functions that take a Rank, run in processes that `processes.launch` starts.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from processes import PATHS, START_S, TESTS, RankFailure, launch

from jax_ep import CommConfig, MoEConfig, RouterConfig, init_params, make_mesh, moe, param_shardings

pytestmark = pytest.mark.slow

T, H, I, E, K, R = 32, 16, 24, 8, 2, 4
# name: CommConfig arguments
CASES = {
    "packed": dict(transport="all_to_all", recv_rows_factor=None),
    "rounds": dict(transport="all_to_all", recv_rows_factor=0.5),
    "ragged": dict(transport="ragged", recv_rows_factor=0.5),
    "padded": dict(mode="padded"),
    "allgather": dict(mode="allgather"),
    "dedup": dict(transport="all_to_all", dedup=True),
    "dedup_rounds_chunks": dict(transport="all_to_all", dedup=True, recv_rows_factor=0.5, num_chunks=2),
    "int8": dict(transport="all_to_all", wire_dtype="int8"),
    "expert_messages": dict(transport="all_to_all", messages="expert"),
}
ROUNDED = ("int8",)  # rows are rounded on the wire, so that dense differs
ROUTINGS = ("even", "skewed")
LAUNCHES = {"2x2": (2, 2), "4x1": (4, 1)}  # processes, devices of each
PARITY_S = 300


def config(comm):
    return MoEConfig(H, I, E, RouterConfig(K, logit_bias=True), comm=CommConfig(**comm))


def inputs(routing):
    """params, x, cotangent and mask, the same NumPy arrays in every process."""
    rng = np.random.default_rng(11)
    shapes = jax.eval_shape(lambda: init_params(config(dict(mode="dense")), jax.random.key(0)))
    params = jax.tree.map(lambda a: (rng.standard_normal(a.shape) / 4).astype(a.dtype), shapes)
    x, cotangent = rng.standard_normal((2, T, H)).astype("f4")
    mask = np.ones(T, bool)
    if routing == "skewed":
        params["router"]["bias"] = np.linspace(4, 0, E, dtype="f4")
        mask = rng.random(T) < 0.8
    return params, x, cotangent, mask


def compiled(lowered):
    """Without XLA's fusion emitters where they are an option: they take half of the compilation of such programs."""
    try:
        return lowered.compile({"xla_cpu_use_fusion_emitters": False})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return lowered.compile()


def evaluate(comm, mesh, report=lambda stage: None):
    """Values, stats and gradients of one layer over `mesh`, as {name: array}, of all routings."""
    cfg = config(comm)
    tokens = NamedSharding(mesh, P(("data", "expert")))
    whole = NamedSharding(mesh, P())
    params = param_shardings(cfg, mesh)

    @functools.partial(jax.jit, out_shardings=(tokens, whole, (params, tokens)))
    def run(params, x, cotangent, mask):
        def loss(params, x):
            y, stats = moe(params, x, cfg, mesh=mesh, token_mask=mask)
            return (y * cotangent).sum(), (y, stats)

        (_, (y, stats)), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return y, stats, grads

    results = {}
    for routing in ROUTINGS:
        put = lambda a, s: jax.make_array_from_callback(a.shape, s, lambda index: a[index])
        args = jax.tree.map(put, inputs(routing), (params, tokens, tokens, tokens))
        if not results:
            report("compile")
            program = compiled(run.lower(*args))
        report(f"run {routing}")
        y, stats, (d_params, d_x) = jax.block_until_ready(program(*args))
        named = {"y": y, "d_x": d_x, "stats": stats._asdict(), "d_params": d_params}
        leaves = jax.tree_util.tree_leaves_with_path(named)
        results |= {f"{routing}{jax.tree_util.keystr(path)}": leaf for path, leaf in leaves}
    return results


def parity(rank):
    """Job: saves what every case gives on this process' devices, each shard with where it starts."""
    mesh = make_mesh(R, devices=jax.devices())
    for case, comm in CASES.items():
        results = evaluate(comm, mesh, lambda stage, case=case: rank.report(f"{case}: {stage}"))
        shards = {
            f"{name}@{number}@{','.join(str(s.start or 0) for s in shard.index)}": np.asarray(shard.data)
            for name, array in results.items()
            for number, shard in enumerate(array.addressable_shards)
        }
        np.savez(Path(rank.folder) / f"{case}-{rank.index}.npz", **shards)


def assembled(files, like):
    """The whole arrays from the shards of all processes; what lies on several devices must be the same on all."""
    whole = {name: np.zeros(a.shape, a.dtype) for name, a in like.items()}
    there = {name: np.zeros(a.shape, bool) for name, a in like.items()}
    for file in files:
        with np.load(file) as shards:
            for key, shard in shards.items():
                name, _, starts = key.split("@")
                at = tuple(slice(int(s), int(s) + n) for s, n in zip(starts.split(",") if starts else (), shard.shape))
                again = there[name][at]
                np.testing.assert_array_equal(whole[name][at][again], shard[again], err_msg=f"replicas of {name}")
                whole[name][at], there[name][at] = shard, True
    assert all(t.all() for t in there.values()), "shards are missing"
    return whole


@functools.cache
def alone(case):
    """The case in this process, on simulated devices; on one device for "dense"."""
    if case == "dense":
        return evaluate(dict(mode="dense"), make_mesh(1))
    return evaluate(CASES[case], make_mesh(R))


def assert_close(got, want, tol, what):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.isfinite(got).all(), what
    error, scale = np.abs(got - want).max(), np.abs(want).max()
    assert error <= tol * scale, f"{what}: {error} > {tol} * {scale}"


def assert_same(got, want, *, exchange):
    """Values, gradients, stats; of the exchange as well, where both have the same one."""
    for name, array in want.items():
        if "rounds" in name or "wire_rows" in name:
            if exchange:
                assert int(got[name]) == int(array), name
        elif np.issubdtype(array.dtype, np.integer):
            np.testing.assert_array_equal(got[name], array, err_msg=name)
        else:
            assert_close(got[name], array, 1e-4 if "d_" in name else 1e-5, name)


@pytest.fixture(scope="module", params=LAUNCHES)
def files(request, tmp_path_factory):
    """files(case): what the processes of a launch saved. It runs all cases, once."""
    processes, devices = LAUNCHES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    launch("test_processes:parity", processes, devices, PARITY_S, folder)
    return lambda case: [folder / f"{case}-{index}.npz" for index in range(processes)]


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(files, case):
    got = assembled(files(case), alone(case))
    assert_same(got, alone(case), exchange=True)
    if case not in ROUNDED:
        assert_same(got, alone("dense"), exchange=False)
    rounds = [int(got[f"{routing}['stats']['rounds']"]) for routing in ROUTINGS]
    if case == "packed":
        assert rounds == [1, 1]
    if CASES[case].get("recv_rows_factor") == 0.5:
        assert rounds[1] > 1


def stumble(rank, culprit, how):
    """Job: the culprit does not enter a collective, and each rank has a child of its own."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (Path(rank.folder) / f"{rank.index}.pids").write_text(f"{os.getpid()} {child.pid}\n")
    multihost_utils.sync_global_devices("written")
    rank.report("before the collective")
    if rank.index == culprit:
        print("about to stumble")
        {
            "sleep": lambda: time.sleep(600),
            "exit": lambda: os._exit(3),
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "raise": lambda: int("on purpose"),
        }[how]()
    rank.report("in the collective")
    multihost_utils.process_allgather(np.ones(1))


def remaining(folder):
    """Processes of `stumble` that are there after some seconds; dead ones that nobody has waited for are not."""

    def there(pid):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        return True

    pids = [int(pid) for file in folder.glob("*.pids") for pid in file.read_text().split()]
    assert len(pids) == 4, pids
    end = time.monotonic() + 10
    while any(map(there, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return [pid for pid in pids if there(pid)]


HANG_S = 6
STUMBLES = {
    "sleep": (1, [f"not done {HANG_S} s after", "is silent since stage 5 'before the collective'", "in stumble"]),
    "exit": (1, ["exited with code 3 in stage 5 'before the collective'", "about to stumble"]),
    "kill": (0, ["was killed by SIGKILL in stage 5 'before the collective'", "about to stumble"]),  # the coordinator
    "raise": (1, ["raised ValueError: invalid literal for int()", "in stage 5 'before the collective'", "Traceback"]),
}


@pytest.mark.parametrize("how", STUMBLES)
def test_names_the_rank_at_fault_and_leaves_no_process(how, tmp_path):
    culprit, words = STUMBLES[how]
    with pytest.raises(RankFailure) as caught:
        launch("test_processes:stumble", 2, 1, HANG_S if how == "sleep" else 200, tmp_path, culprit=culprit, how=how)
    ended = time.monotonic()
    assert remaining(tmp_path) == []
    assert caught.value.ranks == [culprit]
    message = str(caught.value)
    for word in (f"rank {culprit} is at fault", *words):
        assert word in message, message
    met = [json.loads((tmp_path / f"rank{i}.reports").read_text().splitlines()[3])["at"] for i in range(2)]
    assert ended - max(met) < 30


@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL"])
def test_no_process_outlives_an_interrupted_test(how, tmp_path):
    program = f"""
import pathlib, processes
processes.launch("test_processes:stumble", 2, 1, 300, pathlib.Path({str(tmp_path)!r}), culprit=1, how="sleep")
"""
    path = os.pathsep.join([PATHS["PYTHONPATH"], str(TESTS)])
    test = subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.DEVNULL
    )
    try:
        reports = [tmp_path / f"rank{i}.reports" for i in range(2)]
        end = time.monotonic() + START_S
        while not all(file.exists() and "before the collective" in file.read_text() for file in reports):
            assert test.poll() is None and time.monotonic() < end, "the ranks did not start"
            time.sleep(0.05)
        test.send_signal(getattr(signal, how))
        assert test.wait(30) != 0
    finally:
        test.kill()
        test.wait()
    assert remaining(tmp_path) == []
