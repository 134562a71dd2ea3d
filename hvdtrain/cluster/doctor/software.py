"""Python, the frameworks and Horovod: on every host, and the same on all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hvdtrain.cluster.doctor.findings import ClusterFacts, Facts, Finding, Severity, known, listed, odd_ones
from hvdtrain.horovod_build.support import SUPPORTED

WITHOUT_GLOO = "horovod-without-gloo"  # then the launcher starts nothing
_TENSORFLOW = ("tensorflow", "tensorflow-cpu")
# what every rank must have in the same version; the others only matter to programs that use them
_SAME = ("hvdtrain", "horovod", "torch", "tensorflow", "tensorflow-cpu", "keras", "numpy")
_WHY_SAME = (
    "ranks that compute, draw random numbers or pickle differently train different models, or wait for each other for"
    " ever"
)


def quick(cluster: ClusterFacts) -> Iterator[Finding]:
    """Checks the software before a job starts: Python, packages, the program's code and Horovod."""
    minor = {host: ".".join(found["version"].split(".")[:2]) for host, found in cluster.of("python").items()}
    usual, others = odd_ones(minor)
    if others:
        yield _other_python(cluster, usual, others)
        # another Python has other packages: what differs in them is a consequence
        facts = {host: its for host, its in cluster.facts.items() if host not in others}
        cluster = ClusterFacts(facts, {host: cluster.ranks[host] for host in facts}, cluster.python)
    for host, its in cluster.facts.items():
        yield from _python(cluster, host, its)
        if known(its, "packages") is not None:
            yield from _installed(cluster, host, its)
    yield from _same_packages(cluster)
    yield from _same_code(cluster)
    yield from _horovod(cluster)


def _other_python(cluster: ClusterFacts, usual: str, others: Mapping[str, str]) -> Finding:
    versions = {host: f"{its['version']} ({its['executable']})" for host, its in cluster.of("python").items()}
    return Finding(
        "python-differs", "error", tuple(others),
        f"Python {listed({host: versions[host] for host in others})}; {_of_the_others(cluster, others)} {usual}",
        "compiled packages (Horovod, PyTorch, TensorFlow) fit one Python only, and what ranks send each other is"
        " pickled",
        f"install Python {usual} and the same packages at the same path there, or name one that all have: --python"
        f" PATH (now {cluster.python})",
    )  # fmt: skip


def _python(cluster: ClusterFacts, host: str, facts: Facts) -> Iterator[Finding]:
    python = known(facts, "python")
    supported = SUPPORTED["Python"]
    if python is None or not supported.too_old(python["version"]):
        return
    yield Finding(
        "python-unsupported", "error", (host,),
        f"Python {python['version']} ({python['executable']}) is not supported: the oldest is {supported.oldest}",
        supported.why, f"name another: --python PATH; {cluster.on(host, 'python3', '--version')} prints the usual one",
    )  # fmt: skip


def _installed(cluster: ClusterFacts, host: str, facts: Facts) -> Iterator[Finding]:
    packages = facts["packages"]
    python = cluster.python_on(host)
    if "hvdtrain" not in packages:
        yield Finding(
            "no-hvdtrain", "error", (host,), f"{python} finds no hvdtrain",
            "every host's ranks are started by hvdtrain's agent there",
            "install it there, or copy this environment to the same path; or name the Python that has it: --python"
            " PATH",
        )  # fmt: skip
    if not any(name in packages for name in ("torch", *_TENSORFLOW)):
        yield Finding(
            "no-framework", "error", (host,), f"{python} has neither torch nor tensorflow", "there is nothing to train",
            cluster.on(host, python, "-m", "pip", "install", "hvdtrain[torch,keras,build]"),
        )  # fmt: skip
    elif "horovod" not in packages:
        yield Finding(
            "no-horovod", "error", (host,), f"{python} has no horovod",
            "ranks average their gradients through it; no wheels are published for today's frameworks",
            cluster.build_on(host),
        )  # fmt: skip


def _same_packages(cluster: ClusterFacts) -> Iterator[Finding]:
    packages = cluster.of("packages")
    for name in _SAME:
        versions = {host: found.get(name, "missing") for host, found in packages.items()}
        if name in ("hvdtrain", "horovod"):  # missing: told already
            versions = {host: version for host, version in versions.items() if version != "missing"}
        if name == "horovod":  # a ready wheel's +torch2.12cpu... says what it was built for, which _fits looks at
            versions = {host: version.partition("+")[0] for host, version in versions.items()}
        usual, others = odd_ones(versions)
        if not others:
            continue
        install = f"{name}=={usual.partition('+')[0]}" if usual != "missing" else name
        command = ["-m", "pip", *(["install", install] if usual != "missing" else ["uninstall", "-y", name])]
        fixes = [cluster.on(host, cluster.python_on(host), *command) for host in list(others)[:3]]
        if name in ("torch", *_TENSORFLOW):
            fixes.append("then build Horovod again there, since it fits one version: hvdtrain build-horovod --install")
        yield Finding(
            f"{name}-differs", "error", tuple(others),
            f"{name} {listed(others)}; {_of_the_others(cluster, others)} {usual}", _WHY_SAME, "\n".join(fixes),
        )  # fmt: skip


def _of_the_others(cluster: ClusterFacts, odd: Mapping[str, str]) -> str:
    rest = [host for host in cluster.facts if host not in odd]
    return f"{rest[0]} has" if len(rest) == 1 else f"the other {len(rest)} have"


def _same_code(cluster: ClusterFacts) -> Iterator[Finding]:
    versions = {host: found.get("hvdtrain") for host, found in cluster.of("packages").items()}
    code = {host: found for host, found in cluster.of("code").items() if found}
    usual, others = odd_ones({host: found["sha256"] for host, found in code.items()})
    if not others or odd_ones(versions)[1]:
        return
    source = next(host for host, found in code.items() if found["sha256"] == usual)
    folder = code[source]["folder"]
    target = next(iter(others))
    yield Finding(
        "hvdtrain-differs", "error", tuple(others),
        f"the sources of hvdtrain are not those of {source} ({folder}), though the version is the same",
        "ranks that run different code wait for each other for ever, or train different models",
        f"on {source}: rsync -a --delete {folder}/ {target}:{code[target]['folder']}/",
    )  # fmt: skip


def _horovod(cluster: ClusterFacts) -> Iterator[Finding]:
    for host, facts in cluster.facts.items():
        horovod = known(facts, "horovod")
        if horovod is None:
            continue
        fix = cluster.build_on(host)
        yield from _fits(host, facts, horovod, fix)
        yield from _libraries(host, horovod, fix)
    yield from _operations(cluster)


def _fits(host: str, facts: Facts, horovod: Facts, fix: str) -> Iterator[Finding]:
    """The extensions are there, for this Python and these frameworks."""
    packages = known(facts, "packages") or {}
    extensions = horovod["extensions"]
    why = "it does not load, or crashes, beside anything but what it was built for"
    wrong = [name for name, found in extensions.items() if not found["for_this_python"]]
    if wrong:
        suffix = (known(facts, "python") or {}).get("suffix")
        what = f"Horovod's extensions for {', '.join(wrong)} are of another Python (this one loads *{suffix})"
        yield Finding("horovod-other-python", "error", (host,), what, why, fix)
    for framework, names in (("torch", ("torch",)), ("tensorflow", _TENSORFLOW)):
        installed = next((packages[name] for name in names if name in packages), None)
        if installed is None:
            continue
        if framework not in extensions:
            yield Finding(
                "horovod-without-" + framework, "warning", (host,),
                f"Horovod was built without {framework}, which is installed ({installed})",
                f"programs on {framework} cannot average there", fix,
            )  # fmt: skip
            continue
        built = horovod["built_for"].get(framework)
        if built and not _loads_beside(built, installed):
            what = f"Horovod was built for {framework} {built}, installed is {installed}"
            yield Finding("horovod-other-" + framework, "error", (host,), what, why, fix)


def _loads_beside(built: str, installed: str) -> bool:
    """Returns True if an extension fits: patch releases keep the ABI; other builds (+cpu, +cu130) may not."""
    (built, its), (installed, own) = built.partition("+")[::2], installed.partition("+")[::2]
    return built.split(".")[:2] == installed.split(".")[:2] and (its == own or not own)


def _libraries(host: str, horovod: Facts, fix: str) -> Iterator[Finding]:
    missing = sorted({name for found in horovod["extensions"].values() for name in found["missing"]})
    if not missing:
        return
    packages = {"libmpi": "apt-get install openmpi-bin", "libnccl": "pip install nvidia-nccl-cu13"}
    helps = [command for name, command in packages.items() if any(lib.startswith(name) for lib in missing)]
    id_ = "mpi-library-missing" if any(lib.startswith("libmpi") for lib in missing) else "horovod-library-missing"
    yield Finding(
        id_, "error", (host,), f"Horovod needs {', '.join(missing)}, which this host does not find",
        "its extensions do not load without the libraries they were built with",
        "\n".join([*(f"there: {command}" for command in helps), f"or build it for what is there: {fix}"]),
    )  # fmt: skip


def _has(cluster: ClusterFacts, host: str, operation: str) -> bool:
    return any(extension[operation] for extension in cluster.of("horovod")[host]["extensions"].values())


def _operations(cluster: ClusterFacts) -> Iterator[Finding]:
    """Yields findings on hosts whose Horovod was built without Gloo or without MPI."""
    reason: dict[str, tuple[Severity, str]] = {
        "gloo": ("error", "hvdtrain launch, and horovodrun without MPI, start ranks over Gloo"),
        "mpi": ("warning", "mpirun and horovodrun --mpi cannot start ranks there; hvdtrain launch can"),
    }
    for operation, (severity, why) in reason.items():
        has = {
            host: _has(cluster, host, operation) for host, found in cluster.of("horovod").items() if found["extensions"]
        }
        without = [host for host, there in has.items() if not there]
        if not without:
            continue
        everywhere = len(without) == len(has)
        if everywhere and operation == "mpi":
            severity = "note"
        if operation == "gloo" and all(_has(cluster, host, "mpi") for host in without):
            severity = "warning"
            why = (
                "mpirun and horovodrun --mpi start ranks there; hvdtrain launch and hvdtrain.run cannot."
                " conda-forge's Horovod is built so, and lacks what hvdtrain's mends (docs/horovod.md)"
            )
        name = operation.upper() if operation == "mpi" else operation.capitalize()
        others = "" if everywhere else f"; {_of_the_others(cluster, dict.fromkeys(without, ''))} it"
        flags, tools = [], ""
        if operation == "mpi":
            flags, tools = ["--mpi", "on"], "there: apt-get install openmpi-bin libopenmpi-dev\n"
        builds = [cluster.build_on(host, *flags) for host in without[:3]]
        yield Finding(
            WITHOUT_GLOO if operation == "gloo" else "horovod-without-mpi", severity, tuple(without),
            f"Horovod was built without {name}{others}", why, tools + "\n".join(builds),
        )  # fmt: skip
