"""Hosts on this machine: namespaces of network, mounts, processes and names, each a cable away from a switch.

    host a (10.77.0.1) ----port---- switch ----port---- host b (10.77.0.2)

A cable is pulled at the switch, so that no host is told: what it sends is lost without a word, as on a real network.
All traffic stays in namespaces that are made here. Needs root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

SHELL = """
hostname "$1" && mount -t tmpfs tmpfs /dev/shm && mkdir -p /tmp/ray && mount --bind "$2" /tmp/ray && shift 2 &&
exec "$@"
"""
"""Its own name, shared memory and /tmp/ray, as another machine has."""


class HostsUnavailable(Exception):
    """Why there can be none here."""


class Hosts:
    """Named hosts, with a switch between them. HostsUnavailable where the system allows none."""

    def __init__(self, *names: str) -> None:
        self.addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}
        self._tag = f"lt{os.getpid()}"
        self._made: list[str] = []
        self._processes: list[subprocess.Popen[Any]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        if missing := [tool for tool in ("ip", "unshare", "mount") if shutil.which(tool) is None]:
            raise HostsUnavailable(f"needs {', '.join(missing)} (iproute2, util-linux)")
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        self._add("switch")
        switch = self._space("switch")
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for name, address in self.addresses.items():
            self._add(name)
            space = self._space(name)
            _ip("-n", switch, "link", "add", "name", name, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", switch, "link", "set", "dev", name, "master", "bridge", "up")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")

    def _space(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _add(self, name: str) -> None:
        _ip("netns", "add", self._space(name))
        self._made.append(name)

    def command(self, name: str, *command: str) -> list[str]:
        """That runs it on a host: with the first of its processes all others end."""
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        spaces = ["--mount", "--pid", "--uts", "--fork", "--kill-child=KILL", "--mount-proc"]
        inside = ["sh", "-c", SHELL, "sh", name, str(folder), *command]
        return ["ip", "netns", "exec", self._space(name), "unshare", *spaces, *inside]

    def start(self, name: str, *command: str, **options: Any) -> subprocess.Popen[Any]:
        process = subprocess.Popen(self.command(name, *command), **options)
        self._processes.append(process)
        return process

    def pull_cable(self, name: str) -> list[str]:
        """-> the command that does it; `plug_in` undoes it."""
        return ["ip", "-n", self._space("switch"), "link", "set", "dev", name, "down"]

    def plug_in(self, name: str) -> list[str]:
        return ["ip", "-n", self._space("switch"), "link", "set", "dev", name, "up"]

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
        for name in reversed(self._made):
            _ip("netns", "del", self._space(name))
        self._made.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise HostsUnavailable(f"ip {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")
