"""Who is in an elastic job: the same whatever happens, in whatever order."""

from __future__ import annotations

import signal

from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.cluster.hosts.hosts import Host, assign
from hvdtrain.cluster.launch import members as actions
from hvdtrain.cluster.launch.members import (
    MOST_FORMATIONS,
    SECONDS_TO_BREAK,
    SECONDS_TO_END,
    SECONDS_TO_LEAVE,
    SECONDS_TO_SETTLE,
    Limits,
    Members,
)

HOSTS = [Host("a", 2), Host("b", 2), Host("c", 3)]


class World:
    """What is outside: processes, hosts and a clock. Does what it is told, and checks each formation."""

    def __init__(self, np: int, limits: Limits, hosts: list[Host] = HOSTS) -> None:
        slots = assign(hosts, np)
        self.limits, self.hosts, self.now = limits, hosts, 0.0
        self.members = Members(slots, hosts, limits)
        self.alive = {slot.rank: slot.host.name for slot in slots}
        self.dying: dict[int, str] = {}
        self.slot = {slot.rank: slot.local_rank for slot in slots}
        self.waiting: set[int] = set()  # said so, and nothing came
        self.starting: set[int] = set()
        self.formation = tuple(range(np))
        self.reaching: list[str] = []
        self.serving: actions.Serve | None = None
        self.regroup = self.broken = False
        self.shut: set[int] = set()  # who waits where no new ones can come in
        self.failed = ""
        self.numbers = set(self.alive)
        self.said: list[actions.Action] = []

    def do(self, todo: list[actions.Action]) -> list[actions.Action]:
        for action in todo:
            assert not self.failed, "something is to be done after the job has failed"
            self.said.append(action)
            match action:
                case actions.StartWorker(number, host, slot):
                    self.start(number, host, slot)
                case actions.Signal(number, sent):
                    assert sent in ((signal.SIGKILL,) if number in self.dying else (signal.SIGKILL, signal.SIGTERM))
                    self.dying[number] = self.dying.get(number) or self.alive.pop(number)
                    self.forget(number)
                case actions.ReachHost(host):
                    self.reaching.append(host.name)
                case actions.Serve():
                    assert action.host == action.slots[0].host.name
                    self.serving = action
                case actions.Say(number, message):
                    assert number in self.alive
                    self.regroup |= message["do"] == "regroup"
                    self.broken |= message["do"] == "abort"
                case actions.Formed():
                    self.check(action)
                case actions.Fail(why):
                    self.failed = why
        return todo

    def start(self, number: int, host: Host, slot: int) -> None:
        assert number not in self.numbers, "a number comes again"
        assert host in self.hosts
        living = self.alive | self.dying
        taken = [self.slot[number] for number, name in living.items() if name == host.name]
        assert len(taken) < host.slots and slot not in taken and slot < host.slots, "a slot is given twice"
        self.slot[number] = slot
        self.numbers.add(number)
        self.starting.add(number)
        self.alive[number] = host.name

    def forget(self, number: int) -> None:
        self.alive.pop(number, None)
        self.waiting.discard(number)
        self.starting.discard(number)

    def check(self, formed: actions.Formed) -> None:
        numbers, slots = formed.numbers, formed.slots
        assert len(set(numbers)) == len(numbers) == len(slots)
        assert len(numbers) <= self.limits.maximum
        if self.shut & set(self.alive):
            assert set(numbers) <= set(self.formation)
            assert len(numbers) + len(self.waiting - set(numbers)) >= self.limits.minimum, "with those who wait to join"
        else:
            assert len(numbers) >= self.limits.minimum
        assert set(numbers) <= self.waiting, "a member is dead, or has not left the last formation"
        left = [number for number in self.formation if number in self.alive]
        assert set(left) <= self.waiting, "one of the last formation is still in it"
        assert numbers[0] in left, "rank 0 has nothing to begin with"
        hosts = list(dict.fromkeys(slot.host.name for slot in slots))
        on = {name: [number for number in numbers if self.alive[number] == name] for name in hosts}
        assert [number for name in hosts for number in on[name]] == list(numbers), "a host's ranks are not together"
        for rank, (number, slot) in enumerate(zip(numbers, slots, strict=True)):
            own = on[self.alive[number]]
            across = [name for name in hosts if len(on[name]) > slot.local_rank]
            assert (slot.rank, slot.size) == (rank, len(numbers))
            assert (slot.local_rank, slot.local_size) == (own.index(number), len(own))
            assert (slot.cross_rank, slot.cross_size) == (across.index(slot.host.name), len(across))
        for its in on.values():  # survivors first, in their order
            assert [number for number in its if number in left] == its[: sum(number in left for number in its)]
            kept = [number for number in its if number in left]
            assert kept == [number for number in left if number in kept]
        self.formation = numbers
        self.shut.clear()
        self.waiting -= set(numbers)
        self.regroup = self.broken = False
        self.serving = None

    # ---- what may happen

    def lose(self, number: int, *, gone: bool = True) -> None:
        """It has ended, or (not gone) is only stopped."""
        self.broken |= number in self.formation
        if gone:
            self.forget(number)
        self.do(self.members.lost([number], self.now, why="killed", gone=gone))

    def wait(self, number: int, *, joinable: bool = True) -> None:
        """It says that it waits; where not all are joinable no new ones may come in."""
        self.now += SECONDS_TO_SETTLE
        self.waiting.add(number)
        if number in self.starting:
            self.starting.remove(number)
            self.do(self.members.waits(number, 0, self.now))
        else:
            self.shut |= set() if joinable else {number}
            self.do(self.members.waits(number, self.members.formation, self.now, joinable=joinable))

    def later(self, seconds: float) -> None:
        self.now += seconds
        if not self.failed:
            self.do(self.members.tick(self.now))

    def lose_host(self, name: str) -> None:
        for number in [number for number, host in self.alive.items() if host == name]:
            self.forget(number)
            self.broken |= number in self.formation
        self.dying = {number: host for number, host in self.dying.items() if host != name}
        self.do(self.members.host_gone(name, self.now, why="off"))

    def served(self) -> None:
        if self.serving is not None:
            self.do(self.members.served(self.serving.serial, "10.0.0.1", 1, self.now))

    def in_formation(self) -> list[int]:
        return [number for number in self.formation if number in self.alive and number not in self.waiting]

    def step(self, what: int, which: int) -> None:
        """One thing, of those that can happen now."""
        alive, inside = sorted(self.alive), self.in_formation()

        def pick(some: list[int]) -> int:
            return some[which % len(some)]

        if what == 0 and alive:
            self.lose(pick(alive), gone=which < 10)
        elif what in (1, 2, 3) and (self.regroup or self.broken) and inside:
            self.wait(pick(inside), joinable=self.regroup or which < 15)
        elif what in (4, 5) and self.starting:
            self.wait(pick(sorted(self.starting)))
        elif what in (6, 7):
            self.served()
        elif what == 8 and not self.broken and len(inside) == len(self.formation):
            self.do(self.members.updated(self.members.formation, self.now))
        elif what == 9 and self.reaching:
            self.do(self.members.host_there(self.reaching.pop(), self.now))
        elif what == 10 and self.reaching:
            self.do(self.members.host_gone(self.reaching.pop(), self.now, why="refused"))
        elif what == 11:
            self.lose_host(HOSTS[which % 3].name)
        elif what == 12:
            self.hosts = [host for index, host in enumerate(HOSTS) if which >> index & 1]
            self.do(self.members.offered(self.hosts, self.now))
        elif what == 13 and self.dying:
            number = pick(sorted(self.dying))
            del self.dying[number]
            self.do(self.members.gone(number, self.now))
        elif what == 14:
            self.do(self.members.answered(self.now))
        elif what == 15:
            self.later(which)
        elif what == 16 and self.serving is not None:
            late = self.members.served(self.serving.serial - 1, "10.0.0.1", 1, self.now)
            assert late == [], "a rendezvous that was asked for before, and served others"
        elif what == 17:
            for number in inside if self.regroup or self.broken else []:
                self.wait(number)
        elif what == 18:
            self.settle(2)

    def settle(self, rounds: int = 40) -> None:
        """All do what they can."""
        for _ in range(rounds):
            for what in (13, 9, 4, 1, 6, 14):
                for _ in range(8):
                    if not self.failed:
                        self.step(what, 0)
            self.later(1)


# often: a loss, all that leave but the answer of the rendezvous, and everything until it is whole again
OFTEN = [*range(17), 0, 0, 13, *[17] * 6, *[18] * 6]
STEPS = st.lists(st.tuples(st.sampled_from(OFTEN), st.integers(0, 20)), max_size=60)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 7), st.integers(1, 4), st.integers(0, 3), STEPS)
def test_every_formation_is_sound_whatever_happens(np, minimum, more, steps):
    world = World(np, Limits(min(minimum, np), max(np, np + more), 600.0, open=True))
    for what, which in steps:
        if not world.failed:
            world.step(what, which)
    world.settle()
    # and none waits for ever: the present formation is whole, or too few are left
    whole = set(world.formation) <= set(world.alive) and not world.waiting & set(world.formation)
    few = len(world.in_formation()) + len(world.waiting) < world.limits.minimum
    assert world.failed or whole or few, (world.formation, world.alive, world.waiting)


def small(np: int = 3, minimum: int = 1, **limits: object) -> World:
    return World(np, Limits(minimum, 4, **limits), [Host("a", 2), Host("b", 2)])  # type: ignore[arg-type]


def test_survivors_go_on_and_the_lost_one_is_replaced():
    world = small()
    world.do(world.members.answered(0))
    world.do(world.members.updated(1, 0))
    assert [number for number in world.alive] == [0, 1, 2, 3], "the fourth slot is used"
    world.lose(0)
    assert {action.number for action in world.said if isinstance(action, actions.Say)} == {1, 2}, "abort"
    assert 4 in world.alive, "its slot is used again"
    world.wait(1)
    assert world.serving is None
    world.wait(2)
    world.served()
    assert world.formation == (1, 2)
    world.wait(3)
    assert not world.regroup, "another one is on its way"
    world.wait(4)
    assert world.regroup
    world.wait(1)
    world.wait(2)
    world.served()
    assert world.formation == (1, 4, 2, 3), "hosts in the order of their first survivor, survivors first"


def test_fewer_than_the_minimum_are_borne_for_a_while():
    world = small(minimum=3, timeout_s=100.0, open=True)
    world.do(world.members.answered(0))
    world.lose(2)
    for number in (0, 1):
        world.wait(number)
    world.now = 99.0
    world.do(world.members.tick(99.0))
    assert world.serving is None and not world.failed
    world.do(world.members.tick(101.0))
    assert "--elastic-timeout" in world.failed


def test_a_host_whose_members_are_lost_again_and_again_waits_longer_each_time():
    world = World(3, Limits(1, 3), [Host("a", 2), Host("b", 1)])
    world.do(world.members.answered(0))
    waits = []
    for _ in range(6):
        world.lose(max(world.formation))
        began = world.now
        while max(world.alive) <= max(world.formation):
            world.later(0.5)
        waits.append(world.now - began)
        for number in (max(world.alive), 0, 1):
            world.wait(number)
        world.later(1)
        world.served()
        assert len(world.formation) == 3
    assert waits == [0, 1, 2, 4, 8, 16], "the first one had trained"
    world.do(world.members.updated(world.members.formation, world.now))
    world.lose(max(world.formation))
    assert "b" in world.alive.values(), "there was an update: the next one starts at once"


def test_a_new_worker_that_never_comes_makes_room_for_another():
    world = World(2, Limits(2, 3, start_s=100.0), [Host("a", 3)])
    world.do(world.members.answered(0))
    (slow,) = set(world.alive) - set(world.formation)
    world.later(99)
    assert slow in world.alive and not world.members.workers[slow].member
    world.later(1)
    assert slow not in world.alive and world.formation == (0, 1)
    del world.dying[slow]
    world.do(world.members.gone(slow, world.now))
    world.later(1)
    assert len(world.alive) == 3, "another one"


def test_a_worker_that_does_not_end_when_it_is_told_to_is_killed():
    world = World(1, Limits(1, 3), [Host("a", 3)])
    world.do(world.members.answered(0))
    its = max(world.alive)
    world.do(world.members.offered([Host("a", 2)], world.now))
    world.later(0)
    world.later(SECONDS_TO_END - 1)
    assert world.said[-1] == actions.Signal(its, signal.SIGTERM)
    world.later(1)
    assert world.said[-1] == actions.Signal(its, signal.SIGKILL)
    count = len(world.said)
    world.later(1)
    assert len(world.said) == count, "once"


def test_new_workers_cannot_go_on_where_nobody_has_given_them_what_was_trained():
    world = World(1, Limits(1, 3), [Host("a", 3)])
    world.do(world.members.answered(0))
    world.settle()
    assert len(world.formation) == 3
    world.lose(0)
    for number in world.formation[1:]:
        assert not world.failed
        world.do(world.members.waits(number, world.members.formation, world.now + 1, empty=True))
    assert "training state" in world.failed


def test_ten_formations_without_an_update_are_the_end():
    world = World(6, Limits(1, 6, open=True), [Host(name, 1) for name in "abcdef"])
    world.do(world.members.answered(0))
    while not world.failed:
        world.lose(world.formation[-1])
        world.settle()
    assert "10 formations" in world.failed and world.members.formation == 1 + MOST_FORMATIONS


def test_who_does_not_leave_is_told_to_and_then_killed():
    world = small()
    world.wait(0)
    assert not world.broken
    world.do(world.members.tick(SECONDS_TO_BREAK + 1))
    assert world.broken, "who is blocked where nothing breaks must be told"
    world.wait(1)
    world.do(world.members.tick(SECONDS_TO_LEAVE - 1))
    assert not world.dying
    world.do(world.members.tick(SECONDS_TO_LEAVE + 1))
    assert list(world.dying) == [2] and world.serving is None, "others may follow"
    world.do(world.members.tick(SECONDS_TO_LEAVE + 2))
    world.served()
    assert world.formation == (0, 1)


def test_a_host_that_is_no_longer_listed_is_left():
    world = small()
    world.hosts = [Host("b", 2)]
    world.do(world.members.offered(world.hosts, 0))
    assert world.regroup
    for number in (0, 1, 2):
        world.wait(number)
    world.served()
    assert world.formation == (2,) and sorted(world.dying) == [0, 1], "ended after the others have formed"


def test_the_end_of_the_program_is_the_end_of_formations():
    world = small()
    world.do(world.members.answered(0))
    world.do(world.members.finished(0, 0))
    assert 3 in world.dying, "a new worker has nothing to join"
    world.lose(1)
    world.wait(2)
    assert 2 in world.dying and world.serving is None
    assert world.members.over and world.members.well
