"""Packages that cannot work together, known from their versions alone. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec


class Clash(msgspec.Struct, frozen=True, kw_only=True):
    """Two packages that do not fit, what happens, and the cure."""

    packages: dict[str, str]
    problem: str
    cure: str

    def __str__(self) -> str:
        named = " with ".join(f"{name} {version}" for name, version in self.packages.items())
        return f"{named}: {self.problem}; {self.cure}"


# package, its first version that knows NumPy 2, what an older one does
_NUMPY_2 = (
    ("datasets", "2.21", "formatting calls np.array(copy=False), which NumPy 2 refuses: 'Unable to avoid copy while creating an array'"),
    ("torch", "2.3", "it was compiled against NumPy 1 and cannot exchange arrays: 'Numpy is not available'"),
    ("pandas", "2.2.2", "it was compiled against NumPy 1 and does not import: 'numpy.dtype size changed'"),
    ("pyarrow", "16.0", "it was compiled against NumPy 1 and does not import: '_ARRAY_API not found'"),
)  # fmt: skip


def clashes(packages: Mapping[str, str]) -> list[Clash]:
    """Every known clash in a list of packages with their versions."""
    found = []
    numpy = packages.get("numpy")
    if numpy is not None and parse(numpy) >= (2,):
        for name, first_good, problem in _NUMPY_2:
            have = packages.get(name)
            if have is not None and parse(have) < parse(first_good):
                cure = f"pip install 'numpy<2', or '{name}>={first_good}'"
                found.append(Clash(packages={name: have, "numpy": numpy}, problem=problem, cure=cure))
    return found


def differences(here: Mapping[str, str], there: Mapping[str, str], names: tuple[str, ...]) -> list[str]:
    """Packages of `names` whose versions differ between two machines, as words."""
    return [
        f"{name} is {here.get(name, 'missing')} here and {there.get(name, 'missing')} there"
        for name in names
        if here.get(name) != there.get(name)
    ]


def parse(version: str) -> tuple[int, ...]:
    """The release numbers of a version: ``2.3.1+cpu`` is (2, 3, 1)."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in release.group().split(".")) if release else ()
