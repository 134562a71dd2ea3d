"""pipeline_resnet several times in one process, as its arguments (a JSON list of lists) say: a JSON line each.

Arguments that begin with "interrupt" get Ctrl-C in the middle of a step, while a stage's thread computes the loss.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import signal
import sys
import threading
from typing import Any

import torch

from hvdtrain import pipeline_resnet

mse = torch.nn.functional.mse_loss


def interrupting(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if threading.current_thread() is not threading.main_thread():
        os.kill(os.getpid(), signal.SIGINT)
    return mse(output, target)


def run(arguments: list[str]) -> dict[str, Any]:
    interrupt = arguments[0] == "interrupt"
    torch.nn.functional.mse_loss = interrupting if interrupt else mse
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = pipeline_resnet.main(arguments[interrupt:])
        except SystemExit as end:
            code = end.code
    gc.collect()  # those of a pipeline end with it
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return {"code": code, "out": out.getvalue(), "err": err.getvalue(), "threads": threads}


for arguments in json.loads(sys.argv[1]):
    print(json.dumps(run(arguments)), flush=True)
