"""How many random inputs a test tries: a few in the usual run, all that it names in `make test-all` (TEST_ALL=1)."""

import os

from hypothesis import settings

ALL = os.environ.get("TEST_ALL") == "1"
USUAL_SHARE, USUAL_LEAST = 10, 5
if not ALL:
    settings.register_profile("sample", max_examples=10)
    settings.load_profile("sample")


def examples(most: int) -> int:
    """Return the number of random inputs for a test that tries `most` of them in `make test-all`."""
    return most if ALL else min(most, max(USUAL_LEAST, most // USUAL_SHARE))


def seeds(count: int) -> range:
    """Return the seeds of a test that draws its own inputs: the first alone in the usual run."""
    return range(count if ALL else 1)


def first_of(values: list[str], usual: int) -> list[str]:
    """Return the cases of a test, of which the usual run takes the first ones."""
    return values if ALL else values[:usual]


def every_fifth(values: list[str]) -> list[str]:
    """Return the cases of a test that crosses two long lists: all of them, or every fifth in the usual run."""
    return values if ALL else values[::5]
