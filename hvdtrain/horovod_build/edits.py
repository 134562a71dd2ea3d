"""The table of edits that turn Horovod 0.28.1 (2023) into one that builds and works today.

Each edit replaces one exact piece of text and fails loudly if that text is not there exactly ``count`` times, so
that another source distribution can never be half-edited in silence. Upstream numbers are issues or pull requests of
github.com/horovod/horovod unless another project is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.core.errors import HvdtrainError


@dataclass(frozen=True)
class Target:
    """What is being built, as far as edits depend on it."""

    gpu: str  # "none" or "nccl"


def always(target: Target) -> bool:
    return True


def without_cuda(target: Target) -> bool:
    return target.gpu == "none"


def with_cuda(target: Target) -> bool:
    return target.gpu != "none"


@dataclass(frozen=True)
class Edit:
    name: str
    file: str
    find: str
    replace: str
    why: str
    upstream: str = "not reported"
    when: Callable[[Target], bool] = always
    count: int = 1  # how often `find` must occur; every occurrence is replaced


_HOME = "$ORIGIN/../.."  # site-packages, seen from horovod/<framework>/

_ZERO_GRAD_OLD = """    def zero_grad(self):
        if self._handles:"""
_ZERO_GRAD_NEW = """    def zero_grad(self, set_to_none: bool = True):
        if self._handles:"""

_TF_WITHOUT_CUDA = """# hvdtrain: this target never uses CUDA, whatever the PyTorch target is built with.
if(HAVE_CUDA)
    remove_definitions(-DHAVE_CUDA=1 -DHAVE_GPU=1 -DHAVE_NCCL=1)
    foreach(VAR IN ITEMS HOROVOD_GPU_ALLREDUCE HOROVOD_GPU_ALLGATHER HOROVOD_GPU_BROADCAST HOROVOD_GPU_ALLTOALL HOROVOD_GPU_REDUCESCATTER)
        if(DEFINED ${VAR})
            convert_to_ascii_dec(ASCII_DEC ${${VAR}})
            remove_definitions(-D${VAR}=${ASCII_DEC})
        endif()
    endforeach()
    list(FILTER SOURCES EXCLUDE REGEX "(cuda_operations|gpu_operations|nccl_operations)[.]cc$")
    list(REMOVE_ITEM LINKER_LIBS ${NCCL_LIBRARIES})
    set(HAVE_CUDA FALSE)
    set(HAVE_NCCL FALSE)
endif()

set(TF_TARGET_LIB "tensorflow")"""

_RPATH = """set_target_properties({target} PROPERTIES BUILD_WITH_INSTALL_RPATH ON
    INSTALL_RPATH "{paths}")
{last}"""

_TORCH_LAST = 'set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES OUTPUT_NAME "mpi_lib_v2")'
_TF_LAST = 'set_target_properties(${TF_TARGET_LIB} PROPERTIES OUTPUT_NAME "mpi_lib")'

_KERAS_OLD = """                                 scale_local_gradients=True):
    class _DistributedOptimizer("""
_KERAS_NEW = """                                 scale_local_gradients=True):
    import keras as _installed_keras
    if int(_installed_keras.__version__.split(".")[0]) >= 3:
        import warnings
        warnings.warn(
            "horovod.keras.DistributedOptimizer does NOT average gradients on Keras 3: every rank trains alone. "
            "Use hvdtrain.keras.prepare(model).", RuntimeWarning, stacklevel=4)

    class _DistributedOptimizer("""

_GLOO_ADDRESS_NEW = """  auto gloo_address = std::getenv("HOROVOD_GLOO_ADDRESS");
  if (gloo_address != nullptr && *gloo_address != 0) {
    device_attr.hostname = gloo_address;
  } else {
    device_attr.iface = gloo_iface_;
  }
"""

_RUN_OLD = """
    _run(args)

"""
_RUN_NEW = """
    try:
        _run(args)
    except RuntimeError as error:
        sys.exit(str(error))

"""

_MPI_BUILT_OLD = """@_cache
def mpi_built(verbose=False):
"""
_MPI_BUILT_NEW = """def _class_built(name):
    # the name of a class that has virtual functions stands in the library that has the class
    import glob
    import mmap

    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for ext_base_name in EXTENSIONS:
        for library in glob.glob(os.path.join(glob.escape(here), ext_base_name, 'mpi_lib*' + get_ext_suffix())):
            with open(library, 'rb') as file:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    return data.find(name) >= 0
    return None


@_cache
def mpi_built(verbose=False):
    found = _class_built(b'N7horovod6common13MPIControllerE')
    if found is not None:
        return found
"""
_GLOO_BUILT_OLD = """@_cache
def gloo_built(verbose=False):
"""
_GLOO_BUILT_NEW = """@_cache
def gloo_built(verbose=False):
    found = _class_built(b'N7horovod6common14GlooControllerE')
    if found is not None:
        return found
"""

_WAIT_OLD = """  while (true) {
    if (handle_manager.PollHandle(handle)) break;
    {
      py::gil_scoped_release release_python_gil;
      std::this_thread::yield();
    }
  }
  auto status"""
_WAIT_NEW = """  {
    py::gil_scoped_release release_python_gil;
    handle_manager.Wait(handle);
  }
  auto status"""
_MARK_DONE_OLD = """  results_[handle] = std::make_shared<Status>(status);
}
"""
_MARK_DONE_NEW = """  results_[handle] = std::make_shared<Status>(status);
  done_.notify_all();
}

void HandleManager::Wait(int handle) {
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [&] {
    auto found = results_.find(handle);
    return found == results_.end() || found->second != nullptr;
  });
}
"""
_RESET_OLD = """  results_.clear();
  last_handle_ = 0;
"""
_RESET_NEW = """  results_.clear();
  last_handle_ = 0;
  done_.notify_all();
"""

_QUEUE_DECLARED_OLD = "  void PopMessagesFromQueue(std::deque<Request>& message_queue_buffer);"
_QUEUE_DECLARED_NEW = """  void PopMessagesFromQueue(std::deque<Request>& message_queue_buffer);

  bool Empty() const;

  // Returns when a tensor was added to any queue of this process since the last call, or after at_most.
  static void WaitForNewTensor(std::chrono::steady_clock::duration at_most);"""
_QUEUE_DEFINED_OLD = "Status TensorQueue::AddToTensorQueue(TensorTableEntry& e, Request& message) {"
_QUEUE_DEFINED_NEW = """namespace {
std::mutex new_tensor_mutex;
std::condition_variable new_tensor_added;
bool new_tensor = false;

void TellOfNewTensor() {
  {
    std::lock_guard<std::mutex> guard(new_tensor_mutex);
    new_tensor = true;
  }
  new_tensor_added.notify_one();
}
} // namespace

bool TensorQueue::Empty() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return tensor_table_.empty() && message_queue_.empty();
}

void TensorQueue::WaitForNewTensor(
    std::chrono::steady_clock::duration at_most) {
  std::unique_lock<std::mutex> lock(new_tensor_mutex);
  new_tensor_added.wait_for(lock, at_most, [] { return new_tensor; });
  new_tensor = false;
}

Status TensorQueue::AddToTensorQueue(TensorTableEntry& e, Request& message) {"""
_CYCLE_OLD = """  auto sleep_duration = state.last_cycle_start +
                        std::chrono::microseconds(long(
                            state.parameter_manager.CycleTimeMs() * 1000.)) -
                        start_time;
  if (sleep_duration > std::chrono::steady_clock::duration::zero()) {
    std::this_thread::sleep_for(sleep_duration);
  }"""
_CYCLE_NEW = """  static const double idle_cycle_ms = [] {
    auto text = std::getenv("HOROVOD_IDLE_CYCLE_TIME");
    return text != nullptr ? std::strtod(text, nullptr) : 0.0;
  }();
  double cycle_ms = state.parameter_manager.CycleTimeMs();
  bool idle = idle_cycle_ms > cycle_ms;
  if (idle) {
    for (auto id : state.process_set_table.Ids()) {
      idle = idle && state.process_set_table.Get(id).tensor_queue.Empty();
    }
  }
  auto sleep_duration = state.last_cycle_start +
                        std::chrono::microseconds(
                            long((idle ? idle_cycle_ms : cycle_ms) * 1000.)) -
                        start_time;
  if (sleep_duration > std::chrono::steady_clock::duration::zero()) {
    if (idle) {
      TensorQueue::WaitForNewTensor(sleep_duration);
    } else {
      std::this_thread::sleep_for(sleep_duration);
    }
  }"""
_IDLE_WHY = "part of idle-cycle, which says why"

EDITS: tuple[Edit, ...] = (
    Edit(
        "cxx17", "CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)",
        why="the headers of torch >= 2.1 and TensorFlow >= 2.10 need C++17", upstream="3998",
    ),
    Edit(
        "cxx17-torch", "horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)",
        why="the PyTorch target sets its own standard", upstream="3998",
    ),
    Edit(
        "gcc13-common", "horovod/common/common.h", "#include <functional>\n", "#include <functional>\n#include <stdexcept>\n",
        why="gcc 13's standard headers no longer include <stdexcept> by accident", upstream="3957",
    ),
    Edit(
        "gcc13-group-table", "horovod/common/group_table.h", "#include <queue>\n", "#include <queue>\n#include <string>\n",
        why="gcc 13's standard headers no longer include <string> by accident", upstream="3957",
    ),
    Edit(
        "gcc13-gloo-types", "third_party/gloo/gloo/types.h", "#include <iostream>\n", "#include <cstdint>\n#include <iostream>\n",
        why="gcc 13's standard headers no longer include <cstdint> by accident",
    ),
    Edit(
        "cmake4-gloo", "third_party/gloo/CMakeLists.txt", "cmake_minimum_required(VERSION 2.8.12 FATAL_ERROR)",
        "cmake_minimum_required(VERSION 3.13 FATAL_ERROR)",
        why="CMake 4 refuses projects that ask for policies older than 3.5", upstream="NVIDIA/DALI 5871",
    ),
    Edit(
        "distutils-torch", "horovod/torch/CMakeLists.txt",
        'from distutils.sysconfig import get_python_inc; print(get_python_inc())',
        "import sysconfig; print(sysconfig.get_paths()['include'])",
        why="Python 3.12 has no distutils", upstream="pypa/setuptools 4655",
    ),
    Edit(
        "distutils-jsrun", "horovod/runner/js_run.py", "from distutils.spawn import find_executable",
        "from shutil import which as find_executable",
        why="Python 3.12 has no distutils, and horovodrun imports this module always", upstream="pypa/setuptools 4655",
    ),
    Edit(
        "no-xla-ops", "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n', "",
        why="TensorFlow 2.21's wheel lacks headers (highwayhash) that its XLA headers include",
    ),
    Edit(
        "tensorflow-without-cuda", "horovod/tensorflow/CMakeLists.txt", 'set(TF_TARGET_LIB "tensorflow")', _TF_WITHOUT_CUDA,
        why="with CUDA the extension needs symbols that tensorflow-cpu does not have, and does not load", when=with_cuda,
    ),
    Edit(
        "no-cuda-search", "CMakeLists.txt", "include(CheckLanguage)\n",
        'if(NOT "$ENV{HOROVOD_GPU_OPERATIONS}" STREQUAL "")\ninclude(CheckLanguage)\n',
        why="a build without GPU must not depend on a CUDA compiler that happens to be installed", when=without_cuda,
    ),
    Edit(
        "no-cuda-search-end", "CMakeLists.txt", "macro(ADD_CUDA)\n", "endif()\n\nmacro(ADD_CUDA)\n",
        why="closes the block that no-cuda-search opens", when=without_cuda,
    ),
    Edit(
        "cuda-torch-as-cpu", "cmake/Modules/FindPytorch.cmake", "if (Pytorch_CUDA OR Pytorch_ROCM)\n",
        "set(Pytorch_CUDA FALSE)\nif (Pytorch_CUDA OR Pytorch_ROCM)\n",
        why="a CUDA build of PyTorch otherwise forces CUDA on a build without GPU", when=without_cuda,
    ),
    Edit(
        "cuda-cxx17", "horovod/common/ops/cuda/CMakeLists.txt", "set(CMAKE_CUDA_STANDARD 11)", "set(CMAKE_CUDA_STANDARD 17)",
        why="CUDA 13's headers need C++17", when=with_cuda,
    ),
    Edit(
        "cuda-one-abi", "horovod/common/ops/cuda/CMakeLists.txt", "add_library(compatible_horovod_cuda_kernels cuda_kernels.cu)",
        "add_library(compatible_horovod_cuda_kernels EXCLUDE_FROM_ALL cuda_kernels.cu)",
        why="the pre-C++11 ABI copy is linked by nothing today; compiling it doubles nvcc's time", when=with_cuda,
    ),
    Edit(
        "libcuda-so-1", "horovod/torch/cuda_util.cc", 'cudalib = dlopen("libcuda.so", RTLD_LAZY);',
        'cudalib = dlopen("libcuda.so.1", RTLD_LAZY);',
        why="the driver installs libcuda.so.1; the bare name exists only beside a development toolkit", when=with_cuda,
    ),
    Edit(
        "rpath-torch", "horovod/torch/CMakeLists.txt", _TORCH_LAST,
        _RPATH.format(
            target="${PYTORCH_TARGET_LIB}", last=_TORCH_LAST,
            paths=f"{_HOME}/torch/lib:{_HOME}/nvidia/nccl/lib:{_HOME}/nvidia/cu13/lib$ENV{{HVDTRAIN_MPI_RPATH}}",
        ).replace("$ORIGIN", "\\$ORIGIN"),
        why="the wheel must find PyTorch's and NCCL's libraries where pip puts them, not in the build machine's folders",
    ),
    Edit(
        "rpath-tensorflow", "horovod/tensorflow/CMakeLists.txt", _TF_LAST,
        _RPATH.format(
            target="${TF_TARGET_LIB}", last=_TF_LAST,
            paths=f"{_HOME}/tensorflow:{_HOME}/tensorflow/python$ENV{{HVDTRAIN_MPI_RPATH}}",
        ).replace("$ORIGIN", "\\$ORIGIN"),
        why="as rpath-torch, for TensorFlow's libraries",
    ),
    Edit(
        "torch-answers-first", "horovod/common/util.py", "EXTENSIONS = ['tensorflow', 'torch', 'mxnet']",
        "EXTENSIONS = ['torch', 'tensorflow', 'mxnet']",
        why="`horovodrun` and its --check-build ask the first extension that loads: torch knows about NCCL, and loads in "
        "half of TensorFlow's time",
    ),
    Edit(
        "check-build-survives", "horovod/common/util.py", "return queue.get_nowait()",
        "return queue.get_nowait() if p.exitcode == 0 else None",
        why="an extension whose import kills the asking child (TensorFlow and CUDA torch in one process) ended "
        "--check-build with _queue.Empty",
    ),
    Edit(
        "gloo-stall-check", "horovod/common/gloo/gloo_controller.cc", "global_ranks_.reserve(size_);", "global_ranks_.resize(size_);",
        why="the stall inspector loops over global_ranks_, which reserve() leaves empty: under Gloo no stall is ever "
        "reported, and writing past the size is undefined",
    ),
    Edit(
        "torch-wait-declared", "horovod/torch/handle_manager.h", "  bool PollHandle(int handle);",
        "  bool PollHandle(int handle);\n  // blocks until the handle is done or gone\n  void Wait(int handle);",
        why="part of torch-wait-sleeps, which says why",
    ),
    Edit(
        "torch-wait-condition", "horovod/torch/handle_manager.h", "  std::mutex mutex_;",
        "  std::mutex mutex_;\n  std::condition_variable done_;", why="part of torch-wait-sleeps, which says why",
    ),
    Edit(
        "torch-wait-include", "horovod/torch/handle_manager.h", "#include <atomic>", "#include <atomic>\n#include <condition_variable>",
        why="part of torch-wait-sleeps, which says why",
    ),
    Edit(
        "torch-wait-wakes", "horovod/torch/handle_manager.cc", _MARK_DONE_OLD, _MARK_DONE_NEW, why="part of torch-wait-sleeps, which says why",
    ),
    Edit(
        "torch-wait-reset", "horovod/torch/handle_manager.cc", _RESET_OLD, _RESET_NEW, why="part of torch-wait-sleeps, which says why",
    ),
    Edit(
        "torch-wait-sleeps", "horovod/torch/mpi_ops_v2.cc", _WAIT_OLD, _WAIT_NEW,
        why="synchronize() spun, taking and giving back Python's lock all the time, on a core that Horovod's own thread "
        "and the transport need: on CPU that was a good part of what a step lost to DistributedDataParallel",
    ),
    Edit(
        "idle-cycle-include", "horovod/common/tensor_queue.h", "#include <iostream>",
        "#include <chrono>\n#include <condition_variable>\n#include <iostream>", why=_IDLE_WHY,
    ),
    Edit(
        "idle-cycle-declared", "horovod/common/tensor_queue.h", _QUEUE_DECLARED_OLD, _QUEUE_DECLARED_NEW, why=_IDLE_WHY,
    ),
    Edit(
        "idle-cycle-defined", "horovod/common/tensor_queue.cc", _QUEUE_DEFINED_OLD, _QUEUE_DEFINED_NEW, why=_IDLE_WHY,
    ),
    Edit(
        "idle-cycle-tell", "horovod/common/tensor_queue.cc", "  tensor_table_.emplace(e.tensor_name, std::move(e));",
        "  tensor_table_.emplace(e.tensor_name, std::move(e));\n  TellOfNewTensor();", why=_IDLE_WHY,
    ),
    Edit(
        "idle-cycle-tell-many", "horovod/common/tensor_queue.cc", "    tensor_table_.emplace(entries[i].tensor_name, std::move(entries[i]));",
        "    tensor_table_.emplace(entries[i].tensor_name, std::move(entries[i]));\n    TellOfNewTensor();", why=_IDLE_WHY,
    ),
    Edit(
        "idle-cycle", "horovod/common/operations.cc", _CYCLE_OLD, _CYCLE_NEW,
        why="the ranks' background threads ask each other for work every millisecond, over the network, also when there "
        "is none: 8 % of a core on CPU. With HOROVOD_IDLE_CYCLE_TIME (ms) set, a thread without any tensor waits that "
        "long, or until it gets one; without it nothing changes",
    ),
    Edit(
        "gloo-interface", "horovod/common/gloo/gloo_context.cc", "  assert(global_context.IsEnabled());\n",
        "  assert(global_context.IsEnabled());\n  gloo_iface_ = global_context.gloo_iface_;\n",
        why="process sets, that of all ranks among them, never got the interface that was chosen: ranks met at whatever "
        "address their host's own name has, on another network than asked for, or, where /etc/hosts calls it 127.0.1.1 "
        "(Debian's installer does), not at all",
    ),
    Edit(
        "gloo-address", "horovod/common/gloo/gloo_context.cc", "  device_attr.iface = gloo_iface_;\n", _GLOO_ADDRESS_NEW,
        why="Gloo takes an interface's name and of its addresses the first, so ranks met on another network than asked "
        "for where the chosen address is not the first. With HOROVOD_GLOO_ADDRESS set (`hvdtrain launch` does) Gloo "
        "listens at that address; without it nothing changes", count=3,
    ),
    Edit(
        "zero-grad-set-to-none", "horovod/torch/optimizer.py", _ZERO_GRAD_OLD, _ZERO_GRAD_NEW,
        why="torch's zero_grad takes set_to_none; Horovod's override raised TypeError", upstream="3405", count=2,
    ),
    Edit(
        "zero-grad-pass-on", "horovod/torch/optimizer.py", "return super(self.__class__, self).zero_grad()",
        "return super(self.__class__, self).zero_grad(set_to_none=set_to_none)",
        why="hands the argument of zero-grad-set-to-none to torch", upstream="3405", count=2,
    ),
    Edit(
        "horovodrun-no-traceback", "horovod/runner/launch.py", _RUN_OLD, _RUN_NEW,
        why="when a rank fails, horovodrun's own traceback buries that rank's message",
    ),
    Edit(
        "mpi-built-at-once", "horovod/common/util.py", _MPI_BUILT_OLD, _MPI_BUILT_NEW,
        why="horovodrun imported a whole framework, before it started any rank, to learn whether Horovod has MPI: 2 to "
        "5 s; the library itself tells, in milliseconds",
    ),
    Edit(
        "gloo-built-at-once", "horovod/common/util.py", _GLOO_BUILT_OLD, _GLOO_BUILT_NEW,
        why="the same for Gloo; needs mpi-built-at-once",
    ),
    Edit(
        "keras3-warning", "horovod/_keras/__init__.py", _KERAS_OLD, _KERAS_NEW,
        why="Keras 3 calls none of the methods this wrapper overrides: it trains without averaging and says nothing",
    ),
)  # fmt: skip


def applicable(target: Target) -> list[Edit]:
    """The edits that ``target`` needs, in the order in which they are applied."""
    return [edit for edit in EDITS if edit.when(target)]


def apply(source: Path, edits: Iterable[Edit]) -> list[Edit]:
    """Apply ``edits`` to the unpacked source distribution at ``source``.

    Every target is checked before the first file is written, so a refused source tree is left as it came.

    Raises:
        HvdtrainError: a file is missing, or the text to replace is not there exactly ``edit.count`` times.
    """
    edits = list(edits)
    texts: dict[Path, str] = {}
    for edit in edits:
        path = source / edit.file
        if path not in texts:
            if not path.is_file():
                raise _not_found(edit, "the file is missing")
            texts[path] = path.read_text()
        found = texts[path].count(edit.find)
        if found != edit.count:
            raise _not_found(edit, f"its text occurs {found} times, expected {edit.count}")
        texts[path] = texts[path].replace(edit.find, edit.replace)
    for path, text in texts.items():
        path.write_text(text)
    return edits


def _not_found(edit: Edit, came: str) -> HvdtrainError:
    return HvdtrainError(
        rule=f"edit '{edit.name}' must find its target in {edit.file}",
        came=came,
        remedy="use the unmodified horovod 0.28.1 source distribution (from PyPI, or --sdist FILE)",
    )


def table(edits: Iterable[Edit] = EDITS) -> str:
    """The edits for people: name, file, why, upstream report."""
    lines = []
    for edit in edits:
        when = "always" if edit.when is always else "--gpu nccl" if edit.when is with_cuda else "--gpu none"
        lines.append(f"{edit.name}  ({edit.file}; {when}; upstream: {edit.upstream})\n    {edit.why}")
    return "\n".join(lines)
