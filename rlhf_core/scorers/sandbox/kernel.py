"""Linux's calls for namespaces, mounts and confinement that Python doesn't have, by ctypes. They raise OSError."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8  # of mount_setattr
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
_SIGCHLD, _SIGKILL = 17, 9
_NUMBERS = {
    "x86_64": {"clone": 56, "pivot_root": 155, "capset": 126, "mount_setattr": 442},
    "aarch64": {"clone": 220, "pivot_root": 41, "capset": 91, "mount_setattr": 442},
}

_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock: after clone no other thread could return it
_libc.syscall.restype = ctypes.c_long


def _checked(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(name: str, *arguments: int | bytes | ctypes.Array) -> int:
    number = _NUMBERS[platform.machine()][name]
    return _checked(name, _libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)))


def clone(flags: int) -> int:
    """Fork into new namespaces. 0 in the child. The caller has no threads, and the child only calls what leads to exec."""
    return _syscall("clone", flags | _SIGCHLD, 0, 0, 0, 0)


def unshare(flags: int) -> None:
    _checked("unshare", _libc.unshare(flags))


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _checked(f"mount {target}", _libc.mount(*encoded, ctypes.c_ulong(flags), options.encode()))


def restrict_mount(path: str, attributes: int, *, recursive: bool = True) -> None:
    """Set attributes of a mount and those below it (mount_setattr(2), Linux 5.12)."""
    change = struct.pack("=4Q", attributes, 0, 0, 0)
    _syscall("mount_setattr", _AT_FDCWD, os.fsencode(path), _AT_RECURSIVE if recursive else 0, change, len(change))


def pivot_root(new: str, old: str) -> None:
    _syscall("pivot_root", os.fsencode(new), os.fsencode(old))


def unmount(path: str) -> None:
    _checked(f"umount2 {path}", _libc.umount2(os.fsencode(path), MNT_DETACH))


def _prctl(option: int, *arguments: int) -> None:
    values = [*arguments, 0, 0, 0, 0][:4]
    _checked(f"prctl {option}", _libc.prctl(option, *(ctypes.c_ulong(value) for value in values)))


def die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def stay_dumpable() -> None:
    """Keep the process's own files in /proc, which a change of user gives to root."""
    _prctl(_PR_SET_DUMPABLE, 1)


def drop_capabilities() -> None:
    """Give up every capability, for programs that are executed too."""
    last = 0
    try:
        while True:
            _prctl(_PR_CAPBSET_DROP, last)
            last += 1
    except OSError:
        if last == 0:
            raise
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    _syscall("capset", header, ctypes.create_string_buffer(24))


def no_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def install_filter(program: bytes) -> None:
    """Install a seccomp filter; it can't be removed."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    code = ctypes.create_string_buffer(program)
    whole = Program(len(program) // 8, ctypes.cast(code, ctypes.c_char_p))
    _prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(whole))
