"""A session of Ray for the tests of a file."""

import os

import pytest
import ray


@pytest.fixture(scope="module")
def session():
    """One on this machine, without its dashboard; Ray's cores are logical."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
