"""When a driver that is told to stop does so: at once while it waits for responses, which change nothing, otherwise after the step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class StepAbandoned(Exception):
    """A stop was asked for while a step had changed nothing yet."""


class Stop:
    """Handles SIGTERM."""

    def __init__(self):
        self._asked = self._interruptible = False

    def ask(self, *_: object) -> None:
        """The signal's handler."""
        self._asked = True
        if self._interruptible:
            self._interruptible = False
            raise StepAbandoned

    def is_set(self) -> bool:
        return self._asked

    @contextlib.contextmanager
    def interrupts(self) -> Iterator[None]:
        """What happens in here is given up when a stop is asked for, or was.

        Raises:
            StepAbandoned: it was.
        """
        if self._asked:
            raise StepAbandoned
        self._interruptible = True
        try:
            yield
        except KeyboardInterrupt:  # what becomes of an exception that a handler raises within a call into Ray
            raise (StepAbandoned if self._asked else KeyboardInterrupt) from None
        finally:
            self._interruptible = False
