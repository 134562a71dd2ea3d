"""Off Horovod: updates that come about otherwise than by a call, a pass and a step; each beside one that is moved."""

from __future__ import annotations

import pytest
from test_convert_ddp import LOOP, WRAP, moved, refused

TWICE = WRAP.replace("named_parameters())", "named_parameters(), backward_passes_per_step=2)")
OPT = "    optimizer.step()\n"
OUT = "for x in d:\n    out = model(x)\n"
PASS = "    out.mean().backward()\n"
NO_GRAD = "    with torch.no_grad():\n        out = model(x)\n"
JUDGE = "def judge():\n    return model(x)\n\n\n"
STEP, CALL, SET = "no backward() behind the step before", "no call of a wrapped model", "gradients that are assigned"


@pytest.mark.parametrize(
    "text, at, reason, twin",
    [
        # the step
        (OUT + "    for p in model.parameters():\n        p.grad = f(p)\n" + PASS + OPT, "p.grad = f", SET,
         ("= f(p)", "= None")),
        (OUT + PASS + "    p.grad.copy_(g)\n" + OPT, "p.grad.copy_", SET, ("copy_(g)", "zero_()")),
        (OUT + PASS + "    setattr(p, 'grad', g)\n" + OPT, "setattr", SET, ("'grad', g", "'rate', g")),
        (OUT + "    g = torch.autograd.grad(out, w)\n" + OPT, OPT, STEP, (OPT, PASS + OPT)),
        (LOOP + "optimizer.step()\n", "optimizer.step()", STEP, ("\noptimizer.step()", "\noptimizer.state_dict()")),
        (OUT + OPT + PASS, OPT, STEP, (OPT + PASS, PASS + OPT)),
        (OUT + PASS + OPT + "    f(p)\n" + OPT, OPT, STEP, ("f(p)\n" + OPT, "f(p)\n")),
        (OUT + "    if out < 3:\n    " + PASS + OPT, OPT, STEP, (OPT, "    " + OPT)),
        (OUT + "    if out < 3:\n    " + PASS + OPT, OPT, STEP,
         (OPT, "    else:\n        (2 * out).backward()\n" + OPT)),
        (OUT + "    if a:\n    " + PASS + "    " + OPT + "    else:\n    " + OPT, "        optimizer.step()", STEP,
         ("else:\n", "else:\n    " + PASS)),
        ("def go(x):\n    optimizer.step()\n\n\n" + OUT + "    go(x)\n", "optimizer.step()", STEP,
         ("    go(x)", PASS + "    go(x)")),
        ("def back(x):\n    if x:\n        x.backward()\n\n\n" + OUT + "    back(out)\n" + OPT, OPT, STEP,
         ("if x:", "with x:")),
        (LOOP + "optimizer.add_param_group({'params': [t]})\n", "add_param_group", "add_param_group",
         ("optimizer.add", "others.add")),
        # the call
        ("for x in d:\n" + NO_GRAD + PASS + OPT, PASS, CALL, ("with torch.no_grad()", "with autocast()")),
        ("@torch.no_grad()\n" + JUDGE + "for x in d:\n    out = judge()\n" + PASS + OPT, PASS, CALL,
         ("@torch.no_grad()\n", "")),
        (JUDGE + "for x in d:\n    with torch.inference_mode():\n        out = judge()\n" + PASS + OPT, PASS, CALL,
         ("torch.inference_mode()", "autocast()")),
        (OUT + PASS + NO_GRAD + PASS + OPT, PASS, CALL, (NO_GRAD, "    out = model(x)\n")),
        ("for x in d:\n    if x:\n        out = model(x)\n" + PASS + OPT, PASS, CALL,
         (PASS, "    else:\n        out = model(-x)\n" + PASS)),
        (OUT + "    if a:\n    " + PASS + PASS + OPT, PASS, CALL, (PASS + PASS, PASS + "    else:\n    " + PASS)),
    ],
)  # fmt: skip
def test_updates_that_are_none_of_ddp(text: str, at: str, reason: str, twin: tuple[str, str]) -> None:
    found = refused(TWICE + text)
    lines = (TWICE + text).splitlines(True)
    assert any(at in lines[line - 1] and reason in said for line, said in found), found
    assert twin[0] in text
    moved(TWICE + text.replace(*twin))


@pytest.mark.parametrize(
    "body",
    [
        "    if bad(x):\n        continue\n    model(x).backward()\n" + OPT,
        "    try:\n        out = model(x)\n    finally:\n        f()\n" + PASS + OPT,
        "    out = 0\n    for y in x:\n        out += model(y)\n" + PASS + OPT,
        "    with cast(model(x)) as out:\n    " + PASS + "    if ok: optimizer.step()\n",
        "    out = model(x); f(out)\n    scaler.scale(out).backward()\n    scaler.step(optimizer)\n",
    ],
)
def test_ways_on_which_call_pass_and_step_stand(body: str) -> None:
    moved(WRAP + "for x in d:\n" + body)


def test_a_function_is_followed_to_what_it_returns_and_to_its_callers() -> None:
    near = "def near(x):\n    if x:\n        return model(x)\n    return model(-x)\n\n\n"
    back = "def back(out):\n    scaler.scale(out).backward()\n\n\n"
    loop = "for x in d:\n    out = near(x)\n    back(out)\n" + OPT
    moved(WRAP + near + back + loop)
    assert CALL in refused(WRAP + near.replace("model(-x)", "-x") + back + loop)[0][1]
    assert CALL in refused(WRAP + near + back + loop.replace("    out = near(x)\n", ""))[0][1]
