"""A pool on two hosts, as far as network namespaces make them, and the link between them cut: work goes on on the
reachable side, nothing is lost and nothing comes twice, and the other host takes work again when the link is back."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install 'longtail[ray]'")

from tests.partial_rollout.pool_helpers import collect_all
from tests.ray import parted
from tests.ray.hosts import Hosts, HostsUnavailable

from longtail import NativeEngine, Rollout
from longtail.partial_rollout.engines.simulated.engine import SimulatedEngine


@pytest.fixture(scope="module")
def results(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Of the plans of `parted`: Ray's head and the trainer are on host a; on host b a node of Ray is started again
    whenever it ends, as by a service manager."""
    folder = tmp_path_factory.mktemp("parted")
    try:
        hosts = Hosts("a", "b")
    except HostsUnavailable as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    with hosts:
        config = {
            "ip": hosts.addresses["a"],
            "address": str(folder / "address"),
            "results": str(folder / "results"),
            "model": str(model_directory),
            "pull_cable": hosts.pull_cable("b"),
            "plug_in": hosts.plug_in("b"),
        }
        (folder / "config").write_text(json.dumps(config))
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        env = os.environ | token | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        ray = shlex.quote(str(Path(sys.executable).with_name("ray")))
        start = [ray, "start", "--address", "$(cat address)", "--node-ip-address", hosts.addresses["b"], "--block"]
        start += ["--num-cpus", "4", "--object-store-memory", str(128 << 20), "--disable-usage-stats"]
        start += ["--resources", shlex.quote('{"place": 1}')]
        node = f"cd {folder}; until [ -s address ]; do sleep 0.1; done; while true; do {' '.join(start)}; done"
        with (folder / "node").open("wb") as output, (folder / "trainer").open("wb") as errors:
            hosts.start("b", "bash", "-c", node, env=env, stdout=output, stderr=subprocess.STDOUT)
            trainer = hosts.start("a", sys.executable, parted.__file__, str(folder / "config"), env=env, stderr=errors)
            try:
                code = trainer.wait(timeout=400)
            except subprocess.TimeoutExpired:
                code = -1
        told = "\n".join((folder / name).read_text(errors="replace")[-3000:] for name in ("node", "trainer"))
        assert code == 0, told
    yield json.loads((folder / "results").read_text())


def same(found: dict[str, Any], engine: Any, *work: Any) -> None:
    """The bits of one engine that nobody disturbs; as many samples."""
    wanted = collect_all(Rollout(engine), [group for groups in work for group in groups])
    assert found.keys() == wanted.keys()
    for name, sample in wanted.items():
        assert found[name] == json.loads(json.dumps(parted.record(sample))), name


def balanced(found: dict[str, Any]) -> None:
    ledger = found["ledger"]
    assert ledger["pending"] == 0 and ledger["generated"] == ledger["made"]


def after(found: dict[str, Any], name: str, engine: Any) -> None:
    """Both hosts have work again, and it is right."""
    same(found["after"]["samples"], engine, parted.groups(name, 4, (10,)))
    assert all(found["after"]["tokens"][host] > 0 for host in "ab")


def test_a_short_cut(results: dict[str, Any]) -> None:
    """The reachable engine works, and takes what is submitted meanwhile; the other one goes on where it was."""
    found = results["short"]
    same(found["samples"], SimulatedEngine(slots=8), parted.groups("short"), parted.groups("during", 2))
    balanced(found)
    assert found["failures"] == []
    assert found["beside"] >= parted.BESIDE and found["across"] <= 1  # a reply may have been on its way
    after(found, "after-short", SimulatedEngine(slots=8))


def test_a_cut_longer_than_the_deadline(results: dict[str, Any]) -> None:
    """The samples behind it go on on the reachable side; another engine takes the lost one's place on its host."""
    found = results["long"]
    same(found["samples"], SimulatedEngine(slots=8), parted.groups("long"), parted.groups("during", 2))
    balanced(found)
    assert f"{found['far']}: hangs: step has taken more than 3 s" in found["failures"]
    assert found["beside"] >= parted.BESIDE and found["across"] <= 1
    after(found, "after-long", SimulatedEngine(slots=8))


def test_a_cut_until_the_node_is_dead(results: dict[str, Any], model: Any) -> None:
    """Native engines. Ray ends the node when the link is back, and it joins as another one."""
    found = results["dead"]
    engine = NativeEngine(model, kv_cache_bytes=4 << 20, max_num_seqs=8, threads=1)
    same(found["samples"], engine, parted.groups("dead"))
    balanced(found)
    assert any(why.startswith(f"{found['far']}: ActorDiedError") for why in found["failures"])
    assert found["beside"] >= parted.BESIDE and found["across"] <= 1
    after(found, "after-dead", engine)


def test_saved_kv_behind_a_cut(results: dict[str, Any]) -> None:
    """It does not come; who waits for it is not given up, and what it was for is computed again."""
    found = results["saved"]
    same(found["samples"], SimulatedEngine(slots=8), parted.groups("saved", 4, (90,)))
    assert found["failures"] == []
    assert found["behind"] and sorted(found["refused"]) == sorted(found["behind"])
    after(found, "after-saved", SimulatedEngine(slots=8))
