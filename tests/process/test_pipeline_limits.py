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
    result = run_ranks([PROGRAM], 1, launcher="none", timeout_s=400).check()
    lines = [json.loads(line) for line in result.out.splitlines() if line.startswith("{")]
    return {line.pop("check"): line for line in lines}


def refusal(text: str, *parts: str) -> str:
    assert not text.startswith("nothing raised") and "fix: " in text, text
    for part in parts:
        assert part in text, text
    return text


def test_repeated_passes_draw_the_same(found: Found, limit: Limit) -> None:
    came = found["draws"]
    assert came.pop("twin") > 1e-3
    assert max(came.values()) <= TOLERANCE, came
    limit("P1a", "remat, `Dropout(0.)` whose p is raised after the split", exact=came["raised"])
    limit("P1b", "remat, scripted dropout", exact=came["scripted"])
    limit("P1c", "remat, a loss function that draws", exact=came["loss"])
    limit("P1d", "remat, a layer that uses Python's `random`", exact=came["python"])
    limit("P1e", "remat, the model in eval with its dropouts in train", exact=came["eval"])
    assert found["repeats"]["same"]
    said = refusal(found["repeats"]["told"], "nobody else draws")
    assert len(found["repeats"]["warned"]) == 1
    limit("P1f", "another thread draws during a step with remat (a warning without remat)", refused=said)


def test_what_a_trace_fixes(found: Found, limit: Limit) -> None:
    came = found["trace"]
    limit("P2a", "`model.tau = 5` after the split", refused=refusal(came["tau"], "1.tau is 5.0"))
    refusal(came["config"], "1.config")
    refusal(came["nested"], "1.nested")
    refusal(came["module"], "1.linear was replaced")
    limit("P2e", "`model.forward = MethodType(...)` before the split", exact=came["replaced_root"])
    assert came["replaced_part"] <= TOLERANCE and came["class_forward"].startswith("nothing raised")
    limit("P2f", "the same after the split", refused=refusal(came["forward"], "forward"))
    refusal(came["inner_forward"], "1.forward")
    refusal(came["method"], "1.activated")
    refusal(came["class_method"], "1.activated")
    assert came["unread"].startswith("nothing raised") and came["leaf_hook"].startswith("nothing raised")
    assert came["list_left"] == 0 and came["detached"].startswith("nothing raised") and came["detached_left"] > 0
    refusal(came["attribute"], "1.last")
    limit("P2b", "a forward that appends a tensor with its graph to `self.aux`", refused=refusal(came["list"], "1.aux"))
    limit("P2c", "a hook registered after the split on a module that was opened", refused=refusal(came["hook"], "hook"))
    unsplit, split, error = came["checkpoint"]
    assert unsplit == split == 2 and error <= TOLERANCE
    error, failed = came["assert"]
    assert error <= TOLERANCE and "AssertionError" in failed and "limits.py:" in failed
    refusal(came["checkpoint_root"], "use_reentrant=False", "remat='all'")
    limit("P2d", "`checkpoint(use_reentrant=False)` in a block", mended="runs, as often as unsplit")


def test_what_is_cut(found: Found, limit: Limit) -> None:
    came = found["chunks"]
    assert came["twin"] > 1e-3 and came["chunk"] <= TOLERANCE
    said = refusal(came["mask"], "chunk=[0, None]")
    refusal(came["later"], "chunk=[0, None]")
    limit("P3a", "an [S, S] mask with S = batch", refused=said)
    limit("P3b", "the same with `chunk=[0, None]`", exact=came["chunk"])
    said = refusal(came["sequence"], "[batch, sequence, ...]")
    limit("P3c", "a sequence-first LSTM, as many steps as samples", refused=said)
    refusal(came["dimension"], "transposes")
    refusal(came["centred"], "an output belongs to one sample")
    assert came["norm"].startswith("nothing raised"), "batch-norm is the known exception"


def test_what_the_calling_thread_has_set(found: Found, limit: Limit) -> None:
    came = found["context"]
    assert came["packs"][0] == came["packs"][1] > 0 and came["threads"] == 2
    limit(
        "P4a", "saved-tensor hooks around a step (`save_on_cpu`)", mended="reach every stage: as many packs as unsplit"
    )
    assert came["counted"]
    limit("P4b", "a FLOP counter around a step", refused=refusal(came["flops"], "FlopCounterMode"))
    assert came["seen"] == [["mine", "meta"]]
    limit("P4c", "default device and context variables", mended="are those of the calling thread")
    assert "profile_all_threads" in came["profiler"][0]
    limit("P4d", "torch.profiler around a step", mended="a warning says how it sees the stages")


def test_tied_weights(found: Found, limit: Limit) -> None:
    came = found["tied"]
    limit("P5a", "a tensor hook on a weight of two stages", refused=refusal(came["hook"], "p.grad after the step"))
    limit("P5b", "`load_state_dict(assign=True)`", refused=refusal(came["assign"], "assign=False"))
    assert came["shared"] == 2 and came["norm"] <= TOLERANCE and came["counter"] == 1
    limit("P5c", "batch-norm with affine weights tied across stages: running variance", exact=came["norm"])


def test_buffers_that_move(found: Found, limit: Limit) -> None:
    came = found["buffers"]
    assert max(came["spectral"], came["instance"], came["ema_alone"]) <= TOLERANCE
    assert float(came["old_spectral"].removeprefix("nothing raised: ")) <= TOLERANCE
    limit("P6a", "spectral_norm, 3 micro-batches, 2 steps: gradients and vectors", exact=came["spectral"])
    limit("P6b", "InstanceNorm's running statistics", exact=came["instance"])
    limit("P6c", "EMA buffers of a user's layer", refused=refusal(came["ema"], "1.ema", 'batch_norm="micro"'))
    assert came["ema_micro"].startswith("nothing raised")


def test_attributes_that_count(found: Found, limit: Limit) -> None:
    came = found["counts"]
    assert came["alone"] == [0, 0] and came["last"].startswith("nothing raised")
    said = refusal(came["number"], "1.number", "3 micro-batches", "micro_batches=1")
    limit("P6d", "a layer that counts its calls in a Python attribute", refused=said)
    refusal(came["mean"], "1.mean")
    assert came["micro"].startswith("nothing raised")
    refusal(came["again"], "1.number", 'remat="never"')
    refusal(came["by_hand"], "number")
    assert came["list"].startswith("nothing raised") and len(came["warned"]) == 1 and "1.seen" in came["warned"][0]
    limit("P6e", "a layer that appends to a list of its own", mended="a warning says that micro-batches do")


def test_interrupted_starts(found: Found, limit: Limit) -> None:
    came = found["starts"]
    for name in ("ctrl_c", "ctrl_c_before"):
        assert came[name] == [["KeyboardInterrupt: ", 1, 0]] * 3
    for said, threads, gradients in came["no_thread"]:
        assert said.startswith("StageError: each stage") and threads == 1 and gradients == 0
    limit("P7a", "Ctrl-C, or no thread to be had, while stage threads start", mended="ends; no thread is left")
    assert came["norms"] == [[0.1, True]] * 2 and came["next"]
    limit("P7b", "Ctrl-C while batch-norm layers are prepared", mended="layers are as before; the next step works")


def test_small_batches_copies_and_failures(found: Found, limit: Limit) -> None:
    came = found["lifecycle"]
    assert came["small"] <= TOLERANCE
    limit("P8a", "a last batch of 2 samples, 5 micro-batches", exact=came["small"])
    for way in ("deepcopy", "average", "pickle"):
        said = refusal(came[way], "pipe.module")
    limit("P8b", "deepcopy, pickle, AveragedModel of a pipeline", refused=said)
    assert came["of_module"] and came["kept"] and "spoilt" in came["failed"]
    limit("P8c", "a failing step after another one", mended="gradients of the earlier step are kept")


def test_models_of_other_libraries(found: Found, limit: Limit) -> None:
    came = found["libraries"]
    assert came["inside"] <= TOLERANCE
    limit("P9a", "a part that returns a ModelOutput (dict subclass)", exact=came["inside"])
    limit(
        "P9b", "a model that returns a ModelOutput", refused=refusal(came["returned"], "ModelOutput", "modules=[...]")
    )
    said = refusal(came["input_gradients"], "x.detach()")
    limit("P9c", "gradients of the inputs", refused=said)
    limit("P9d", "LazyBatchNorm", refused=refusal(came["lazy"], "model(x)"))
    limit("P9e", "a model on the meta device", refused=refusal(came["meta"], "to_empty"))
    assert "ModelOutput" in came["inputs"]
    assert came["by_hand"].startswith("the parts of a model in a row")


def test_memory(found: Found, limit: Limit) -> None:
    came = found["memory"]
    assert came["remembered"] == 8, "a batch-norm's two statistics and counter, not tables"
    limit("P10a", "remat with large constant buffers", mended="only buffers that change are kept")
    assert 0.9 < came["output_bytes"] < 1.1
    limit("P10b", "a plan's last output and loss", mended="a softmax stands for the loss, in time and memory")
    assert 0.9 < came["cast_bytes"] < 1.1
    limit("P10c", "bf16 autocast: a cast of each weight a micro-batch", mended="counted in plans, said in the docs")
