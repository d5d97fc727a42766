"""For all tests: offline and quiet, before anything reads the environment."""

from rlhf_core.quiet import be_quiet

be_quiet()
