"""TODO"""

from __future__ import annotations

from allranks.train.strategies.deepspeed_engine import DeepSpeedZero


class DeepSpeedZero2(DeepSpeedZero):
    """TODO"""

    stage = 2
    replicated, lockstep = True, False
    claims_overlap = False
