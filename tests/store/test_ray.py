"""A Ray cluster of three nodes on this machine: the same bytes as in one process, also when a node is killed in the middle."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fewbits import embedded, pipeline
from fewbits.errors import MissingError
from fewbits.store import cache, executors
from fewbits.store.cache import SHARDS

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before Ray is loaded
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # with it, processes that Ray 2.60 starts die now and then with signal 6
pytest.importorskip("ray", reason="pip install 'fewbits[ray]'")

import ray
from ray.cluster_utils import Cluster
from watching import children, killing, noting

OPTIONS: dict[str, Any] = {
    "size": "5bpw",
    "formats": ("int4_g32", "int8_channel"),
    "samples": 4,
    "length": 64,
    "method": "rtn",
    "no_verify": True,
}
BUSY = ("ray::row", "ray::weight")  # as Ray calls a process that has a unit
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def port() -> int:
    """Of the client server: one that is free now."""
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return int(some.getsockname()[1])


@pytest.fixture(scope="module")
def cluster(port: int) -> Iterator[Cluster]:
    cache.code_version()
    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "ray_client_server_port": port})
    for _ in range(2):
        made.add_node(**NODE)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return quantized(tmp_path_factory.mktemp("alone") / "m.gguf")


def quantized(out: Path, **more: Any) -> dict[str, bytes]:
    """The file and every unit's result."""
    pipeline.quantize(embedded.MODEL, out, **OPTIONS | more)
    results = out.with_name(f"{out.name}.work") / "cache"
    files = [out, *(path for step in ("row", "weight") for path in results.glob(f"{step}-*"))]
    return {path.name: path.read_bytes() for path in files}


def kill_a_busy_node(cluster: Cluster, busy: Callable[[str], bool] = lambda title: title.startswith(BUSY)) -> bool:
    """Without warning, with a unit on it. The unit's process is stopped first, so that it cannot finish in the node's last moments.
    `busy`: whether a process of this title has come as far as it should."""
    for node in cluster.worker_nodes:
        raylet = node.all_processes["raylet"][0].process.pid
        for worker, title in children(raylet).items():
            if busy(title):
                os.kill(worker, signal.SIGSTOP)
                if busy(children(raylet).get(worker, "")):
                    cluster.remove_node(node, allow_graceful=False)
                    os.kill(worker, signal.SIGKILL)
                    return True
                os.kill(worker, signal.SIGCONT)
    return False


@pytest.mark.slow
def test_through_its_client_port_and_a_store(
    cluster: Cluster, port: int, alone: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert cluster.head_node is not None
    store = tmp_path / "store"
    assert quantized(tmp_path / "m.gguf", executor=f"ray://127.0.0.1:{port}", store=f"file://{store}") == alone
    assert not [path for path in store.rglob("*") if path.is_file()]


@pytest.mark.slow
def test_a_unit_that_no_node_can_run_is_refused(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait forever."""
    from fewbits.store.executors.ray import Ray, _room

    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    carrier = Ray(None)
    try:
        assert _room(1) == sum(int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"])
        with pytest.raises(MissingError, match="takes 64 processors") as caught:
            _room(64)
        assert "OMP_NUM_THREADS=1" in caught.value.hint
    finally:
        carrier.close()
    assert not ray.is_initialized()


@pytest.mark.slow
def test_a_node_killed_in_the_middle_changes_nothing(
    cluster: Cluster, alone: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    notes: list[str] = []
    with killing(tmp_path / "m.gguf.work" / "cache", "row-*", 6, lambda: kill_a_busy_node(cluster)) as killed:
        made = quantized(tmp_path / "m.gguf", executor="ray", progress=noting(notes))
    weights = sum(name.startswith("weight-") for name in alone)
    assert killed and killed[0] < weights, "it was killed before the rows were done"
    assert any("is done again" in note for note in notes), "a unit was lost with it"
    assert made == alone
    each = Counter(name.rpartition("-")[0] for name in made if name.startswith(("row-", "weight-")))
    assert len(each) == 2 * weights and set(each.values()) == {1}, "each unit once"


@pytest.mark.slow
def test_a_node_killed_while_it_calibrates_a_shard_changes_nothing(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two shards on two nodes, and error feedback, which depends on every bit of the statistics."""
    more: dict[str, Any] = {"shards": 2, "samples": 8, "length": 256, "method": "gptq"}
    expected = quantized(tmp_path / "alone" / "m.gguf", **more)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    while len(cluster.worker_nodes) < 2:  # an earlier test killed one
        cluster.add_node(**NODE)
    work, notes, lost = tmp_path / "m.gguf.work", list[str](), list[str]()

    def in_the_middle(title: str) -> bool:
        """The first half of its blocks were taken forward, and not one backward."""
        found = re.match(r"ray::shard (\d) of 2", title)
        if found is None:
            return False
        done = Counter(path.name.partition("-")[0] for path in (work / SHARDS / f"{found[1]}-of-2").rglob("*-*.safetensors"))
        lost[:] = [found[1]]
        return done["input"] >= 2 and not done["gradient"]

    with killing(work, "*", 0, lambda: kill_a_busy_node(cluster, in_the_middle)) as killed:
        made = quantized(tmp_path / "m.gguf", executor="ray", progress=noting(notes), **more)
    assert killed, "none was seen in the middle of a shard"
    assert any(f"`shard {lost[0]} of 2` is done again" in note for note in notes)
    assert made == expected


def test_a_cluster_that_does_not_answer_is_said_before_the_work() -> None:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))  # bound, and nobody listens
        chosen = executors.parse(f"ray://127.0.0.1:{some.getsockname()[1]}")
        with pytest.raises(MissingError, match="no Ray cluster answers") as caught:
            executors._carrier(chosen)
    assert "ray status" in caught.value.hint
