"""`hvdtrain build-horovod`: the one recipe for a Horovod wheel that works with the frameworks installed here.

`support` holds the table of versions, `patches` what is changed in Horovod's sources, `patching` applies it,
`environment` looks around and puts a wheel in the place of another, `cuda` finds a CUDA compiler, `build` compiles and
caches, `proof` proves; `dist` makes wheels for other machines.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from hvdtrain.core import variables

DESCRIPTION = """\
Build a Horovod 0.28.1 wheel for the frameworks installed in this Python environment, prove it on 2 ranks
(all-reduce, broadcast, grouped all-reduce; every framework, over Gloo and over MPI), keep it in a cache."""

EXAMPLES = """\
examples:
  hvdtrain build-horovod --install              build (or take from the cache) and install here
  hvdtrain build-horovod --output wheels/       leave a copy of the wheel in wheels/
  hvdtrain build-horovod --dist wheels/         for other machines: manylinux, chosen by pip
  hvdtrain build-horovod --sdist horovod-0.28.1.tar.gz --gpu none
  hvdtrain build-horovod --edits                what is changed in Horovod's sources, and why
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument_group("what to build").add_argument
    what = "GPU support (auto: NCCL if PyTorch is a CUDA build; without PyTorch, beside tensorflow[and-cuda])"
    add("--gpu", choices=["auto", "none", "nccl"], default="auto", help=what)
    add("--mpi", choices=["auto", "on", "off"], default="auto", help="build with MPI (auto: if mpicxx is found)")
    what = "CUDA compiler (auto: a toolkit of PyTorch's version, for TensorFlow alone of 13.0; else PyPI's wheels)"
    add("--cuda", default="auto", metavar="auto|wheels|DIR", help=what)
    add("--sdist", type=Path, metavar="FILE", help="horovod-0.28.1.tar.gz, instead of a download from PyPI")
    add = parser.add_argument_group("what to do with it").add_argument
    add("--install", action="store_true", help="install the wheel into this environment")
    add("--output", type=Path, metavar="DIR", help="copy the wheel to DIR")
    add("--dist", type=Path, metavar="DIR", help="write a wheel of hvdtrain-horovod to DIR")
    kept = f"keep wheels in DIR (default: ${variables.CACHE} or ~/.cache/hvdtrain)"
    add("--cache", type=Path, metavar="DIR", help=kept)
    add("--rebuild", action="store_true", help="build even if the cache has a wheel")
    add("--jobs", type=int, metavar="N", help="parallel compiler processes (default: by cores and memory)")
    add = parser.add_argument_group("only look").add_argument
    add("--check", action="store_true", help="print what would be built, or why it cannot be built")
    add("--edits", action="store_true", help="print the changes to Horovod's sources, with their reasons")
    add("--record", action="store_true", help="print the record of the cached build (versions, edits, proof) as JSON")


def run(args: argparse.Namespace) -> int:
    from hvdtrain.horovod_build import build, dist, environment, patching, steps

    if args.edits:
        print(patching.table())
        return 0
    if args.sdist is not None:
        build.checked(args.sdist)
    found = environment.look(args.gpu, args.mpi)
    cache = args.cache or build.cache_folder()
    folder = cache / build.cache_key(found, args.cuda)
    wheel = None if args.rebuild else build.find_cached(folder)
    _say(f"Horovod 0.28.1 for {found.describe()}")
    for note in found.untested():
        _say(note)
    if args.check:
        _say(f"a proven wheel is cached: {wheel}" if wheel else "no wheel is cached: it would be built")
        return 0
    if wheel is None:
        wheel = build.build(found, sdist=args.sdist, cache=cache, cuda=args.cuda, jobs=args.jobs, say=_say)
    if args.record:
        print(json.dumps(json.loads((wheel.parent / "build.json").read_text()), indent=2))
    if args.output:
        build.make_folder(args.output, "--output DIR")
        wheel = Path(shutil.copy2(wheel, args.output))
    if args.dist:
        build.make_folder(args.dist, "--dist DIR")
        made = dist.make(wheel, found, args.dist, steps.Commands(cache / "dist.log", _say))
        _say(f"ready: {made}; {dist.needs(made)}")
    if args.install:
        environment.put_in_place(wheel)
    _say(f"{'installed' if args.install else 'ready'}: {wheel}")
    return 0


def _say(line: str) -> None:
    print(f"build-horovod: {line}", flush=True)
