"""System calls that a program in the sandbox is refused, as the classic-BPF filter that bubblewrap loads.

What is refused is memory that no limit counts (memfd, System V segments), sockets (those of virtual machines, vsock,
know no network namespace), further namespaces and mounts, looking into other processes, and rare corners of the kernel
that programs under test have no need of.
"""

from __future__ import annotations

import errno
import platform
import struct

from longtail.errors import SandboxUnavailable

_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_NAMESPACES = 0x7E020080
"""CLONE_NEW* of cgroup, IPC, mount, network, PID, time, user and UTS."""
_AF_UNIX = 1
_X32 = 0x40000000

_COMMON = {425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 447}
"""io_uring_*, open_tree to fspick, pidfd_getfd, mount_setattr, memfd_secret: the same everywhere."""
# ptrace, process_vm_readv and _writev, kcmp, memfd_create, userfaultfd, bpf, perf_event_open, keyctl, add_key,
# request_key, mount, umount2, pivot_root, unshare, setns, shmget, msgget, semget, mq_open, kexec_load, init_module,
# finit_module, delete_module, personality, name_to_handle_at, open_by_handle_at, quotactl, acct, swapon, swapoff,
# reboot, settimeofday, clock_settime, adjtimex, sethostname
_X86 = {101, 310, 311, 312, 319, 323, 321, 298, 250, 248, 249, 165, 166, 155, 272, 308, 29, 68, 64, 240, 246, 175}
_X86 |= {313, 176, 135, 303, 304, 179, 163, 167, 168, 169, 164, 227, 159, 170}
_ARM = {117, 270, 271, 272, 279, 282, 280, 241, 219, 217, 218, 40, 39, 41, 97, 268, 194, 186, 190, 180, 104, 105}
_ARM |= {273, 106, 92, 264, 265, 60, 89, 224, 225, 142, 170, 112, 171, 161}
_MACHINES = {  # audit architecture, clone, clone3, socket, refused
    "x86_64": (0xC000003E, 56, 435, 41, _X86 | _COMMON),
    "aarch64": (0xC00000B7, 220, 435, 198, _ARM | _COMMON),
}


def filter_for(machine: str | None = None) -> bytes:
    """The program, an array of struct sock_filter. SandboxUnavailable for a machine whose calls are not known here."""
    machine = platform.machine() if machine is None else machine
    if machine not in _MACHINES:
        raise SandboxUnavailable(f"the sandbox knows the system calls of {', '.join(_MACHINES)}, not of {machine}")
    architecture, clone, clone3, socket, refused = _MACHINES[machine]
    permission, missing = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    code: list[tuple[int, int, int, int]] = [  # operation, skip if true, skip if false, constant
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        code += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, permission)]
    for number in sorted(refused):
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, permission)]
    code += [(_EQUAL, 0, 1, clone3), (_RETURN, 0, 0, missing)]  # its flags are in memory; the C library takes clone
    code += [(_EQUAL, 0, 4, clone), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_ANY_BIT, 0, 1, _NAMESPACES)]
    code += [(_RETURN, 0, 0, permission), (_RETURN, 0, 0, _ALLOW)]
    code += [(_EQUAL, 0, 3, socket), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUAL, 1, 0, _AF_UNIX)]
    code += [(_RETURN, 0, 0, permission), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
