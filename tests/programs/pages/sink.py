"""An entry point that follows a run: docs/events.md, with a wandb that notes what it is told."""

from types import SimpleNamespace

told = []
run_ = SimpleNamespace(log=lambda *a, **k: told.append((a, k)), finish=lambda exit_code: told.append(exit_code))
wandb = SimpleNamespace(init=lambda project, config: run_)
# the page
sink = Wandb("runs/a", {"config": {"lr": 0.1}})
for event in ({"kind": "step", "step": 3, "loss": 0.5, "lr": 0.1}, {"kind": "epoch", "epoch": 0}):
    sink.event(event)
sink.close("finished")
assert told == [(({"loss": 0.5, "lr": 0.1},), {"step": 3}), False], told
