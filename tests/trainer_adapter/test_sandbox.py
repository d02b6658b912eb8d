"""Hostile programs in the sandbox: each is stopped or refused, and leaves nothing behind.

Needs bubblewrap, and a machine that lets it make namespaces: where `Sandbox().check()` says that there is none, these
tests are skipped with its reason.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from longtail.errors import SandboxUnavailable
from longtail.trainer_adapter.rewards import sandbox as module
from longtail.trainer_adapter.rewards.cgroup import ControlGroup
from longtail.trainer_adapter.rewards.sandbox import Limits, Sandbox
from longtail.trainer_adapter.rewards.seccomp import filter_for


def why_not() -> str | None:
    try:
        Sandbox().check()
    except SandboxUnavailable as error:
        return str(error)
    return None


needs_sandbox = pytest.mark.skipif(why_not() is not None, reason=f"no sandbox: {why_not()}")
SMALL = Limits(seconds=60.0, cpu_seconds=30, memory_bytes=256 << 20, total_memory_bytes=256 << 20, output_bytes=1 << 16)


def children() -> set[str]:
    """Processes that stand in a PID namespace below ours, and bubblewrap's."""
    ours = os.readlink("/proc/self/ns/pid")
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                other = os.readlink(entry / "ns" / "pid") != ours
                command = (entry / "cmdline").read_bytes().split(b"\0")[0].decode()
            except OSError:  # it has ended
                continue
            if other or command.endswith("bwrap"):
                found.add(f"{entry.name} {command}")
    return found


@pytest.fixture
def nothing_left() -> Iterator[None]:
    before, descriptors = children(), len(os.listdir("/proc/self/fd"))
    yield
    assert children() <= before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def run(code: str, sandbox: Sandbox | None = None, **arguments: object) -> module.Outcome:
    return (sandbox or Sandbox(limits=SMALL)).run(textwrap.dedent(code), **arguments)  # type: ignore[arg-type]


@needs_sandbox
def test_a_program_reads_its_input_and_prints(nothing_left: None) -> None:
    outcome = run("print(sum(map(int, input().split())))", stdin=b"3 4\n")
    assert (outcome.stdout, outcome.stderr, outcome.exit_code, outcome.failure) == (b"7\n", b"", 0, None)
    outcome = run("print(open('/work/data.txt').read())", files={"data.txt": b"given"})
    assert outcome.stdout == b"given\n"


@needs_sandbox
def test_its_own_end_is_told(nothing_left: None) -> None:
    assert run("raise SystemExit(3)").failure == "exit code 3"
    outcome = run("raise RuntimeError('no')")
    assert (outcome.exit_code, outcome.failure) == (1, "exit code 1: RuntimeError: no")
    assert run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").exit_code == 137


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("while True: pass", "stopped: CPU time"),
        ("import time; time.sleep(60)", "stopped: wall time"),
        ("while True: print('x' * 1000)", "stopped: output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "stopped: output"),
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", "MemoryError"),
        ("open('/tmp/a', 'wb').write(bytes(32 << 20))", "exit code"),
        ("for i in range(100): open(f'/tmp/{i}', 'wb').write(bytes(8 << 20))", "OSError: [Errno 28]"),
        ("x = [open('/dev/null') for _ in range(1000)]", "OSError: [Errno 24]"),
    ],
    ids=["cpu", "sleep", "stdout", "stderr", "memory", "memory-bit-by-bit", "file", "tmp", "descriptors"],
)
def test_limits(code: str, failure: str, nothing_left: None) -> None:
    start = time.monotonic()
    limits = SMALL
    if "time" in failure:
        limits = dataclasses.replace(SMALL, **({"seconds": 3.0} if "wall" in failure else {"cpu_seconds": 1}))
    outcome = run(code, Sandbox(limits=limits))
    assert outcome.failure is not None and failure in outcome.failure, outcome
    assert len(outcome.stdout) <= SMALL.output_bytes and len(outcome.stderr) <= SMALL.output_bytes
    assert time.monotonic() - start < limits.seconds + 10


@needs_sandbox
def test_a_fork_bomb(nothing_left: None) -> None:
    outcome = run(
        """
        import os
        def bomb():
            while True:
                try:
                    if os.fork() == 0:
                        continue
                except OSError:
                    pass
        bomb()
        """,
        Sandbox(limits=dataclasses.replace(SMALL, seconds=4.0)),
    )
    assert outcome.stopped is not None or outcome.exit_code, outcome


@needs_sandbox
@pytest.mark.parametrize("grouped", [True, False], ids=["with a control group", "without"])
def test_no_more_processes_than_the_limit(grouped: bool, monkeypatch: pytest.MonkeyPatch, nothing_left: None) -> None:
    if not grouped:
        monkeypatch.setattr(ControlGroup, "around", lambda *_: None)
    outcome = run(
        """
        import os, time
        made = 0
        try:
            while True:
                if os.fork() == 0:
                    time.sleep(30)
                made += 1
        except BlockingIOError:
            print(made)
        """,
        Sandbox(limits=dataclasses.replace(SMALL, processes=5)),
    )
    assert outcome.stdout == b"4\n"  # and the program itself


GREEDY_FAMILY = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(os.urandom(1) * (60 << 20))
        time.sleep(30)
time.sleep(30)
"""
FAMILY_SANDBOX = Sandbox(limits=Limits(memory_bytes=256 << 20, total_memory_bytes=200 << 20, seconds=60.0))


@needs_sandbox
def test_memory_of_many_processes_together(nothing_left: None) -> None:
    outcome = run(GREEDY_FAMILY, FAMILY_SANDBOX)
    assert outcome.stopped == "memory" and outcome.seconds < 25, outcome


@needs_sandbox
def test_memory_is_watched_without_a_control_group(monkeypatch: pytest.MonkeyPatch, nothing_left: None) -> None:
    monkeypatch.setattr(ControlGroup, "around", lambda *_: None)
    outcome = run(GREEDY_FAMILY, FAMILY_SANDBOX)
    assert outcome.stopped == "memory" and outcome.seconds < 25, outcome


@needs_sandbox
def test_no_network(nothing_left: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        outcome = run(
            f"""
            import socket
            for family in (socket.AF_INET, socket.AF_INET6, getattr(socket, "AF_VSOCK", 40), socket.AF_NETLINK):
                try:
                    socket.socket(family, socket.SOCK_STREAM)
                    print("a socket of", family)
                except OSError as error:
                    assert error.errno == 1, error
            try:
                socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), timeout=1)
                print("connected")
            except OSError:
                print("none")
            """
        )
        assert outcome.stdout == b"none\n", outcome
        with pytest.raises(TimeoutError):
            server.accept()


@needs_sandbox
def test_nothing_can_be_written_outside_of_tmp(tmp_path: Path, nothing_left: None) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    outcome = run(
        f"""
        import os
        wrote = []
        for folder in ("/", "/usr", "/usr/lib", "/dev", "/dev/shm", "/work", "/etc", "/home", {str(tmp_path)!r}):
            try:
                open(os.path.join(folder, "x"), "w").write("x")
                wrote.append(folder)
            except OSError:
                pass
        for file in ("/work/program.py", "/usr/bin/env"):
            try:
                open(file, "a").write("x")
                wrote.append(file)
            except OSError:
                pass
        print(wrote, os.path.exists({str(secret)!r}), os.path.exists("/proc/1"), os.listdir("/tmp"))
        """
    )
    assert outcome.stdout == b"[] False False []\n", outcome


@needs_sandbox
def test_nothing_of_this_process_is_inherited(monkeypatch: pytest.MonkeyPatch, nothing_left: None) -> None:
    monkeypatch.setenv("SECRET", "hidden")
    outcome = run(
        """
        import fcntl, os
        def is_open(n):
            try:
                fcntl.fcntl(n, fcntl.F_GETFD)
                return True
            except OSError:
                return False
        print([n for n in range(64) if is_open(n)])
        print(sorted(os.environ), os.getuid(), os.getgid())
        """
    )
    descriptors, rest = outcome.stdout.decode().splitlines()
    assert descriptors == "[0, 1, 2]"
    assert "SECRET" not in rest and rest.endswith("65534 65534"), outcome


@needs_sandbox
@pytest.mark.parametrize(
    "call",
    [
        "libc.unshare(0x10000000)",
        "libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)",
        "libc.ptrace(0, 0, 0, 0)",
        "libc.shmget(0, 4096, 0o1600)",
        "libc.syscall({'x86_64': 319, 'aarch64': 279}[os.uname().machine], b'x', 0)",
        "libc.syscall(425, 8, None)",
    ],
    ids=["unshare", "mount", "ptrace", "shmget", "memfd_create", "io_uring_setup"],
)
def test_refused_system_calls(call: str, nothing_left: None) -> None:
    outcome = run(
        f"""
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        print({call}, ctypes.get_errno())
        """
    )
    assert outcome.stdout == b"-1 1\n", outcome


@needs_sandbox
def test_killing_everybody_kills_nobody_else(nothing_left: None) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        outcome = run(
            f"""
            import os, signal
            for pid in (os.getppid(), {os.getpid()}, {bystander.pid}, 1, -1):
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass
            print("alive")
            """
        )
        assert outcome.stdout in (b"alive\n", b""), outcome
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@needs_sandbox
def test_daemons_end_with_the_program(nothing_left: None) -> None:
    start = time.monotonic()
    outcome = run(
        """
        import os, time
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
                if os.fork():
                    os._exit(0)
                time.sleep(60)
                os._exit(0)
        time.sleep(0.2)
        print("done", flush=True)
        """
    )
    assert (outcome.stdout, outcome.failure) == (b"done\n", None)
    assert time.monotonic() - start < 40  # nothing waits for them


@needs_sandbox
def test_a_killed_caller_takes_the_sandbox_along(tmp_path: Path, nothing_left: None) -> None:
    code = f"""
import sys
sys.path[:] = {sys.path!r}
from longtail.trainer_adapter.rewards.sandbox import Sandbox
Sandbox().check()
print("go", flush=True)
Sandbox().run("import time; time.sleep(60)")
"""
    before = children()
    caller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert caller.stdout is not None and caller.stdout.readline() == b"go\n"
    until = time.monotonic() + 20
    while not children() - before and time.monotonic() < until:
        time.sleep(0.02)
    assert children() - before
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    caller.stdout.close()
    while children() - before and time.monotonic() < until:
        time.sleep(0.02)
    assert not children() - before


def test_without_bubblewrap_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    module._check.cache_clear()
    try:
        with pytest.raises(SandboxUnavailable, match="apt-get install bubblewrap"):
            Sandbox().run("print('ran')")
    finally:
        module._check.cache_clear()


def test_a_sandbox_that_cannot_be_made_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    for parent in (tmp_path, *tmp_path.parents[:3]):
        if parent != Path("/tmp") and os.access(parent, os.W_OK):
            parent.chmod(parent.stat().st_mode | 0o011)
    monkeypatch.setattr(module, "_bubblewrap", lambda: str(fake))
    module._check.cache_clear()
    try:
        with pytest.raises(SandboxUnavailable, match="No permissions to create a new namespace"):
            Sandbox().run("print('ran')")
    finally:
        module._check.cache_clear()


def test_the_filter_of_another_machine() -> None:
    assert len(filter_for("x86_64")) % 8 == 0 and filter_for("x86_64") != filter_for("aarch64")
    with pytest.raises(SandboxUnavailable, match="not of riscv64"):
        filter_for("riscv64")


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"seconds": 0.0}, "seconds"),
        ({"seconds": float("nan")}, "seconds"),
        ({"processes": 0}, "processes"),
        ({"memory_bytes": 1.5}, "memory_bytes"),
        ({"output_bytes": True}, "output_bytes"),
    ],
)
def test_wrong_limits(settings: dict, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        Limits(**settings)


def test_a_path_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="read_only"):
        Sandbox(read_only=("/no/such/folder",))
    with pytest.raises(ValueError, match="read_only"):
        Sandbox(read_only=("usr",))
