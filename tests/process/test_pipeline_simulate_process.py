"""The simulator against longest paths, against real threads that wait on a clock, and by hand."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from stub_pipelines import stage

from hvdtrain.pipeline.plan.costs import Link, Pool
from hvdtrain.pipeline.plan.schedule import REMATS, SCHEDULES, Action, actions, micro_batch_sizes, recomputed
from hvdtrain.pipeline.plan.simulate import simulate
from hvdtrain.pipeline.values.threads import FairSemaphore

# ---- real threads


class StubPipeline:
    """A thread a stage, and one for each direction of a link; their work is to wait on the clock."""

    def __init__(self, stages, sizes, schedule, remat, link: Link, slots: int) -> None:
        self.stages, self.sizes, self.link = stages, sizes, link
        self.turns = FairSemaphore(slots or len(stages))
        self.orders = [actions(schedule, k, len(stages), len(sizes)) for k in range(len(stages))]
        self.again = [recomputed(remat, order) for order in self.orders]
        self.arrived = {(k, action): threading.Event() for k, order in enumerate(self.orders) for action in order}
        self.lanes: dict[tuple[int, int], SimpleQueue] = {}
        for k in range(len(stages) - 1):
            self.lanes[k, k + 1], self.lanes[k + 1, k] = SimpleQueue(), SimpleQueue()

    def seconds(self) -> float:
        """Of one step."""
        for action in self.orders[0]:
            if action.kind == "forward":
                self.arrived[0, action].set()
        threads = [threading.Thread(target=self.work, args=(k,)) for k in range(len(self.stages))]
        movers = [threading.Thread(target=self.move, args=lane) for lane in self.lanes]
        start = time.perf_counter()
        for thread in (*threads, *movers):
            thread.start()
        for thread in threads:
            thread.join()
        took = time.perf_counter() - start
        for lane in self.lanes.values():
            lane.put(None)
        for mover in movers:
            mover.join()
        return took

    def work(self, k: int) -> None:
        one = self.stages[k]
        for action in self.orders[k]:
            if not self.arrived[k, action].wait(timeout=20):
                return
            size, forward = self.sizes[action.micro], action.kind == "forward"
            again = not forward and action.micro in self.again[k]
            with self.turns.taken():
                # not a wait for something: the sleep is the stage's work
                time.sleep((one.forward_s(size) if forward or again else 0) + (0 if forward else one.backward_s(size)))
            to = k + (1 if forward else -1)
            if to == len(self.stages):
                self.arrived[k, Action("backward", action.micro)].set()
            elif to >= 0:
                self.lanes[k, to].put(action)

    def move(self, source: int, target: int) -> None:
        while (action := self.lanes[source, target].get()) is not None:
            size = self.stages[min(source, target)].output_bytes(self.sizes[action.micro])
            time.sleep(self.link.seconds(size))  # the transfer
            self.arrived[target, action].set()


ROUNDS = 20  # of a second each
STUBS = [
    # stages (forward, backward, output), batch, micro-batches, slots
    ([(0.010, 0.020, 0)], 8, 4, 0),
    ([(0.010, 0.020, 1), (0.012, 0.018, 0)], 8, 1, 0),
    ([(0.010, 0.020, 1), (0.006, 0.015, 0)], 10, 4, 0),
    ([(0.012, 0.020, 1), (0.012, 0.020, 0)], 16, 16, 0),
    ([(0.010, 0.012, 2), (0.012, 0.020, 1), (0.009, 0.021, 0)], 11, 5, 0),
    ([(0.012, 0.024, 1), (0.010, 0.020, 2), (0.014, 0.020, 0)], 16, 16, 0),
    ([(0.010, 0.021, 1), (0.012, 0.020, 1), (0.009, 0.023, 0)], 12, 6, 2),
    ([(0.012, 0.024, 1), (0.010, 0.020, 2), (0.014, 0.020, 0)], 9, 9, 1),
]


def settings_of_stubs():
    for at, (spec, batch, micro_batches, slots) in enumerate(STUBS):
        one = [stage(*numbers, pool="cpu") for numbers in spec]
        sizes = micro_batch_sizes(batch, micro_batches)
        yield one, sizes, SCHEDULES[at % 2], REMATS[at % 3], Link(0.002, 500.0), slots


def off_by(measured: float, predicted: float) -> float:
    return abs(measured / predicted - 1)


def with_slots(slots: int) -> dict[str, Pool]:
    return {"cpu": Pool((1.0,) * 3, slots)}


def test_threads_take_as_long_as_simulated():
    """Within 5 %, for 1-3 stages and 1-16 micro-batches.

    A busy machine only makes threads late, so a case's shortest time counts, of as many rounds as it needs. A wrong
    prediction stays wrong: too low for any round, or too high for the first.
    """
    cases = list(settings_of_stubs())
    predicted = [
        simulate(one, sizes=sizes, schedule=schedule, remat=remat, links=link, pools=with_slots(slots)).step_s
        for one, sizes, schedule, remat, link, slots in cases
    ]
    rounds = []
    with ThreadPoolExecutor(len(cases)) as pool:
        for _ in range(ROUNDS):
            rounds.append(list(pool.map(lambda case: StubPipeline(*case).seconds(), cases)))
            measured = [min(column) for column in zip(*rounds, strict=True)]
            wrong = [off_by(*pair) for pair in zip(measured, predicted, strict=True)]
            if max(wrong) < 0.05:
                break
    assert max(wrong) < 0.05, list(zip(measured, predicted, strict=True))
    # negative twins: without the links, the recomputation or the slots, the prediction is off
    for (one, sizes, schedule, remat, link, slots), seconds in zip(cases, measured, strict=True):
        right = {"remat": remat, "links": link, "pools": with_slots(slots)}
        other: list[dict] = [{**right, "remat": "never"}] if remat == "all" else []
        other += [{**right, "links": Link()}] if len(sizes) == 1 else []
        other += [{**right, "pools": with_slots(0)}] if slots else []
        for changed in other:
            assert off_by(seconds, simulate(one, sizes=sizes, schedule=schedule, **changed).step_s) > 0.05
