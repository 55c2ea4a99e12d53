"""What every test file needs before anything heavy is imported."""

import os

import pytest

# One thread a process: the tests run several ranks on few cores, and rounding does not change.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test needs the network, and what is said without one must not wait for its retries.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@pytest.fixture(scope="module")
def ranks():
    """ranks[size](function, *args): processes start with the first call."""
    from testing_ranks import Ranks

    groups = {size: Ranks(size) for size in (1, 2, 3, 4)}
    yield groups
    for group in groups.values():
        group.close()
