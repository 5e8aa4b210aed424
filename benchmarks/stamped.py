"""A role that notes moments: `python -m benchmarks.stamped ROLE FILE -- FLAGS`.

Of a scheduler, when its null engine made each token: lines ``uid index nanoseconds``. Of an API process, when
it had written events to their socket: lines ``uid events nanoseconds``, all but a stream's last write. Both
on the clock that all processes of a machine share.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from api.wire import Wire
from cli.main import main as run
from workers.engine.null import NullEngine
from workers.engine.types import Output

_ID = b'"id":"cmpl-'


def stamp_tokens(path: Path) -> None:
    """Makes every null engine of this process write to ``path``."""
    file = path.open("w", buffering=1)
    step = NullEngine.step

    def stamped(self: NullEngine) -> list[Output]:
        outputs = step(self)
        now = time.perf_counter_ns()
        if outputs:
            lines = [f"{out.key.partition('/')[0]} {out.index} {now}\n" for out in outputs]
            file.write("".join(lines))
        return outputs

    NullEngine.step = stamped  # type: ignore[method-assign]


def stamp_writes(path: Path) -> None:
    """Makes every stream of this process write to ``path``."""
    file = path.open("wb")
    write_now = Wire.write_now

    def stamped(self: Wire, piece: bytes) -> None:
        write_now(self, piece)
        now = time.perf_counter_ns()
        start = piece.find(_ID) + len(_ID)
        file.write(b"%b %d %d\n" % (piece[start : piece.index(b'"', start)], piece.count(b"data: {"), now))

    Wire.write_now = stamped  # type: ignore[method-assign]


def main(arguments: Sequence[str]) -> int:
    """Runs the role."""
    role, path = arguments[0], Path(arguments[1])
    if role == "api":
        stamp_writes(path)
    else:
        stamp_tokens(path)
    return run([role, *arguments[3:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
