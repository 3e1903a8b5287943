"""Monitor running ranks: heartbeats, hang detection, telemetry."""
