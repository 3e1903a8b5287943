"""Run the ranks' side of `allranks compare`."""
