"""A process of an agent's command: its input, the ends of its outputs, and its end together with all processes that it started."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rlhf_core.config import shown

KEEPER = Path(__file__).with_name("keeper.py")
READ = 1 << 16  # bytes of an output at a time
KEPT = 4096  # last bytes of each output
SHOWN_LINES = 12  # of the error output, in messages
END_SECONDS = 12.0  # for the keeper to end all processes


class AgentProcess:
    """A command under its keeper (keeper.py). As a context manager it ends all of the command's processes.

    Args:
        given: what it reads from its standard input.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, folder: Path, given: str = ""):
        self._command, self._environment, self._folder, self._given = command, environment, folder, given
        self._output, self._errors = bytearray(), bytearray()

    async def __aenter__(self) -> AgentProcess:
        keeper = [sys.executable, "-I", "-S", str(KEEPER), str(os.getpid())]
        pipe = asyncio.subprocess.PIPE
        options = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "cwd": self._folder, "env": self._environment, "start_new_session": True}
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.subprocess_exec(lambda: _Streams(loop), *keeper, *self._command, **options)
        self._process, self._exited = asyncio.subprocess.Process(transport, protocol, loop), protocol.exited
        reads = [_keep_end(self._process.stdout, self._output), _keep_end(self._process.stderr, self._errors)]
        self._streams = [asyncio.ensure_future(work) for work in (*reads, self._give())]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Shielded: a cancelled episode's processes end too."""
        await asyncio.shield(asyncio.ensure_future(self._end()))

    async def wait(self) -> int:
        """Return the exit code of the command, as a shell has it."""
        await self._exited.wait()
        self._end_group()
        await asyncio.gather(*self._streams)
        return self._process.returncode

    @property
    def last_line(self) -> str:
        """The last line of the output that isn't empty; empty if there is none."""
        lines = self._output.decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    @property
    def last_errors(self) -> list[str]:
        """The last lines of the error output, as messages show them."""
        return [shown(line) for line in self._errors.decode(errors="replace").rstrip().split("\n")[-SHOWN_LINES:] if line]

    async def _give(self) -> None:
        stdin = self._process.stdin
        with suppress(ConnectionError):  # the command doesn't read it
            stdin.write(self._given.encode())
            await stdin.drain()
        stdin.close()

    async def _end(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._exited.wait(), END_SECONDS)
        self._end_group()
        for stream in self._streams:
            stream.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)

    def _end_group(self) -> None:
        """Kill what a keeper that was killed has left; another one has ended everything."""
        if self._process.returncode is None or self._process.returncode < 0:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


class _Streams(asyncio.subprocess.SubprocessStreamProtocol):
    """Tells when the process has exited; asyncio's own wait goes on until nobody else has its outputs either."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        super().__init__(limit=READ, loop=loop)
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


async def _keep_end(stream: asyncio.StreamReader, kept: bytearray) -> None:
    while part := await stream.read(READ):
        kept += part
        del kept[:-KEPT]
