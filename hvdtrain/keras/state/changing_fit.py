"""What a `fit` of an elastic job cannot do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvdtrain.comm.elastic import Elastic
from hvdtrain.core.errors import ConfigError
from hvdtrain.keras.backends.session import KerasSession, is_built, leaves_of, optimizers_of
from hvdtrain.keras.data.loader import KerasLoader
from hvdtrain.keras.data.sources import DatasetBatches
from hvdtrain.keras.data.walked import WalkedLoader

RULE = "an elastic job trains one Keras model, in one fit that can do a batch once more"


def check_elastic(model: keras.Model, session: KerasSession, its: Elastic, callbacks: Sequence[Any]) -> None:
    """Looks at a `fit` before it begins.

    Raises:
        ConfigError: it could not go on with other ranks.
    """
    data = session.fitted
    dealt = isinstance(data, KerasLoader) and not isinstance(data, WalkedLoader)
    by_index = dealt and not isinstance(data.source, DatasetBatches)
    kinds = {type(callback).__name__ for callback in callbacks}
    optimizers = [leaf for optimizer in optimizers_of(model) for leaf in leaves_of(optimizer)]
    needs = {
        "one fit in the program, of one model": its.member is None,
        "fit(hvdtrain.keras.loader(...)) of arrays or of a PyTorch Dataset with a length": by_index,
        "callbacks=[*hvdtrain.keras.callbacks(model), ...]": {"Start", "Epoch", "Count"} <= kinds,
        "no BackupAndRestore (new ranks get their state from the others)": "BackupAndRestore" not in kinds,
        "a model that is built before fit (keras.Input, or model.build(shape))": is_built(model),
        "sync_batchnorm=False, and no synchronized=True": all(hook is None for _, hook in session.moments),
        "optimizers without gradient_accumulation_steps": not any(
            leaf.gradient_accumulation_steps for leaf in optimizers
        ),
        "to begin with a whole epoch": data is None or data.done(session.first_epoch) == 0,
    }
    wrong = [need for need, met in needs.items() if not met]
    if wrong:
        raise ConfigError(
            RULE,
            f"it needs {'; '.join(wrong)}",
            "leave --min-np, --max-np and --host-discovery out: --max-restarts goes on from the last checkpoint",
            shared=True,
        )
