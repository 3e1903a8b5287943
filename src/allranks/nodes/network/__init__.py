"""What is observed about the nodes' network: the network that all are on, failing links, hardware facts, and what the
ranks used.

choose.py         the network that every node is on
links.py          failing nodes and links, from connections between a sample of the nodes
facts.py          facts for the rules of `planning.network_policy`, and the policy of a run
copy_results.py   the last copy tests between the GPUs of this machine
traffic.py        the network that the ranks used, compared with the policy
"""
