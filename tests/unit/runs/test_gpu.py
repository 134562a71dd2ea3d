"""GPUs are sampled while the training runs, the right ones, and nothing about them ends a training."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from pynvml_stand_in import BUSY, IDLE, StandIn
from run_logs import one_step, strict

from hvdtrain import RunLog, World
from hvdtrain.comm.engines import SoloEngine
from hvdtrain.core.launchers import ALONE
from hvdtrain.record import gpu
from hvdtrain.record.log import read_run


class Driver:
    """Takes the place of libcuda.so.1; `visible`: its GPUs, as CUDA_VISIBLE_DEVICES leaves them."""

    def __init__(self, *visible: str) -> None:
        self.visible = visible

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return 0 if ordinal < len(self.visible) else 101

    def cuDeviceGetPCIBusId(self, text: Any, length: int, device: ctypes.c_int) -> int:
        text.value = self.visible[device.value].encode()
        return 0


class Host:
    """A host whose libraries of NVIDIA are stand-ins."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.patch, self.folder, self.capsys = patch, folder, capsys

    def put(self, *visible: str, **options: Any) -> StandIn:
        stand_in = StandIn(**options)
        stand_in.__spec__ = ModuleSpec("pynvml", None)
        self.patch.setitem(sys.modules, "pynvml", stand_in)
        self.patch.setattr(ctypes, "CDLL", lambda name: Driver(*visible))
        self.patch.setattr(gpu, "EVERY_S", 0.001)
        return stand_in

    def train(self, stand_in: StandIn | None = None, *, devices: tuple[int, ...] = (0,)) -> tuple[list[Any], str]:
        """Two epochs of a step each, and ten samples of the GPU where there is one; returns the events of epochs, and
        what was printed."""
        world = World.on(SoloEngine(devices=devices), ALONE, seed=1, node=0)
        with RunLog(self.folder / "run", world, config={}, tensorboard=False) as log:
            for epoch in range(2):
                one_step(log, epoch + 1, forward=0.9, input=0.01)
                for _ in range(10 if stand_in is not None else 0):
                    assert stand_in is not None and stand_in.asked.acquire(timeout=60)
                log.epoch(epoch, {}, 1.0)
        printed = self.capsys.readouterr()
        events = strict(self.folder / "run" / "events.jsonl")
        return [event for event in events if event["kind"] == "epoch"], printed.out + printed.err


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Host:
    return Host(monkeypatch, tmp_path, capsys)


def samplers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "hvdtrain-gpu"]


def test_epochs_and_the_verdict_say_how_busy_the_gpu_was(host: Host) -> None:
    """CUDA's GPU 0 is NVML's GPU 1, as CUDA_VISIBLE_DEVICES=1 makes it."""
    stand_in = host.put(BUSY)
    epochs, printed = host.train(stand_in)
    for epoch in epochs:
        (reading,) = epoch["gpus"]
        assert reading["samples"] >= 1
        assert (reading["busy"], reading["memory_gib"], reading["total_gib"]) == (0.41, 12.0, 24.0)
    assert printed.splitlines()[-1] == "GPU busy 41 %, memory 12 of 24 GiB"
    run = read_run(host.folder / "run")
    assert run is not None and run["result"]["verdict"].endswith("waits for data\nGPU busy 41 %, memory 12 of 24 GiB")
    assert not samplers() and stand_in.open == 0


def test_a_rank_of_two_gpus_says_their_mean_and_the_fuller_one(host: Host) -> None:
    _, printed = host.train(host.put(IDLE, BUSY, busy=(50,)), devices=(0, 1))
    assert printed.splitlines()[-1] == "GPU busy 25 %, memory 12 of 24 GiB"


def test_an_epoch_shorter_than_the_interval_has_a_sample(host: Host) -> None:
    stand_in = host.put(BUSY)
    host.patch.setattr(gpu, "EVERY_S", 600.0)
    its = gpu.gpus_of([0])
    assert its is not None and its.take() == {}  # not started: nothing was asked
    its.start()
    while "nvmlDeviceGetHandleByPciBusId" not in stand_in.calls or not its._handles:
        assert samplers()
    assert its.take()["samples"] == 1
    its.stop()
    assert not samplers()


@pytest.mark.parametrize(
    "broken", ["nvmlInit", "nvmlDeviceGetHandleByPciBusId", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMemoryInfo"]
)
def test_what_nvml_refuses_is_said_once_and_ends_nothing(broken: str, host: Host) -> None:
    stand_in = host.put(BUSY, broken=broken)
    of_threads: list[threading.Thread] = []
    start = gpu.Gpus.start

    def start_and_wait(self: gpu.Gpus) -> None:
        start(self)
        assert self._thread is not None
        of_threads.append(self._thread)
        self._thread.join(timeout=60)

    host.patch.setattr(gpu.Gpus, "start", start_and_wait)
    epochs, printed = host.train()
    assert not of_threads[0].is_alive() and stand_in.open == 0
    assert [epoch["gpus"] for epoch in epochs] == [[{"error": "NVMLError: Driver/library version mismatch"}]] * 2
    assert printed.count("no utilisation of GPUs: NVML on rank 0 reports NVMLError: Driver/library") == 1
    assert "verdict: " in printed and "GPU busy" not in printed


@pytest.mark.parametrize("package", [True, False])
def test_without_package_or_gpu_nothing_starts_and_nothing_is_said(package: bool, host: Host) -> None:
    stand_in = host.put(BUSY)
    if not package:
        find = importlib.util.find_spec
        host.patch.setattr(importlib.util, "find_spec", lambda name: None if name == "pynvml" else find(name))
    epochs, printed = host.train(devices=(0,) if not package else ())
    assert not stand_in.calls and not samplers()
    assert all("gpus" not in epoch for epoch in epochs) and "GPU" not in printed


def test_ranks_are_told_together_and_the_least_busy_one_is_named() -> None:
    def reading(busy: float, memory: float, samples: int) -> dict[str, Any]:
        return {"busy": busy, "memory_gib": memory, "total_gib": 80.0, "samples": samples}

    epochs = [[reading(0.9, 30.0, 10), reading(0.2, 8.125, 10)], [reading(0.9, 31.0, 30), {}]]
    assert gpu.summary(epochs) == "GPUs busy 55 % (rank 1: 20 %), memory 31 of 80 GiB"
    assert gpu.summary([[reading(0.5, 1.0, 1), reading(0.45, 1.0, 1)]]) == "GPUs busy 48 %, memory 1 of 80 GiB"
    assert gpu.summary([[{}, {"error": "x"}]]) == gpu.summary([]) == ""
