"""`allranks torchrun`: torchrun's own command line, without a spec. `options` reads it, `request` makes the run."""
