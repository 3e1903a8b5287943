"""How the GPUs and network cards of one machine are wired, from what ``nvidia-smi topo -m`` prints.

records.py   devices and links
source.py    the text: a file, standard input, or the driver of this machine
cells.py     one line's words: link types, core ranges, escape codes
parse.py     text -> Topology, with what was not understood
draw.py      the picture in a terminal      svg.py   the same as SVG
advise.py    Topology -> NCCL variables, each with reason, source and risk
"""
