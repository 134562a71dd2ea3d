"""What was tried against pipelines, in one child process: exact, mended or refused; see programs/pipeline/limits.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import PROGRAMS, run_ranks
from limits import Limit

PROGRAM = PROGRAMS / "pipeline" / "limits.py"
TOLERANCE = 1e-10
Found = dict[str, dict[str, Any]]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> Found:
    result = run_ranks([PROGRAM], 1, timeout_s=400).check()
    lines = [json.loads(line) for line in result.out.splitlines() if line.startswith("{")]
    return {line.pop("check"): line for line in lines}


def refusal(text: str, *parts: str) -> str:
    assert not text.startswith("nothing raised") and "fix: " in text, text
    for part in parts:
        assert part in text, text
    return text


def test_repeated_passes_draw_the_same(found: Found, limit: Limit) -> None:
    received = found["draws"]
    assert max(received.values()) <= TOLERANCE, received
    limit("P1a", "remat, `Dropout(0.)` whose p is raised after the split", exact=received["raised"])
    limit("P1b", "remat, scripted dropout", exact=received["scripted"])
    limit("P1c", "remat, a loss function that draws", exact=received["loss"])
    limit("P1d", "remat, a layer that uses Python's `random`", exact=received["python"])
    limit("P1e", "remat, the model in eval with its dropouts in train", exact=received["eval"])
    assert found["repeats"]["same"]
    said = refusal(found["repeats"]["told"], "other code must not draw")
    assert len(found["repeats"]["warned"]) == 1
    limit("P1f", "another thread draws during a step with remat (a warning without remat)", refused=said)


def test_what_a_trace_fixes(found: Found, limit: Limit) -> None:
    received = found["trace"]
    limit("P2a", "`model.tau = 5` after the split", refused=refusal(received["tau"], "1.tau is 5.0"))
    refusal(received["nested"], "1.nested")
    refusal(received["module"], "1.linear was replaced")
    limit("P2e", "`model.forward = MethodType(...)` before the split", exact=received["replaced_root"])
    assert received["replaced_part"] <= TOLERANCE
    limit("P2f", "the same after the split", refused=refusal(received["forward"], "forward"))
    for harmless in ("unread", "leaf_hook"):
        assert received[harmless].startswith("nothing raised")
    refusal(received["hook_in_call"], "1 has a new hook")
    error, called = received["small"]
    assert error <= TOLERANCE and called
    limit("P2g", "another `tau`, and a hook, after the split of a part with one layer", exact=error)
    assert (
        received["list_left"] == 0
        and received["detached"].startswith("nothing raised")
        and received["detached_left"] > 0
    )
    refusal(received["attribute"], "1.last")
    limit(
        "P2b",
        "a forward that appends a tensor with its graph to `self.aux`",
        refused=refusal(received["list"], "1.aux"),
    )
    limit(
        "P2c",
        "a hook registered after the split on a module that was opened",
        refused=refusal(received["hook"], "hook"),
    )
    unsplit, split, error = received["checkpoint"]
    assert unsplit == split == 2 and error <= TOLERANCE
    refusal(received["checkpoint_root"], "use_reentrant=False", "remat='all'")
    refusal(received["saved_root"], "save_on_cpu", "remat='all'")
    assert received["saved_root_in_one_part"] <= TOLERANCE, "the twin: not followed inside"
    limit("P2d", "`checkpoint(use_reentrant=False)` in a block", mended="runs, as often as unsplit")


def test_what_is_cut(found: Found, limit: Limit) -> None:
    received = found["chunks"]
    assert received["chunk"] <= TOLERANCE
    said = refusal(received["mask"], "chunk=[0, None]")
    refusal(received["later"], "chunk=[0, None]")
    limit("P3a", "an [S, S] mask with S = batch", refused=said)
    limit("P3b", "the same with `chunk=[0, None]`", exact=received["chunk"])
    said = refusal(received["sequence"], "[batch, sequence, ...]")
    limit("P3c", "a sequence-first LSTM, as many steps as samples", refused=said)
    refusal(received["dimension"], "transposes")
    refusal(received["centred"], "outputs must not depend on other samples")
    assert received["norm"].startswith("nothing raised"), "batch-norm is the known exception"


def test_what_the_calling_thread_has_set(found: Found, limit: Limit) -> None:
    received = found["context"]
    assert received["packs"][0] == received["packs"][1] > 0 and received["threads"] == 2
    limit(
        "P4a", "saved-tensor hooks around a step (`save_on_cpu`)", mended="reach every stage: as many packs as unsplit"
    )
    assert received["counted"]
    limit("P4b", "a FLOP counter around a step", refused=refusal(received["flops"], "FlopCounterMode"))
    assert received["seen"] == [["mine", "meta"]]
    limit("P4c", "default device and context variables", mended="are those of the calling thread")
    assert "profile_all_threads" in received["profiler"][0]
    limit("P4d", "torch.profiler around a step", mended="a warning says how it sees the stages")


def test_tied_weights(found: Found, limit: Limit) -> None:
    received = found["tied"]
    limit("P5a", "a tensor hook on a weight of two stages", refused=refusal(received["hook"], "p.grad after the step"))
    limit("P5b", "`load_state_dict(assign=True)`", refused=refusal(received["assign"], "assign=False"))
    assert received["shared"] == 2 and received["norm"] <= TOLERANCE and received["counter"] == 1
    limit("P5c", "batch-norm with affine weights tied across stages: running variance", exact=received["norm"])


def test_buffers_that_move(found: Found, limit: Limit) -> None:
    received = found["buffers"]
    assert received["ema_alone"] <= TOLERANCE
    limit("P6a", "spectral_norm, 3 micro-batches", refused=refusal(received["spectral"], "_u", 'batch_norm="micro"'))
    limit("P6b", "InstanceNorm's running statistics", refused=refusal(received["instance"], "1.running_mean"))
    limit("P6c", "EMA buffers of a user's layer", refused=refusal(received["ema"], "1.ema", 'batch_norm="micro"'))
    assert received["ema_micro"].startswith("nothing raised")


def test_attributes_that_count(found: Found, limit: Limit) -> None:
    received = found["counts"]
    assert received["alone"] == [0, 0] and received["last"].startswith("nothing raised")
    said = refusal(received["number"], "1.number", "3 micro-batches", "micro_batches=1")
    limit("P6d", "a layer that counts its calls in a Python attribute", refused=said)
    refusal(received["mean"], "1.mean")
    assert received["micro"].startswith("nothing raised")
    refusal(received["again"], "1.number", 'remat="never"')
    assert (
        received["list"].startswith("nothing raised")
        and len(received["warned"]) == 1
        and "1.seen" in received["warned"][0]
    )
    limit("P6e", "a layer that appends to a list of its own", mended="a warning says that micro-batches do")


def test_interrupted_starts(found: Found, limit: Limit) -> None:
    received = found["starts"]
    for name in ("ctrl_c", "ctrl_c_before"):
        assert received[name] == [["KeyboardInterrupt: ", 1, 0]] * 3
    for name, fix in (("no_thread", "ulimit -u"), ("at_the_end", "thread.join()")):
        for text, threads, gradients in received[name]:
            assert text.startswith("StageError: each stage") and fix in text and threads == 1 and gradients == 0
    assert received["two_splits_met"] == [], "one at a time: each replaces parts of PyTorch"
    limit("P7a", "Ctrl-C, or no thread to be had, while stage threads start", mended="ends; no thread is left")
    assert received["norms"] == [[0.1, True]] * 2 and received["next"]
    limit("P7b", "Ctrl-C while batch-norm layers are prepared", mended="layers are as before; the next step works")


def test_small_batches_copies_and_failures(found: Found, limit: Limit) -> None:
    received = found["lifecycle"]
    assert received["small"] <= TOLERANCE
    limit("P8a", "a last batch of 2 samples, 5 micro-batches", exact=received["small"])
    limit("P9d", "LazyBatchNorm", refused=refusal(received["lazy"], "model(x)"))
    limit("P8d", "pickle of a pipeline", refused=refusal(received["pickle"], "pipe.state_dict()"))
    assert received["of_module"] and received["kept"] and "spoilt" in received["failed"]
    limit("P8c", "a failing step after another one", mended="gradients of the earlier step are kept")


def test_memory(found: Found, limit: Limit) -> None:
    received = found["memory"]
    assert received["remembered"] == 8, "a batch-norm's two statistics and counter, not tables"
    limit("P10a", "remat with large constant buffers", mended="only buffers that change are kept")
    assert 0.9 < received["output_bytes"] < 1.1
    limit("P10b", "a plan's last output and loss", mended="a softmax stands for the loss, in time and memory")
    assert 0.9 < received["cast_bytes"] < 1.1
    limit("P10c", "bf16 autocast: a cast of each weight a micro-batch", mended="counted in plans, said in the docs")
