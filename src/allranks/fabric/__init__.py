"""The network between the ranks: what each node has, which variables follow from it, and what the ranks then really got.

decision.py      one variable: value or left alone, reason, source, risk
facts.py         what a node has
gather.py        the probes' answers -> facts
sockets.py, rdma.py, gids.py, gpus.py    the rules, pure, one subject each
policy.py        all rules over all nodes of a job
report.py        the same as lines for people
observed.py      what NCCL and Gloo say in the ranks' logs
judge.py         expected against observed
"""

from __future__ import annotations
