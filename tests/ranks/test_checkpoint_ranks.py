"""Nothing lost: kills, full disks, flipped bits, other directories, other ranks."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blob import Blob
from checkpoint_steps import restored, save, step_of, steps, synchronous
from harness import PROGRAMS, quick_folder, run_ranks

from hvdtrain import CheckpointError, Progress
from hvdtrain.checkpoint.checkpoint_files import MANIFEST

FOLDER = PROGRAMS / "core"


@pytest.fixture
def quick_tmp() -> Iterator[Path]:
    with quick_folder() as folder:
        yield folder


class TestKills:
    def test_what_a_living_process_writes_is_not_swept(self, tmp_path: Path) -> None:
        save(tmp_path, 1)
        host = os.uname().nodename
        living, dead = tmp_path / f".writing-{host}-1-abc", tmp_path / f".writing-{host}-{2**22 + 1}-abc"
        elsewhere = tmp_path / ".writing-other.host-name-77-abc"
        for path in (living, dead, elsewhere):
            path.mkdir()
        save(tmp_path, 2)
        assert living.exists() and elsewhere.exists() and not dead.exists()
        os.utime(elsewhere, (0, 0))
        save(tmp_path, 3)
        assert not elsewhere.exists(), "a day later nobody is writing there any more"

    def test_everything_is_on_disk_before_and_after_the_rename(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A power cut cannot be made here; the order that guards against it can be read."""
        done: list[str] = []
        fsync, rename = os.fsync, os.rename

        def noted_fsync(descriptor: int) -> None:
            done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
            fsync(descriptor)

        def noted_rename(source: Path, target: Path) -> None:
            done.append("rename")
            rename(source, target)

        monkeypatch.setattr(os, "fsync", noted_fsync)
        monkeypatch.setattr(os, "rename", noted_rename)
        save(tmp_path / "new", 1)
        assert done[0] == tmp_path.name, "the new directory's own entry"
        assert done[1:4] == ["a.bin", "b.bin", MANIFEST]
        assert done[4].startswith(".writing-") and done[5:] == ["rename", "new"]


class TestFaults:
    @pytest.mark.parametrize("fault", ["KILL", pytest.param("ENOSPC", marks=pytest.mark.thorough)])
    def test_at_each_call_of_the_process_that_writes(self, quick_tmp: Path, fault: str) -> None:
        done = run_ranks([FOLDER / "checkpoint_faults.py", quick_tmp, fault], 1, launcher="none", timeout_s=120).check()
        faults, told, before = (int(number) for number in re.findall(r"\d+", done.out))
        assert faults >= 15 and 8 <= before <= told <= before + 1 < faults


class TestFullDisk:
    def test_the_last_good_one_stays_and_room_is_given_back(self, tmp_path: Path, mount: Any) -> None:
        mount("tmpfs", tmp_path / "small", "size=256k")
        folder = tmp_path / "small" / "checkpoints"
        save(folder, 1)
        big = {"a.bin": Blob(b"x" * 100_000), "b.bin": Blob(b"y" * 200_000)}
        with pytest.raises(CheckpointError, match="written whole") as caught:
            synchronous(folder).save(big, progress=Progress(step=2))
        assert "No space left" in caught.value.received and "make room" in caught.value.remedy
        assert steps(folder) == [1] and step_of(restored(folder)) == 1
        assert len(list(folder.iterdir())) == 1, "the failed attempt takes no room"
        assert save(folder, 3).exists()

    def test_not_a_directory(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match="written whole"):
            save(tmp_path / "file" / "below", 1)

    def test_read_only(self, tmp_path: Path, mount: Any) -> None:
        mount("tmpfs", tmp_path / "disk", "size=256k")
        save(tmp_path / "disk", 1)
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
        with pytest.raises(CheckpointError, match=r"(?s)ead-only.*make it writable"):
            save(tmp_path / "disk", 2)
        assert step_of(restored(tmp_path / "disk")) == 1


RANK_SCENARIOS = [
    "shared", "rank_1_sees_nothing", "rank_1_sees_something_else", "rank_0_falls_back", "nothing", "all_damaged",
    "save_fails_on_rank_0", "load_fails_on_rank_1", "not_at_the_same_point", "disk_of_rank_1_is_full",
    "disk_of_rank_1_fills_up",
]  # fmt: skip


class TestRanks:
    def test_restore_in_two_ranks(self, tmp_path: Path) -> None:
        done = run_ranks([FOLDER / "checkpoint_ranks.py", tmp_path, *RANK_SCENARIOS], 2)
        for scenario in RANK_SCENARIOS:
            for rank in range(2):
                assert f"{scenario}: passed" in done.ranks_output.get(rank, ""), done.text
        assert "falling back" in done.ranks_error[0] and "falling back" not in done.ranks_error.get(1, "")
        done.check()
