"""TODO"""

from __future__ import annotations

from allranks.train.strategies.deepspeed_engine import DeepSpeedZero


class DeepSpeedZero1(DeepSpeedZero):
    """TODO"""

    stage = 1
    replicated, lockstep = True, False
    claims_overlap = False
