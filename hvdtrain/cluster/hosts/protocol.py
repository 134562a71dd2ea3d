"""The messages between the launcher and the agent on a host: JSON, a line each, over the agent's stdin and stdout.

Each message is an object whose "type" is one of these. It begins with the connection's mark (`mark_of`), which a
log-in cannot print by accident. The launcher sends nothing before the agent's first message: a log-in that reads its
input cannot consume the agent's messages.

To the agent:
  settings    start_s lost_s stopped_s grace_s        limits: silence, a stopped rank, from SIGTERM to SIGKILL
  rendezvous  address places serial                   serve Horovod's rendezvous there, no longer where it was; places
                                                      null: nowhere
  input       data                                    a piece, in base64, of every rank's standard input
  start       argv cwd env defaults without ranks     `env` wins over the agent's own environment (less `without`),
              token own peer                          which wins over `defaults`; ranks: [{rank, env}]; `token` marks
                                                      their environment; `peer` is to be reached from `own`, or null
  peer        own peer                                as in `start`, from now on
  tell        rank say                                an object, for the rank's line
  answers     data                                    a piece, in base64, of what workers that join later read
  taken       count                                   messages "out" that the launcher has shown
  signal      number rank                             pass it to all ranks, or to `rank`
  end         signal grace_s                          end everything, then the agent
  beat                                                the launcher is alive
From the agent:
  hello       python version host interfaces reached cores own
                                                      interfaces, reached: as the probe has them; own: {variable:
                                                      digest}, what ranks here would inherit
  rendezvous  port serial
  failed      rank what                               it could not be started (rank null: the rendezvous)
  out         rank stream lines                       "stdout", "stderr", or "result" of ranks with an input; at most
                                                      WINDOW that are not taken
  worker      rank said                               an object that came over the rank's line
  exit        rank code ago_s                         code as `subprocess` has it: negative for a signal
  stopped     rank for_s                              by SIGSTOP; sent once
  cut         for_s peer                              `peer` is not reached any more; sent once
  left        what                                    processes that it may not end
  leaving     why                                     it ends the job here without a message "end"
  ended                                               no process of the job remains on this host
  beat
A side that receives nothing for `lost_s` takes the other for dead; an end of file means the same at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BEAT_S = 1.0
WINDOW = 64  # messages of output on their way: a launcher whose reader pauses is never behind by more

Message = Mapping[str, Any]


def mark_of(token: str) -> bytes:
    """Returns what each message of a connection begins with: not the token itself, as a shell may print its command."""
    return token[::-1].encode()
