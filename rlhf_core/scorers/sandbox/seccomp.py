"""The system calls that a sandboxed program may not make, as a BPF program for the kernel (seccomp(2)).

It is a second wall: namespaces, limits and missing capabilities already confine the program. The list takes away what would widen the
kernel's attack surface (mounts, tracing, io_uring, bpf), what escapes the limits (processes, memory outside the address space) and sockets.
"""

from __future__ import annotations

import platform
import struct

# Machine -> its number in the kernel's audit interface, and its column of _DENIED.
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# System call -> its number on x86-64 and on aarch64; None: it has none.
DENIED: dict[str, tuple[int, int | None]] = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "sync": (162, 81),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "personality": (135, 92),
    "mbind": (237, 235),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "set_mempolicy": (238, 237),
    "vhangup": (153, 58),
    "socket": (41, 198),
    "fork": (57, None),
    "vfork": (58, None),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
}
CLONE = (56, 220)  # allowed for threads only
CLONE3 = 435  # its flags lie in memory, which BPF can't read; without it libraries fall back to clone
FIRST_UNKNOWN = 463  # later system calls, and those of x32, don't exist for the program

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; both machines are little-endian
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_CLONE_THREAD = 0x00010000


def seccomp_program(machine: str | None = None) -> bytes:
    """Return the filter as an array of struct sock_filter.

    Raises:
        OSError: the machine's system calls aren't known here.
    """
    machine = machine or platform.machine()
    if machine not in MACHINES:
        raise OSError(f"expected a machine among {sorted(MACHINES)}, whose system calls are known, got {machine}")
    audit, column = MACHINES[machine]
    program = [(_LOAD, 0, 0, _MACHINE), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    for number in sorted(numbers[column] for numbers in DENIED.values() if numbers[column] is not None):
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    program += [(_EQUAL, 0, 1, CLONE3), (_RETURN, 0, 0, _ENOSYS), (_AT_LEAST, 0, 1, FIRST_UNKNOWN), (_RETURN, 0, 0, _ENOSYS)]
    program += [(_EQUAL, 0, 3, CLONE[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_ANY_BIT, 1, 0, _CLONE_THREAD), (_RETURN, 0, 0, _EPERM)]
    program += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
