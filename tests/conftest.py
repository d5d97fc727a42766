"""For all tests: offline and quiet, before anything reads the environment; and what they start can be interrupted.

A shell's background job and much of what runs continuous integration ignore SIGINT, and every child would inherit that.
"""

import signal

from rlhf_core.quiet import be_quiet

be_quiet()
signal.signal(signal.SIGINT, signal.default_int_handler)
