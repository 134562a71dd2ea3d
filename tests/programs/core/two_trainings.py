"""A training that saves, restores and ends as it is told on standard input; answers each line with one."""

import sys

from blob import state_of
from checkpoint_steps import progress_at

from hvdtrain import Checkpointer, CheckpointError

checkpoints = Checkpointer(sys.argv[1], best=None, keep=2)
for line in sys.stdin:
    command, *step = line.split()
    if command == "restore":
        restored = checkpoints.restore(state_of(0))
        print("restored", restored and restored.step, flush=True)
    else:
        try:
            checkpoints.save(state_of(int(step[0])), progress=progress_at(int(step[0])))
            checkpoints.wait()
            print("saved", flush=True)
        except CheckpointError as error:
            print("refused", error.received, flush=True)
