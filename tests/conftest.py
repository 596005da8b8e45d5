"""What all tests share: where they may run and how hypothesis draws."""

import os
import shutil

import pytest
import torch
from hypothesis import settings

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not _has_hopper():
        pytest.skip("needs an NVIDIA Hopper GPU")
    if item.get_closest_marker("host_compiler") and shutil.which("g++") is None:
        if os.environ.get("CI"):
            pytest.fail("CI runs the simulator's tests, and g++ is not in PATH", pytrace=False)
        pytest.skip("the simulator needs g++, which is not in PATH")


def _has_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
