"""Takes the place of the module `pynvml` of nvidia-ml-py: a host of two GPUs, the second of which is the busy one."""

from __future__ import annotations

import ctypes
import threading
from types import ModuleType
from typing import Any

IDLE, BUSY = "0000:17:00.0", "0000:3b:00.0"
GIB = 2**30


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


class StandIn(ModuleType):
    """The functions that hvdtrain uses, named, called and failing as NVIDIA's.

    Args:
        broken: the function that fails, with NVML's error for a driver too old.
        busy: of the busy GPU in percent, one answer after the other; the last one stays.
    """

    class NVMLError(Exception):
        """As nvidia-ml-py has it: the number is its value."""

        def __init__(self, value: int) -> None:
            self.value = value

        def __str__(self) -> str:
            return "Driver/library version mismatch"

    def __init__(self, broken: str = "", busy: tuple[int, ...] = (41,)) -> None:
        super().__init__("pynvml")
        self.broken, self.busy = broken, list(busy)
        self.calls: list[str] = []
        self.open = 0
        self.asked = threading.Semaphore(0)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.broken:
            raise self.NVMLError(18)
        if name != "nvmlInit" and not self.open:
            raise self.NVMLError(1)

    def nvmlInit(self) -> None:
        self._called("nvmlInit")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self._called("nvmlShutdown")
        self.open -= 1

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> Any:
        self._called("nvmlDeviceGetHandleByPciBusId")
        assert bus_id in (IDLE, BUSY)
        return ctypes.c_char_p(bus_id.encode())

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> _Utilization:
        self._called("nvmlDeviceGetUtilizationRates")
        self.asked.release()
        if handle.value.decode() == IDLE:
            return _Utilization(0, 0)
        return _Utilization(self.busy.pop(0) if len(self.busy) > 1 else self.busy[0], 0)

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> _Memory:
        self._called("nvmlDeviceGetMemoryInfo")
        used = 12 * GIB if handle.value.decode() == BUSY else GIB
        return _Memory(24 * GIB, 24 * GIB - used, used)
