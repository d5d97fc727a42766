"""Programs that try to leave the sandbox, to harm the machine or to outlast their time, and what became of each.

A program prints ESCAPED where it succeeds.

    python hostile_programs.py SECRET MARK    runs all of them, for a reader of this machine's file SECRET; prints JSON
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from rlhf_core.scorers.sandbox.box import Limits, Sandbox

LIMITS = Limits(seconds=0.5, memory_mib=128)
TEXT = r"""
### fork bomb
import os
while True:
    if os.fork() == 0:
        print('ESCAPED')
### subprocess
import subprocess
print('ESCAPED', subprocess.run(['/usr/bin/id'], capture_output=True))
### shell in its place
import os
os.execv('/usr/bin/sh', ['sh', '-c', 'cat SECRET && echo ESCAPED'])
### network
import socket
socket.socket().bind(('127.0.0.1', 0))
print('ESCAPED')
### abstract socket
import socket
socket.socket(socket.AF_UNIX).bind('\0here')
print('ESCAPED')
### passwords
print('ESCAPED', open('/etc/shadow').read() or open('/etc/passwd').read())
### the repository
print('ESCAPED', open('SECRET').read())
### processes
import os
print('ESCAPED', os.listdir('/proc'))
### ptrace
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for pid in range(1, 2000):
    if libc.ptrace(16, pid, 0, 0) == 0:
        print('ESCAPED')
### others' memory
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.process_vm_readv(os.getppid() or 1, None, 0, None, 0, 0) == 0:
    print('ESCAPED')
### signals
import os
for pid in {-1, os.getppid(), *range(2, 40000)} - {0}:
    try:
        os.kill(pid, 9)
        print('ESCAPED', pid)
    except OSError:
        pass
### signal to its group
import os, signal  # the worker would die of it
signal.signal(15, signal.SIG_IGN)
os.kill(0, 15)
### endless output
while True:
    print('x' * 100000)
### endless errors
import sys
while True:
    sys.stderr.write('x' * 100000)
### sleep
import time
time.sleep(1000)
### computing
while True:
    pass
### signals ignored
import signal
for n in range(1, 64):
    try:
        signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    pass
### memory
kept = []
while True:
    kept.append(bytes(1 << 20))  # counted as address space, but never touched, which takes time where memory is scarce
    if len(kept) > 200:
        print('ESCAPED')
### memory outside
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.shmget(0, 1 << 30, 0o1600) >= 0 or libc.memfd_create(b'x', 0) >= 0:
    print('ESCAPED')
### disk
for number in range(300):
    open(f'/tmp/{number}', 'wb').write(bytes(1 << 20))
print('ESCAPED')
### inodes
for number in range(100000):
    open(f'/tmp/{number}', 'w').close()
print('ESCAPED')
### open files
kept = [open('/dev/null') for _ in range(5000)]
print('ESCAPED')
### threads
import threading, time
threading.stack_size(65536)
for _ in range(500):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
print('ESCAPED')
### mount
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b'x', b'/tmp', b'tmpfs', 0, b'') == 0 or libc.umount2(b'/usr', 2) == 0:
    print('ESCAPED')
### namespaces
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10000000) == 0 or libc.unshare(0x20000) == 0 or libc.chroot(b'/tmp') == 0:
    print('ESCAPED')
### system calls
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
numbers = (425, 321, 298, 323, 250, 435, 272, 161, 0x40000000 + 57, 57, 58, 500) if os.uname().machine == 'x86_64' else (425, 280, 241, 97)
for n in numbers:
    if libc.syscall(n, 0, 0, 0, 0, 0, 0) >= 0:
        print('ESCAPED', n)
### capabilities
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
held = any(libc.prctl(23, n, 0, 0, 0) == 1 for n in range(41))
if held or libc.setresuid(0, 0, 0) == 0 or libc.prctl(39, 0, 0, 0, 0) != 1:
    print('ESCAPED')
### links
import os
os.symlink('SECRET', '/tmp/link')
print('ESCAPED', open('/tmp/link').read())
### hard links
import os
os.link('/usr/bin/env', '/tmp/link')
print('ESCAPED')
### way up
import os
os.chdir('/')
for _ in range(50):
    os.chdir('..')
print('ESCAPED', open('.' + 'SECRET').read())
### writing outside
import os, sys
home = os.path.dirname(os.__file__)
for place in ('/', '/usr', '/usr/bin', '/lib', '/dev', '/etc', home, os.path.dirname(sys.executable)):
    try:
        open(f'{place}/x', 'w')
        print('ESCAPED', place)
    except OSError:
        pass
### descriptors
import os
for n in range(3, 4096):
    try:
        os.fstat(n)
        print('ESCAPED', n)
    except OSError:
        pass
### environment
import os
if set(os.environ) - {'PYTHONHASHSEED', 'MALLOC_ARENA_MAX', 'LC_CTYPE'}:
    print('ESCAPED', os.environ)
### device
import os
os.mknod('/tmp/disk', 0o60600, os.makedev(254, 0))
print('ESCAPED')
### its input
import os
os.write(0, b'x' * (1 << 20))
print('ESCAPED')
### program from /tmp
import os, shutil
shutil.copy('/usr/bin/env', '/tmp/env')
os.execv('/tmp/env', ['/tmp/env', 'echo', 'ESCAPED'])
"""
PROGRAMS = {name.strip(): program for name, _, program in (part.partition("\n") for part in TEXT.split("\n### ")[1:])}


def workers() -> set[int]:
    """Processes of sandboxes that this process started."""
    children = {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}
    return {pid for pid in children if "sandbox.worker" in command_line(pid)}


def command_line(pid: int) -> str:
    """Empty if the process has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def main() -> None:
    secret, mark = sys.argv[1:]
    found = {}
    with Sandbox() as sandbox:
        for name, program in PROGRAMS.items():
            start = time.monotonic()
            outcome = sandbox.run({"main.py": program.replace("SECRET", secret)}, ["main.py", mark], limits=LIMITS)
            seconds = time.monotonic() - start
            found[name] = {**vars(outcome), "stdout": outcome.stdout[-300:], "size": len(outcome.stdout), "seconds": seconds}
    print(json.dumps({"user": os.geteuid(), "outcomes": found}))


if __name__ == "__main__":
    main()
