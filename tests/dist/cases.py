"""What the ranks of the distributed tests do. ``python -m tests.dist.cases CASE RESULT ARGS``, one process a rank."""

from __future__ import annotations

from typing import Any

from tests.dist import evaluation_cases, making, precision_cases, state_cases, strategy_cases


def main(known: dict[str, Any]) -> None:
    """``known``: more cases by name."""
    making.main(
        {**vars(strategy_cases), **vars(state_cases), **vars(evaluation_cases), **vars(precision_cases), **known}
    )


if __name__ == "__main__":
    main(globals())
