"""`tune_knobs.py KNOBS FLAG ...`: `hvdtrain bench train --tune` with knobs of the test's: JSON, values by variable.

Neither budget nor machine decides what is tried, and three rounds tell.
"""

from __future__ import annotations

import json
import sys
from unittest import mock

from hvdtrain.__main__ import main
from hvdtrain.bench import tune
from hvdtrain.pipeline.tuning import search

if __name__ == "__main__":
    wanted = json.loads(sys.argv[1])
    knobs = [tune.Knob(name, [name], values) for name, values in wanted.items()]
    sys.argv[1:] = ["bench", "train", "--tune", "-np", "2", "--budget", "10000", *sys.argv[2:]]
    rounds = {"TRIED": (3, 3), "CONFIRMED": (3, 3)}
    with mock.patch.object(search, "LEAST", 3), mock.patch.multiple(tune, knobs_of=lambda *_, **__: knobs, **rounds):
        sys.exit(main())
