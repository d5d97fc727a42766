"""For all tests: offline and quiet, before anything reads the environment; and which tests may run beside each other."""

import pytest

from rlhf_core.quiet import be_quiet

be_quiet()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers: a file's tests stay together, and those that look at the small chain too, so that it is run once."""
    for item in items:
        together = "chain" if "chain" in getattr(item, "fixturenames", ()) else str(item.path)
        item.add_marker(pytest.mark.xdist_group(together))
