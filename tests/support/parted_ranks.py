"""What ranks that part are told, and how soon."""

from __future__ import annotations

NAMED_WITHIN_S = 10.0
RULE = "every rank must come to the same collective operation"
# each ends the job; the text that names what rank 1 does
ENDING = {
    "save_on_rank_0": "in update 1 of model 1",
    "one_continues": "at the end of out_of_step.py",
    "one_breaks": "in gather",
    "uneven_loader": "at the end of out_of_step.py",
    "one_trains_more": "in update 7 of model 1",
    "one_ends_early.atexit": "at the end of out_of_step.py",
    "one_prepares_more": "in gather",
}
