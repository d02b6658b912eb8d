"""A control group around a sandbox, where this process may make one (version 1 or 2): the kernel then keeps the limits
on memory and processes of all of it together. Elsewhere there is none, and the sandbox's own limits remain."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_numbers = itertools.count()
_PREFIX = "longtail-"


class ControlGroup:
    """Owns its folders in /sys/fs/cgroup."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders
        """By controller (memory, pids); with version 2 both the same."""

    @classmethod
    def around(cls, pid: int, memory_bytes: int, processes: int) -> ControlGroup | None:
        """A group with that process in it. None where none can be made."""
        group = cls({})
        name = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        try:
            for controller, parent in _parents().items():
                _sweep(parent)
                folder = parent / name
                folder.mkdir(exist_ok=True)
                group._folders[controller] = folder
            if not group._folders:
                return None
            group._set("memory", memory_bytes, "memory.max", "memory.limit_in_bytes")
            group._set("pids", processes, "pids.max", "pids.max")
            for folder in group._folders.values():
                (folder / "cgroup.procs").write_text(str(pid))
        except OSError:
            group.remove()
            return None
        return group

    def _set(self, controller: str, value: int, *files: str) -> None:
        folder = self._folders[controller]
        file = next((folder / name for name in files if (folder / name).exists()), None)
        if file is None:
            raise OSError(f"{folder} has no {controller}")
        file.write_text(str(value))
        for swap in ("memory.swap.max",) if controller == "memory" else ():
            with contextlib.suppress(OSError):
                (folder / swap).write_text("0")

    def ran_out_of_memory(self) -> bool:
        """Whether the kernel has killed one of its processes for memory."""
        folder = self._folders["memory"]
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                counts = dict(line.split() for line in (folder / name).read_text().splitlines())
                return int(counts.get("oom_kill", 0)) > 0
        return False

    def remove(self) -> None:
        """Its processes have ended. A kernel that has not noticed yet is given a moment."""
        for folder in set(self._folders.values()):
            for _ in range(100):
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.01)


def _sweep(parent: Path) -> None:
    """Removes the empty groups of processes that were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        number = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if number.isdigit() and not Path("/proc", number).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _parents() -> dict[str, Path]:
    """The groups of this process in which one of its own can be made, by controller; none unless for both."""
    found: dict[str, Path] = {}
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in ("memory", "pids"):
            if controller in controllers.split(","):
                folder = ROOT / controller / path.lstrip("/")
            elif not controllers and controller not in found and _is_delegated(ROOT / path.lstrip("/"), controller):
                folder = ROOT / path.lstrip("/")
            else:
                continue
            if os.access(folder, os.W_OK):
                found[controller] = folder
    return found if len(found) == 2 else {}


def _is_delegated(folder: Path, controller: str) -> bool:
    try:
        return controller in (folder / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False
