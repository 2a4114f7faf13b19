"""The page of faults names tests that there are, so that none of them goes unseen."""

import re
from pathlib import Path

from tests.helpers import ROOT


def test_each_of_the_thirty_faults_has_tests_and_each_of_them_exists() -> None:
    rows = re.split(
        r"^\d+\. ", (ROOT / ".github/FAULTS.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )[1:]
    assert len(rows) == 30
    for row in rows:
        tests = re.findall(r"^    - `(\S+)::(\w+)`$", row, re.MULTILINE)
        assert tests, row
        for file, name in tests:
            assert f"def {name}(" in (Path(__file__).parent / file).read_text(encoding="utf-8"), (
                name
            )
