"""Weights from files or from a config, without a whole copy of the model on every rank.

files     what a folder's safetensors files hold, checked before anything is read (no torch)
recipes   which stored tensors make which of the model's
skeleton  a model that has its shapes but no weights yet
source    where weights come from, one tensor at a time
reader    one rank reads, and all hear what came of it
filler    gives weights to the ranks: whole, or to each its part
tally     shows that nothing was lost on the way
opening   the whole way up to a model whose weights are on their way
setup     a strategy on such a model
"""
