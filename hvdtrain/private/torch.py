"""The parts of PyTorch that it does not document."""

from __future__ import annotations

import torch
from torch._utils import ExceptionWrapper
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils.data._utils import worker as data_worker

DisableTorchFunction = torch._C.DisableTorchFunction
current_autograd_node = torch._C._current_autograd_node
storage_use_count = torch._C._storage_Use_Count
top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
profiler_enabled = torch.autograd._profiler_enabled
execution_engine = torch.autograd.Variable._execution_engine
multiply_each_ = torch._foreach_mul_
gpu_index = torch.cuda._utils._get_device_index
canonical_mask = torch.nn.functional._canonical_mask
detect_is_causal_mask = torch.nn.modules.transformer._detect_is_causal_mask
sequence_length = torch.nn.modules.transformer._get_seq_len

__all__ = [
    "DeviceContext", "DisableTorchFunction", "ExceptionWrapper", "TorchDispatchMode", "canonical_mask",
    "current_autograd_node", "data_worker", "detect_is_causal_mask", "dispatch_modes", "execution_engine",
    "function_modes", "gpu_index", "multiply_each_", "profiler_enabled", "pytree", "sequence_length",
    "storage_use_count", "top_saved_tensors_hooks",
]  # fmt: skip
ATTRIBUTES = {
    "module": "_backward_hooks _backward_pre_hooks _buffers _call_impl _compiled_call_impl _flat_weights"
    " _flat_weights_names _forward_hooks _forward_pre_hooks _load_state_dict_post_hooks _load_state_dict_pre_hooks"
    " _modules _non_persistent_buffers_set _orig_mod _parameters _replicate_for_data_parallel"
    " _state_dict_hooks _state_dict_pre_hooks _wrapped_call_impl",
    "tensor": "_backward_hooks _post_accumulate_grad_hooks _version",
    "storage": "_cdata",
    "node of a graph": "_input_metadata _saved_dim _saved_exponent _saved_ignore_index _saved_ord _saved_other"
    " _saved_reduction _saved_self _saved_self_sym_sizes _saved_target _saved_total_weight _saved_weight",
    "operator": "_local_scalar_dense _schema",
    "learning-rate scheduler": "_wrapped_by_lr_sched",
    "data loader": "_iterator _on_queue_feeder_error _shutdown _shutdown_workers",
    "worker of a data loader": "_worker_info",
}
