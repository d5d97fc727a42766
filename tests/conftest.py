"""For all tests: offline and quiet, before anything reads the environment; and what they start is as on a user's machine.

There it can be interrupted: a shell's background job and much of what runs continuous integration ignore SIGINT, and every child would
inherit that. And it keeps what it has compiled, of which hundreds of processes would otherwise compile all again.
"""

import gc
import os
import signal

from rlhf_core.process import configure_process

configure_process()
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Workers take files in this order. First those that take minutes, the longest first, so that none is left alone with one at the end. Then
# those that mostly wait for others' processes, apart from each other, between those that compute for half a minute; then all others.
ORDER = (
    *(
        "test_chain.py",
        "test_flow.py",
        "test_iterative_dpo.py",
        "test_rl_options.py",
        "test_gpu_check.py",
        "test_real_data.py",
        "test_resume.py",
        "test_tracked_inputs.py",
        "test_tutorial.py",
        "test_unrewarded_chains.py",
    ),
    *("test_flow_deployment.py", "test_rollouts.py", "test_compact.py", "test_trl_curves.py"),
    *("test_concurrent_flows.py", "test_report.py", "test_validation.py"),
    *("test_ray_head.py", "test_two_ranks.py", "test_rl_rank.py"),
    *("test_flow_stages.py", "test_gate.py"),
)


def pytest_collection_modifyitems(items):
    """Those of no place keep their order behind the others."""
    places = {name: place for place, name in enumerate(ORDER)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish():
    """What has been imported stays to the end: looking for garbage among it would only take time."""
    gc.freeze()
