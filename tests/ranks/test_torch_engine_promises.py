"""Every engine keeps every promise: one program of promises, one matrix of engines, no cell empty."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch_cases
from harness import Result, run_ranks
from limits import Limit

from hvdtrain.comm import engines

PROGRAM = "loops.py"  # which runs the cases of both
PROMISES = [*torch_cases.names("engine_promises.py"), *torch_cases.names(PROGRAM)]
# launcher and ranks
ENGINES = {
    "horovod": ("forked horovodrun", 2), "ddp": ("forked torchrun", 2), "deepspeed": ("forked torchrun", 2),
    "dataparallel": ("forked", 1), "solo": ("forked", 1),
}  # fmt: skip
OF_AN_ENGINE = (  # what each engine does in its own way: ordinary on ddp as well; the rest of the table is thorough
    "case_uneven_tails_accumulation_clipping_and_the_loss", "case_accumulation_without_a_loader_is_a_mean",
    "case_gradient_hooks_see_what_one_process_sees", "case_a_bare_backward_is_refused",
    "case_a_parameter_without_a_gradient_here_or_anywhere", "case_a_layer_frozen_within_an_update_is_refused",
    "case_an_overflow_on_one_rank_skips_the_step_on_all",
)  # fmt: skip
ROWS = {
    "T1": ("loss.backward() before and after optimizer.backward()", "case_a_bare_backward_is_refused", "refused"),
    "T2": ("model.training_step(x, y) and model.backbone(x), a rank without samples",
           "case_methods_and_parts_leave_no_trace_of_an_empty_batch", "no trace in running statistics"),
    "T2b": ("sync_batchnorm through a method, a rank without samples",
            "case_synchronised_statistics_through_a_method_with_an_empty_rank", "as one process"),
    "T2c": ("amp through a method of the model", "case_mixed_precision_reaches_methods",
            "methods compute under autocast; parts called by themselves are refused"),
    "T6": ("a gradient hook on ddp", "case_gradient_hooks_see_what_one_process_sees", "sees the gradient of the loss"),
    "T9": ("a layer frozen between micro-batches", "case_a_layer_frozen_within_an_update_is_refused", "refused"),
    "T19c": ("the standard DCGAN loop", "case_the_standard_loop_of_a_gan", "as one process"),
    "T19e": ("complex parameters", "case_complex_parameters", "as one process"),
    "T20a": ("two optimizers of a model (Muon and AdamW), with schedulers and checkpoints",
             "case_two_optimizers_step_as_one_and_are_restored", "as one process"),
    "T20b": ("step(closure): LBFGS with a line search, SAM", "case_closures_lbfgs_and_sam", "as one process"),
    "T20c": ("several updates of a batch", "case_several_updates_a_batch", "as one process; samples count once"),
    "T20d": ("weights moved along the gradient, and the gradient taken there",
             "case_gradients_in_place_of_those_that_are_there", "as one process, with again=True"),
    "T20e": ("updates that are skipped, by the norm of the gradient", "case_updates_that_are_skipped",
             "optimizer.skip(); refused if one rank skips"),
    "T20f": ("a GradScaler of one's own, an overflow on one rank", "case_a_gradient_scaler_of_ones_own",
             "as one process"),
    "T20g": ("fp16, an overflow in one rank's forward pass", "case_an_overflow_of_the_forward_pass_skips",
             "all ranks skip the update"),
    "T20h": ("add_param_group of layers that are thawed", "case_layers_that_join_later", "as one process"),
    "T20i": ("a loss with parameters", "case_a_loss_with_parameters", "as one process, as a part of the model"),
    "T20j": ("two losses from one forward pass", "case_two_losses_of_one_forward_pass",
             "as one process, with retain_graph=True"),
    "T20k": ("a model that torch.compile gave", "case_a_model_that_was_compiled_before", "as one process, plain names"),
    "T19f": ("a reentrant checkpoint", "case_recomputed_layers_are_exact", "as one process"),
}  # fmt: skip


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, Result]:
    """What each engine made of the promises that are asked for."""
    here = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    specs = [getattr(item, "callspec", None) for item in here]
    found = {}
    for engine, (launcher, ranks) in ENGINES.items():
        mine = [its.params for its in specs if its is not None and its.params.get("engine") == engine]
        asked = {its["promise"] for its in mine if "promise" in its}
        if asked:
            program = [Path(torch_cases.FOLDER) / PROGRAM, engine, *sorted(asked)]
            found[engine] = run_ranks(program, ranks, launcher=launcher, timeout_s=300)
    return found


def cells() -> list[Any]:
    """Returns each engine with each promise; those that other engines keep in the same way are thorough."""
    found = []
    for engine, promise in itertools.product(ENGINES, PROMISES):
        ordinary = engine == "horovod" or (engine == "ddp" and promise in OF_AN_ENGINE)
        found.append(pytest.param(engine, promise, marks=[] if ordinary else [pytest.mark.thorough]))
    return found


@pytest.mark.parametrize(("engine", "promise"), cells())
def test_an_engine_keeps_a_promise(engine: str, promise: str, results: dict[str, Result], limit: Limit) -> None:
    assert promise in torch_cases.passed(results[engine].out), results[engine].text
    for row, (attack, kept, now) in ROWS.items():
        if kept == promise:
            refused = "ConfigError, with the line to write" if now == "refused" else None
            limit(row, f"{attack}, {engine}", refused=refused, mended=None if refused else now)


def test_no_cell_is_empty() -> None:
    assert {name for name, kind in engines.ENGINES.items() if "torch" in kind.frameworks} == set(ENGINES)
    assert len(PROMISES) >= 17 and {*OF_AN_ENGINE, *(promise for _, promise, _ in ROWS.values())} <= set(PROMISES)


@pytest.mark.parametrize("engine", ["horovod", pytest.param("ddp", marks=pytest.mark.thorough)])
def test_a_rank_whose_backward_pass_failed_does_not_go_on_beside_one_that_waits(engine: str) -> None:
    launcher, ranks = ENGINES[engine]
    done = run_ranks([torch_cases.FOLDER / "one_backward_fails.py", engine], ranks, launcher=launcher, timeout_s=90)
    assert done.returncode not in (0, None) and "has updated" not in done.text, done.text
    assert "rank 1 tries again after out of luck" in done.text, done.text
    assert "a failed backward() cannot be retried" in done.ranks_error[1], done.text
    # The launcher ends rank 0 when rank 1 has ended, at times before rank 0 has written why it does not go on.
    waited = done.ranks_error.get(0, "")
    assert "Error" not in waited or "every rank must take part until the end" in waited, done.text
