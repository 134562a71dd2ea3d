"""Measures with NVML how busy a rank's GPUs are and how full their memory is, while the training runs.

Needs the package nvidia-ml-py (module `pynvml`, the extra `gpu`). Without it, or on a rank without a GPU, it starts
nothing. Monitoring never ends a training: it keeps an error of NVML as a text, which the run log prints once.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Utilisation is the share of the driver's last sample period (1/6 s to 1 s) with a kernel at work. At the end of a
# step, where all has been waited for, that would be an idle GPU: a thread of its own asks in between.
EVERY_S = 1.0
GIB = 2**30

# of one rank over an epoch; see `Gpus.take`
Reading = Mapping[str, Any]


class Gpus:
    """Samples this rank's GPUs, by CUDA's ordinals, from `start` to `stop`; never raises or waits for a GPU."""

    def __init__(self, ordinals: Sequence[int]) -> None:
        self._ordinals = tuple(ordinals)
        self._nvml: Any = None
        self._handles: list[Any] = []
        self._error = ""
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._busy, self._samples, self._fullest = 0.0, 0, (0, 0)

    def start(self) -> None:
        """Begins to sample; the second call does nothing."""
        if self._thread is None and not self._over.is_set():
            self._thread = threading.Thread(target=self._run, name="hvdtrain-gpu", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread; does not wait any longer for one that is blocked in a driver."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=EVERY_S)

    def take(self) -> dict[str, Any]:
        """Returns what was seen since the last call: nothing, or
        `busy` (share of the time, mean over the rank's GPUs), `memory_gib` and `total_gib` (of the fullest one, the
        most that was in use, by whomever), `samples`; or `error`, in words.
        """
        with self._lock:
            busy, samples, (used, total) = self._busy, self._samples, self._fullest
            self._reset()
        if not samples:
            return {"error": self._error} if self._error else {}
        return {
            "busy": round(busy / samples, 4), "memory_gib": round(used / GIB, 4), "total_gib": round(total / GIB, 4),
            "samples": samples,
        }  # fmt: skip

    def _run(self) -> None:
        self._guarded(self._open)
        while not self._error:  # here alone: a driver may take its time, or never answer
            self._guarded(self._sample)
            if self._over.wait(EVERY_S):
                break
        if self._nvml is not None:
            self._guarded(self._nvml.nvmlShutdown)

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except Exception as error:  # NVMLError, a module of another age: of no interest to the training
            self._error = self._error or f"{type(error).__name__}: {error}"

    def _open(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml = pynvml
        # by bus address: NVML counts all GPUs of the host, whatever CUDA_VISIBLE_DEVICES hides or sorts
        self._handles = [pynvml.nvmlDeviceGetHandleByPciBusId(bus_id) for bus_id in bus_ids(self._ordinals)]

    def _sample(self) -> None:
        busy = [self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in self._handles]
        memory = [self._nvml.nvmlDeviceGetMemoryInfo(handle) for handle in self._handles]
        if not all(0 <= share <= 1 for share in busy) or not all(0 <= its.used <= its.total > 0 for its in memory):
            raise ValueError(f"busy {busy}, memory {[(its.used, its.total) for its in memory]}")
        with self._lock:
            self._busy, self._samples = self._busy + sum(busy), self._samples + len(busy)
            seen = [self._fullest, *((its.used, its.total) for its in memory)]
            self._fullest = max(reversed(seen), key=lambda its: its[0] / max(its[1], 1))


def gpus_of(ordinals: Sequence[int]) -> Gpus | None:
    """Returns what samples these GPUs; None without any, or without the package."""
    try:
        there = bool(ordinals) and importlib.util.find_spec("pynvml") is not None
    except ValueError:  # a module without a spec: somebody's stand-in
        there = False
    return Gpus(ordinals) if there else None


def bus_ids(ordinals: Iterable[int]) -> list[str]:
    """Returns the GPUs' places on the PCI bus ("0000:3b:00.0") by CUDA's driver; raises OSError if it refuses."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *args: Any) -> None:
        code = getattr(cuda, name)(*args)
        if code:
            raise OSError(f"{name}: CUDA error {code}")

    call("cuInit", 0)  # again: whoever trains on them has done it
    found = []
    for ordinal in ordinals:
        device, text = ctypes.c_int(), ctypes.create_string_buffer(32)
        call("cuDeviceGet", ctypes.byref(device), ordinal)
        call("cuDeviceGetPCIBusId", text, len(text), device)
        found.append(text.value.decode())
    return found


def summary(epochs: Iterable[Sequence[Reading]]) -> str:
    """Returns how busy and how full the GPUs were over epochs, each with a reading of every rank; "" if unknown."""
    ranks: dict[int, list[Reading]] = {}
    for epoch in epochs:
        for rank, reading in enumerate(epoch):
            if reading.get("samples"):
                ranks.setdefault(rank, []).append(reading)
    if not ranks:
        return ""
    busy = {
        rank: sum(each["busy"] * each["samples"] for each in own) / sum(each["samples"] for each in own)
        for rank, own in ranks.items()
    }
    least = min(busy, key=lambda rank: busy[rank])
    mean = sum(busy.values()) / len(busy)
    every = (its for of in ranks.values() for its in of)
    fullest = max(every, key=lambda its: its["memory_gib"] / max(its["total_gib"], 1e-4))
    uneven = f" (rank {least}: {busy[least]:.0%})" if mean - busy[least] >= 0.1 else ""
    text = f"GPU{'s' * (len(ranks) > 1)} busy {mean:.0%}{uneven}"
    text += f", memory {fullest['memory_gib']:.3g} of {fullest['total_gib']:.3g} GiB"
    return text.replace("%", " %")
