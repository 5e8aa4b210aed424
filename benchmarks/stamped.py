"""A scheduler whose null engine notes when it made each token: `python -m benchmarks.stamped FILE -- FLAGS`.

Each line of the file is ``uid/choice index nanoseconds``, on the clock that all processes of a machine share.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cli.main import main as run
from workers.engine.null import NullEngine
from workers.engine.types import Output


def install(path: Path) -> None:
    """Makes every null engine of this process write to ``path``."""
    file = path.open("w", buffering=1)
    step = NullEngine.step

    def stamped(self: NullEngine) -> list[Output]:
        outputs = step(self)
        now = time.perf_counter_ns()
        if outputs:
            file.write("".join([f"{out.key} {out.index} {now}\n" for out in outputs]))
        return outputs

    NullEngine.step = stamped  # type: ignore[method-assign]


def main(arguments: Sequence[str]) -> int:
    """Runs the scheduler."""
    install(Path(arguments[0]))
    return run(["scheduler", *arguments[2:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
