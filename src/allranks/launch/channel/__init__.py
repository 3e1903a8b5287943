"""The control channel of a run: agents report to the driver and receive its orders over one authenticated TCP connection each."""
