"""What every test file needs before anything heavy is imported."""

import os

# One thread a process: the tests run several ranks on few cores, and rounding does not change.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test needs the network, and what is said without one must not wait for its retries.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
