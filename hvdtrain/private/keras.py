"""The parts of Keras that it does not document."""

from __future__ import annotations

import keras
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.callbacks.callback_list import CallbackList
from keras.src.losses import loss as keras_loss
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random.seed_generator import global_seed_generator
from keras.src.saving import saving_lib
from keras.src.saving.saving_lib import H5IOStore
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics
from keras.src.trainers.data_adapters import data_adapter_utils, is_tf_dataset, is_torch_dataloader
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.epoch_iterator import EpochIterator
from keras.src.utils.rng_utils import GLOBAL_RANDOM_SEED

if keras.backend.backend() == "torch":
    from keras.src.backend.torch.trainer import TorchEpochIterator as BackendEpochIterator
else:
    from keras.src.backend.tensorflow.trainer import TFEpochIterator as BackendEpochIterator

get_keras_mask, set_keras_mask = keras.src.backend.get_keras_mask, keras.src.backend.set_keras_mask

__all__ = [
    "GLOBAL_RANDOM_SEED", "BackendEpochIterator", "BaseOptimizer", "CallbackList", "CompileLoss", "CompileMetrics",
    "DataAdapter", "EpochIterator", "H5IOStore", "data_adapter_utils", "get_keras_mask", "global_seed_generator",
    "global_state", "in_stateless_scope", "is_tf_dataset", "is_torch_dataloader", "keras_loss", "saving_lib",
    "set_keras_mask",
]  # fmt: skip
ATTRIBUTES = {
    "model": "_call_has_training_arg _compile_loss _compile_metrics _compute_loss _eval_epoch_iterator _flatten_layers"
    " _flatten_metrics_in_order _initial_epoch _loss_tracker _symbolic_build _use_cached_eval_dataset",
    "compiled loss": "_user_loss _user_loss_weights",
    "optimizer": "_accumulated_gradients _clip_gradients _iterations _learning_rate _trainable_variables",
    "epoch iterator": "_current_iterator _distributed_dataset _enumerate_iterator _get_iterator",
    "callback": "_batches_seen_since_last_saving _is_default _last_batch_seen",
    "batch normalization": "_moments _reduction_axes",
    "HDF5 store": "_get_h5_file",
}
