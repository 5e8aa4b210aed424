"""Programs of checks, run where their client is installed, and what came of them."""

from __future__ import annotations

import re
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass

from tests.compat.rooms import PROGRAMS, FailedError, NodeRoom, PythonRoom


@dataclass(frozen=True, slots=True)
class Tally:
    """How many checks passed, and why the others did not run; a failed one is an error."""

    passed: int
    skipped: int
    reasons: tuple[str, ...]

    @property
    def result(self) -> str:
        """In a few words."""
        return f"{self.passed} passed" + (f", {self.skipped} skipped" if self.skipped else "")


def python_suite(room: PythonRoom, name: str, env: Mapping[str, str]) -> Tally:
    """Runs ``programs/<name>.py`` with pytest. Raises `FailedError`."""
    report = room.folder / f"{name}.xml"
    report.unlink(missing_ok=True)
    printed = room.run(
        *(room.bin / "python", "-m", "pytest", "-q", "-c", PROGRAMS / "pytest.ini"),
        *("--confcutdir", PROGRAMS, "-p", "no:cacheprovider", f"--junitxml={report}"),
        PROGRAMS / f"{name}.py",
        env=env,
        fails=True,
    )
    if not report.exists():
        raise FailedError(printed[-6000:])
    suite = ET.parse(report).getroot().find("testsuite")
    assert suite is not None
    ran, bad = int(suite.attrib["tests"]), int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    skipped = [each.attrib.get("message", "") for each in suite.iter("skipped")]
    if bad or ran == len(skipped):
        raise FailedError(printed[-6000:])
    return Tally(ran - len(skipped), len(skipped), tuple(sorted(set(skipped))))


def node_suite(room: NodeRoom, name: str, env: Mapping[str, str]) -> Tally:
    """Runs ``programs/<name>.mjs`` with Node's own runner. Raises `FailedError`."""
    program = room.folder / f"{name}.mjs"  # modules are looked for from where the program is
    shutil.copyfile(PROGRAMS / f"{name}.mjs", program)
    printed = room.run("node", "--test", "--test-reporter=tap", program, env=env)
    counts = {word: int(count) for word, count in re.findall(r"^# (pass|fail|skipped) (\d+)$", printed, re.M)}
    if counts["fail"] or not counts["pass"]:
        raise FailedError(printed[-6000:])
    return Tally(counts["pass"], counts["skipped"], ())
