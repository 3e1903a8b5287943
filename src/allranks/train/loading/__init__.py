"""Weights from files or from a config, without a whole copy of the model on every rank.

files     what a folder's safetensors files hold, checked before anything is read (no torch)
recipes   which stored tensors make which of the model's
skeleton  a model that has its shapes but no weights yet
source    where weights come from, one tensor at a time
filler    gives them to the ranks: whole, or to each its part; and shows that nothing was lost on the way
opening   the whole way, for one process or for all ranks
"""
