"""A data worker whose parent is killed between the fork and the first look at the parent; prints whether it ends."""

from __future__ import annotations

import os
import select
import signal

from torch.utils.data import DataLoader

from hvdtrain.torch.data import processes

LIMIT_S = 20  # PyTorch's workers look every 5 s
ended, held = os.pipe()  # the worker holds its end as long as it lives
OWN = processes._Watchdog


class Late(OWN):
    def __init__(self) -> None:
        parent = os.getppid()
        os.kill(parent, signal.SIGKILL)
        while os.getppid() == parent:
            pass
        super().__init__()


processes._Watchdog = Late  # type: ignore[misc]
reader = os.fork()
if reader == 0:
    os.close(ended)
    for _ in DataLoader(range(8), num_workers=1, multiprocessing_context=processes.WorkerContext()):  # type: ignore[arg-type]
        pass
os.close(held)
os.waitpid(reader, 0)
ready, _, _ = select.select([ended], [], [], LIMIT_S)
print("the worker has ended" if ready else "the worker is left", flush=True)
