"""A stream of bytes into the lines a reader wants to see: progress bars that rewrite their line do not flood them."""

from __future__ import annotations

LONGEST_BYTES = 1 << 16  # a line without an end is cut there
REWRITTEN_EVERY_S = 5.0  # how often a line that is rewritten in place ("\r") is shown while it is


class LineSplitter:
    """Splits what one process writes to one stream.

    Of a line that is rewritten with "\\r" the last state counts, as on a terminal; while it is being rewritten, one
    state every few seconds is passed on, so that a long epoch shows life.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._shown_s = float("-inf")

    def feed(self, data: bytes, now_s: float) -> list[str]:
        """Return the lines that are complete with `data`; `now_s` is a monotonic clock's."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        lines = [_text(line) for line in whole]
        held = b"\r" if self._rest.endswith(b"\r") else b""  # perhaps the first half of "\r\n"
        *rewritten, last = self._rest.removesuffix(b"\r").split(b"\r")
        if rewritten and now_s - self._shown_s >= REWRITTEN_EVERY_S:
            lines.append(_text(rewritten[-1]))
            self._shown_s = now_s
        self._rest = last + held
        while len(self._rest) > LONGEST_BYTES:
            lines.append(_text(self._rest[:LONGEST_BYTES]))
            self._rest = self._rest[LONGEST_BYTES:]
        return lines

    def close(self) -> list[str]:
        """Return the last line, if the stream ended within one."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest.strip(b"\r") else []


def _text(line: bytes) -> str:
    return next((part for part in reversed(line.split(b"\r")) if part), b"").decode(errors="replace")
