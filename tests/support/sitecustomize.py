"""Python reads this when it starts in a test: its garbage collector looks less often, so that frameworks load in two
thirds of the time (they make half a million objects, none of them garbage). Tests of leaks collect by themselves."""

import gc

gc.set_threshold(50_000, 20, 20)
