"""Programs that nobody trusts, run under `bubblewrap`: never without it.

    outcome = Sandbox().run("print(input())", stdin=b"7")       # Outcome(stdout=b"7\\n", exit_code=0, ...)

Inside there are /usr and Python to read, a small /tmp of its own to write, and nothing else: no network, no other
process, no /proc, no environment, no descriptor, no capability. Limits (`Limits`) are the kernel's for each process;
what those do not count for all processes together (memory) is watched from outside, and kept by a control group where
one can be made (cgroup.py). All of it dies at once, by the
death of its PID namespace's first process, whose end is awaited: on return no process is left.

A caller that is root does not run it as root: bubblewrap is started as `nobody`, so that its files are nobody's and the
kernel counts its processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import math
import os
import resource
import select
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from longtail.errors import SandboxUnavailable
from longtail.trainer_adapter.rewards.cgroup import ControlGroup
from longtail.trainer_adapter.rewards.seccomp import filter_for

NOBODY = 65534
PRLIMIT = "/usr/bin/prlimit"
"""Of util-linux. Limits are put on from inside, behind the making of the user namespace: from then on the kernel counts
its processes apart from all others, and so each sandbox has its own number of them (Linux 5.14 and newer)."""
WORK = "/work"
"""Where `files` lie, to read."""
INPUT = "input"
"""What the program reads as its standard input."""
START_SECONDS = 30.0
END_SECONDS = 10.0
LOOK_SECONDS = 0.02
"""Between two looks at the memory of a sandbox."""
FIRST = 'read -r go || exit 125; "$@" <"$0"; exit $?'
"""What the first process of the namespace does, a shell: it waits for a word, which a caller that was killed meanwhile
never says, runs the program on its input, and ends when that ends: with it everything else does."""
_INSTALL = "install it with `apt-get install bubblewrap` (or your system's package of that name)"

Stopped = Literal["wall time", "output", "memory"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    seconds: float = 20.0
    """Of wall time, for everything. Well above `cpu_seconds`, so that a busy machine does not decide; and below the
    timeout of a `GraderPool`, which leaves a sample without a reward."""
    cpu_seconds: int = 10
    """Of each process."""
    memory_bytes: int = 512 << 20
    """Address space of each process."""
    total_memory_bytes: int = 768 << 20
    """Memory that all processes have in use together."""
    processes: int = 16
    """At once, threads counted."""
    open_files: int = 64
    """Of each process."""
    file_bytes: int = 16 << 20
    """Of a file."""
    tmp_bytes: int = 64 << 20
    """Of /tmp, which is in memory."""
    output_bytes: int = 1 << 20
    """Of standard output and of standard error."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"seconds must be a finite number above 0, not {self.seconds!r}")
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{field.name} must be an integer of at least 1, not {value!r}")

    def command(self) -> list[str]:
        """What puts the limits on itself and becomes the program behind it. The first process counts too."""
        options = {
            "as": f"{self.memory_bytes}",
            "cpu": f"{self.cpu_seconds}:{self.cpu_seconds + 1}",
            "nproc": f"{self.processes + 1}",
            "nofile": f"{self.open_files}",
            "fsize": f"{self.file_bytes}",
            "core": "0",
            "memlock": "0",
            "msgqueue": "0",
        }
        return [PRLIMIT, *(f"--{name}={value}" for name, value in options.items()), "--"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    stdout: bytes
    stderr: bytes
    exit_code: int | None
    """128 + n after signal n; None if it was stopped."""
    stopped: Stopped | None
    """What it had used up when it was ended from outside."""
    seconds: float

    @property
    def failure(self) -> str | None:
        """Why it did not end well; None if it did."""
        if self.stopped is not None:
            return f"stopped: {self.stopped}"
        if self.exit_code == 128 + signal.SIGXCPU:
            return "stopped: CPU time"
        if self.exit_code:
            last = self.stderr.decode(errors="replace").strip().splitlines()[-1:]
            return f"exit code {self.exit_code}" + "".join(f": {line[:200]}" for line in last)
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sandbox:
    limits: Limits = Limits()
    python: str | None = None
    """Interpreter; None: this one's, or /usr/bin/python3 where `nobody` cannot read this one's."""
    read_only: tuple[str, ...] = ()
    """Further paths to read inside: a folder of libraries, say."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "read_only", tuple(self.read_only))
        for path in self.read_only:
            if not Path(path).is_absolute() or not Path(path).exists():
                raise ValueError(f"read_only must be absolute paths that exist, not {path!r}")

    def check(self) -> str:
        """The version of the Python inside. SandboxUnavailable, with the remedy, if nothing can be run here."""
        return _check(self)

    def run(self, program: str | bytes, *, stdin: bytes = b"", files: Mapping[str, bytes] | None = None) -> Outcome:
        """Runs a Python program to its end, or to that of a limit.

        files: by name, to be read under /work beside the program. SandboxUnavailable if there is no sandbox."""
        self.check()
        return self._run(program, stdin, files or {})

    def _run(self, program: str | bytes, stdin: bytes, files: Mapping[str, bytes]) -> Outcome:
        code = program.encode(errors="surrogatepass") if isinstance(program, str) else program
        with self.start("program.py", stdin=stdin, files={**files, "program.py": code}) as running:
            return running.wait()

    @contextlib.contextmanager
    def start(
        self,
        script: str,
        *arguments: str,
        files: Mapping[str, bytes],
        stdin: bytes = b"",
        descriptors: Sequence[int] = (),
        keep_output: bool = True,
    ) -> Iterator[Running]:
        """A script among `files`, started; ended when the block is left. descriptors: that it inherits, by their
        numbers. keep_output: else what it prints is thrown away (and `wait` is for others)."""
        for name in files:
            if not name or "/" in name or name.startswith(".") or name == INPUT:
                raise ValueError(f"files must be named without folders, and none {INPUT!r}, not {name!r}")
        command = [
            "/bin/sh",
            "-c",
            FIRST,
            f"{WORK}/{INPUT}",
            *self.limits.command(),
            self._python(),
            "-I",
            "-B",
            f"{WORK}/{script}",
            *arguments,
        ]
        running = Running(self, command, {**files, INPUT: stdin}, descriptors, keep_output)
        try:
            yield running
        finally:
            running.close()

    def _python(self) -> str:
        return self.python or _default_python()

    def arguments(self) -> list[str]:
        """bubblewrap's, without files and descriptors."""
        limits, args = self.limits, ["--unshare-all", "--unshare-user", "--die-with-parent", "--as-pid-1"]
        args += ["--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox", "--cap-drop", "ALL"]
        args += ["--ro-bind", "/usr", "/usr"]
        for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
            if os.path.islink(path):
                args += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                args += ["--ro-bind", path, path]
        args += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
        for path in dict.fromkeys((*_prefixes(self._python()), *self.read_only)):
            args += ["--ro-bind", path, path]
        args += ["--dev", "/dev", "--remount-ro", "/dev", "--size", str(limits.tmp_bytes), "--tmpfs", "/tmp"]
        environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        args += ["--clearenv"]
        for name, value in environment.items():
            args += ["--setenv", name, value]
        return [*args, "--chdir", "/tmp"]


class Running:
    """A sandbox with something in it. For one thread."""

    def __init__(
        self,
        sandbox: Sandbox,
        command: Sequence[str],
        files: Mapping[str, bytes],
        descriptors: Sequence[int],
        keep_output: bool,
    ) -> None:
        self.limits = sandbox.limits
        self._first = -1
        """pidfd of the first process of the PID namespace: it ends last."""
        self._group: ControlGroup | None = None
        self._exit_code: int | None = None
        self.own_exit_code: int | None = None
        """Its exit code, if it had ended before it was made to."""
        self._status, status = os.pipe()
        gate, self._gate = os.pipe()
        output = subprocess.PIPE if keep_output else subprocess.DEVNULL
        with contextlib.ExitStack() as theirs:
            theirs.callback(os.close, status)
            theirs.callback(os.close, gate)
            passed = [status, _file(theirs, filter_for()), *descriptors]
            args = [_bubblewrap(), *sandbox.arguments(), "--json-status-fd", str(status), "--seccomp", str(passed[1])]
            for name, data in files.items():
                passed.append(_file(theirs, data))
                args += ["--ro-bind-data", str(passed[-1]), f"{WORK}/{name}"]
            try:
                self._process = subprocess.Popen(
                    [*args, "--remount-ro", "/", "--", *command],
                    stdin=gate,
                    stdout=output,
                    stderr=output,
                    pass_fds=passed,
                    env={},
                    cwd="/",
                    start_new_session=True,
                    **_as_nobody(),
                )
            except BaseException:
                self._close_ours()
                raise
        try:
            self.pid = self._first_process()
            self._first = os.pidfd_open(self.pid)
            self._group = ControlGroup.around(self.pid, self.limits.total_memory_bytes, self.limits.processes + 1)
            self.started = time.monotonic()
            os.write(self._gate, b"go\n")
        except BaseException:
            self.close()
            raise

    def _first_process(self) -> int:
        """Its number here. SandboxUnavailable if bubblewrap ended instead of making it."""
        text, until = b"", time.monotonic() + START_SECONDS
        while b"}" not in text:
            if not select.select([self._status], [], [], max(until - time.monotonic(), 0.0))[0]:
                raise SandboxUnavailable(f"bubblewrap made no process in {START_SECONDS:g} s")
            if not (data := os.read(self._status, 4096)):
                raise SandboxUnavailable(f"bubblewrap cannot make a sandbox here: {self._last_words()}")
            text += data
        return int(json.loads(text[: text.index(b"}") + 1])["child-pid"])

    def _last_words(self) -> str:
        stderr = self._process.stderr
        if stderr is None or not select.select([stderr], [], [], 1.0)[0]:
            return "it says nothing"
        return os.read(stderr.fileno(), 4096).decode(errors="replace").strip()

    def wait(self, *others: Running) -> Outcome:
        """To its end, or that of a limit; others: end with it, and their memory is watched too. SandboxUnavailable if
        the sandbox could not be set up."""
        stdout, stderr = self._process.stdout, self._process.stderr
        assert stdout is not None and stderr is not None
        stopped: Stopped | None = None
        until = self.started + self.limits.seconds
        end = os.pidfd_open(self._process.pid)
        streams: dict[IO[bytes], bytearray] = {stdout: bytearray(), stderr: bytearray()}
        with selectors.DefaultSelector() as selector:
            selector.register(end, selectors.EVENT_READ)
            for stream in streams:
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ)
            try:
                has_ended = False
                while not has_ended and stopped is None:
                    seconds = until - time.monotonic()
                    ready = {key.fileobj for key, _ in selector.select(max(min(seconds, LOOK_SECONDS), 0.0))}
                    has_ended = end in ready
                    for stream, data in streams.items():
                        if stream in ready and not _read(stream, data):
                            selector.unregister(stream)
                    if any(len(data) > self.limits.output_bytes for data in streams.values()):
                        stopped = "output"
                    elif any(one.is_out_of_memory() for one in (self, *others)):
                        stopped = "memory"
                    elif seconds <= 0 and not has_ended:
                        stopped = "wall time"
            finally:
                os.close(end)
        seconds = time.monotonic() - self.started
        if stopped is None and any(one.is_out_of_memory() for one in (self, *others)):
            stopped = "memory"
        for one in (*others, self):
            one.end()
        for stream, data in streams.items():
            while len(data) <= self.limits.output_bytes and _read(stream, data):
                pass
            if len(data) > self.limits.output_bytes:
                stopped = stopped or "output"
        out, err = (bytes(data[: self.limits.output_bytes]) for data in streams.values())
        if stopped is None and self._exit_code is None:
            why = err.decode(errors="replace").strip()[-500:] or "it gives no reason"
            raise SandboxUnavailable(f"bubblewrap could not set up the sandbox, or was killed: {why}")
        exit_code = self._exit_code if stopped is None else None
        return Outcome(stdout=out, stderr=err, exit_code=exit_code, stopped=stopped, seconds=seconds)

    def is_out_of_memory(self) -> bool:
        if self._group is not None and self._group.ran_out_of_memory():
            return True
        return self.memory_bytes() > self.limits.total_memory_bytes

    def memory_bytes(self) -> int:
        """That its processes have in use, shared pages counted in each."""
        total, pids = 0, [self.pid]
        while pids:
            pid = pids.pop()
            try:
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
                for thread in os.listdir(f"/proc/{pid}/task"):
                    pids += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
            except (OSError, IndexError):  # it has ended
                continue
        return total

    def end(self) -> None:
        """Kills what is left of it, and waits until nothing is. May be called again."""
        had_ended = False
        if self._first >= 0:
            had_ended = bool(select.select([self._first], [], [], 0)[0])
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
            is_over = select.select([self._first], [], [], END_SECONDS)[0]
            os.close(self._first)
            self._first = -1
            if not is_over:
                raise SandboxUnavailable(f"process {self.pid} of a sandbox did not die in {END_SECONDS:g} s")
        elif self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(END_SECONDS)
        if self._status >= 0:
            self._read_exit_code()
            self.own_exit_code = self._exit_code if had_ended else None
        self._close_ours()
        if self._group is not None:
            self._group.remove()
            self._group = None

    def close(self) -> None:
        """Ends it, and drops what it said. May be called again."""
        try:
            self.end()
        finally:
            for stream in (self._process.stdout, self._process.stderr):
                if stream is not None:
                    stream.close()

    def _read_exit_code(self) -> None:
        """From what bubblewrap still says: whoever could write there has ended."""
        text = b""
        while data := os.read(self._status, 4096):
            text += data
        for line in text.splitlines():
            with contextlib.suppress(ValueError, AttributeError):
                self._exit_code = json.loads(line).get("exit-code", self._exit_code)

    def _close_ours(self) -> None:
        for descriptor in (self._status, self._gate):
            if descriptor >= 0:
                os.close(descriptor)
        self._status = self._gate = -1


def _read(stream: IO[bytes], data: bytearray) -> bool:
    """Appends what there is. -> whether there was something."""
    try:
        more = os.read(stream.fileno(), 1 << 16)
    except BlockingIOError:
        return False
    data += more
    return bool(more)


def _file(held: contextlib.ExitStack, data: bytes) -> int:
    """A file in memory that nobody can change any more, to be read from its start."""
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    held.callback(os.close, descriptor)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _as_nobody() -> dict[str, Any]:
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


def _bubblewrap() -> str:
    found = shutil.which("bwrap", path=f"{os.environ.get('PATH', '')}:/usr/bin:/bin")
    if found is None:
        raise SandboxUnavailable(f"programs are run in a sandbox alone, and bubblewrap (bwrap) is missing: {_INSTALL}")
    return found


@functools.cache
def _default_python() -> str:
    own = os.path.realpath(sys.executable)
    if os.geteuid() != 0 or all(_is_open(parent) for parent in Path(own).parents):
        return own
    if os.path.exists("/usr/bin/python3"):
        return os.path.realpath("/usr/bin/python3")
    raise SandboxUnavailable(
        f"root's sandbox runs as nobody, who cannot read {own}: install python3 in /usr, or name an interpreter with "
        "Sandbox(python=...)"
    )


def _is_open(folder: Path) -> bool:
    """Whether everybody may enter it."""
    return bool(folder.stat().st_mode & 0o001)


def _prefixes(python: str) -> list[str]:
    """Folders outside of /usr without which an interpreter does not start."""
    prefix = str(Path(os.path.realpath(python)).parent.parent)
    return [] if prefix == "/usr" or prefix.startswith("/usr/") else [prefix]


@functools.lru_cache(maxsize=64)
def _check(sandbox: Sandbox) -> str:
    if sys.platform != "linux":
        raise SandboxUnavailable(f"bubblewrap needs Linux, not {sys.platform}")
    if not os.path.exists(PRLIMIT):
        raise SandboxUnavailable(f"{PRLIMIT} is missing, which sets a program's limits: install util-linux")
    outcome = sandbox._run("import sys; print(sys.version.split()[0])", b"", {})
    if outcome.failure is not None or not outcome.stdout:
        raise SandboxUnavailable(f"{sandbox._python()} does not run in the sandbox: {outcome.failure}")
    return outcome.stdout.decode().strip()
