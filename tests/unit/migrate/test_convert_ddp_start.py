"""Off Horovod: what the old and the new script begin with, and where that is not the same."""

from __future__ import annotations

import pytest
from test_convert_ddp import LOOP, WRAP, moved, refused

from hvdtrain.migrate.convert import convert
from hvdtrain.migrate.script.plan import DDP

WHOLE = "model.parameters()"
SENT = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"
FROZEN = "for p in twin.parameters():\n    p.requires_grad = False\n"


def of(parameters: str, before: str = "") -> str:
    return (WRAP + SENT + LOOP).replace(
        f"optimizer = torch.optim.SGD({WHOLE}", f"{before}optimizer = torch.optim.SGD({parameters}"
    )


def notes(text: str) -> list[str]:
    moved(text)
    return [f"{note.line}: {note.text}" for note in convert(text, DDP).notes]


@pytest.mark.parametrize(
    "parameters, before, kind",
    [
        ("model.head.parameters()", "", "a part"),
        ("model[0].parameters()", "", "a part"),
        ("head", "head = [p for n, p in model.named_parameters() if 'head' in n]\n", "a part"),
        ("filter(is_head, model.parameters())", "", "a part"),
        ("(p for p in model.parameters() if p.ndim > 1)", "", "a part"),
        ("other.parameters()", "", "others"),
        ("[*model.parameters(), t]", "", "others"),
        ("list(model.parameters()) + list(other.parameters())", "", "others"),
        ("[{'params': model.parameters()}, {'params': [t]}]", "", "others"),
        ("groups", "groups = [{'params': model.parameters()}, {'params': other.parameters(), 'lr': 1}]\n", "others"),
    ],
)
def test_an_optimizer_of_other_parameters_than_the_models_is_refused(parameters: str, before: str, kind: str) -> None:
    [(line, reason)] = refused(of(parameters, before))
    assert line == 6 + before.count("\n") and f"an optimizer of {kind}" in reason


@pytest.mark.parametrize(
    "parameters, before, said",
    [
        (WHOLE, "", False),
        (f"list({WHOLE})", "", False),
        (f"[*{WHOLE}]", "", False),
        (f"filter(lambda p: p.requires_grad, {WHOLE})", "", False),
        ("learn", f"learn = [p for p in {WHOLE} if p.requires_grad]\n", False),
        (f"[{{'params': {WHOLE}}}]", "", False),
        ("[{'params': model.weight_.parameters()}, {'params': model.bias_.parameters()}]", "", True),
        ("groups(0.1)", "", True),
        ("those", f"those = list({WHOLE})\nthose.extend(more())\n", True),
    ],
)
def test_an_optimizer_of_all_and_one_of_which_it_cannot_be_told(parameters: str, before: str, said: bool) -> None:
    found = notes(of(parameters, before))
    assert [f"{6 + before.count(chr(10))}: whether these are all parameters of model" in one for one in found] == (
        [True] if said else []
    )


def test_weights_of_another_rank_are_broadcast_before_the_model_is_wrapped() -> None:
    late = SENT.replace("=0", "=1")
    [(line, reason)] = refused(WRAP + late + LOOP)
    assert line == 8 and "root_rank=1" in reason
    assert "broadcast_state(model.state_dict(), 1)\n" in moved(
        WRAP.replace("optimizer = hvd", f"{late}optimizer = hvd") + LOOP
    )
    [(line, _)] = refused(f"{WRAP}def send():\n    {late}\n\nsend()\n{LOOP}")
    assert line == 9


def test_weights_that_nobody_broadcasts_are_told() -> None:
    assert "7: nothing broadcasts the whole of model" in notes(WRAP + LOOP)[0]
    assert "7: nothing broadcasts" in notes(WRAP + SENT.replace("model.", "model.head.") + LOOP)[0]
    assert notes(WRAP + SENT + LOOP) == []


def test_state_that_horovod_forgets_is_told() -> None:
    text = WRAP + SENT + LOOP
    early = text.replace("optimizer = hvd", "optimizer.load_state_dict(s)\noptimizer = hvd")
    assert ["7: Horovod's DistributedOptimizer begins without the state" in one for one in notes(early)] == [True]
    assert notes(text.replace(SENT, SENT + "optimizer.load_state_dict(s)\n")) == []
    schedule = text.replace("optimizer = hvd", "s = torch.optim.lr_scheduler.StepLR(optimizer, 2)\noptimizer = hvd")
    assert notes(schedule) == []
    later = notes(schedule.replace(SENT, SENT + "optimizer.load_state_dict(s)\n"))
    assert ["7: optimizer.load_state_dict parted" in one for one in later] == [True]


@pytest.mark.parametrize(
    "name", ["HOROVOD_RANK", "HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK"]
)
def test_variables_of_horovodruns_are_refused(name: str) -> None:
    [(line, reason)] = refused(f"{WRAP}{SENT}{LOOP}rank = int(os.environ['{name}'])\n")
    assert line == 13 and name in reason and "LOCAL_RANK" in reason
    moved(f"{WRAP}{SENT}{LOOP}rank = int(os.environ['MY_{name}'])\nuses = 'no {name}'\n")


def test_copies_may_be_frozen_and_the_model_may_not() -> None:
    text = WRAP + SENT + LOOP
    moved(text.replace(LOOP, f"twin = copy.deepcopy(model)\n{FROZEN}twin.requires_grad_(False)\n{LOOP}"))
    for made in ("model", "build(model)", "copy.deepcopy(model)\ntwin = model"):
        assert any("frozen" in reason for _, reason in refused(text + f"twin = {made}\n{FROZEN}"))
    own = "twin = copy.deepcopy(model)\n" + FROZEN.replace("    p.", "    other.")
    assert any("frozen" in reason for _, reason in refused(text + own))
    late = "for p in model.parameters():\n    setattr(p, 'requires_grad', False)\n"
    assert any(line == 14 and "frozen" in reason for line, reason in refused(text + late))
    moved(text + late.replace("False", "True"))
