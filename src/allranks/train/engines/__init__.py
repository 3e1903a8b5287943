"""Engines that run the optimizer steps in place of `train.loop`."""
