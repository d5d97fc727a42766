"""For all tests: offline and quiet, before anything reads the environment; and what they start is as on a user's machine.

There it can be interrupted: a shell's background job and much of what runs continuous integration ignore SIGINT, and every child would
inherit that. And it keeps what it has compiled, of which hundreds of processes would otherwise compile all again.
"""

import os
import signal

from rlhf_core.quiet import be_quiet

be_quiet()
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Files that take minutes, the longest first: workers take files in this order, and none is left alone with one at the end.
LONGEST_FIRST = ("test_chain.py", "test_flow.py", "test_iterative_dpo.py", "test_rl_options.py", "test_real_data.py", "test_resume.py")


def pytest_collection_modifyitems(items):
    """Others keep their order behind them."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
