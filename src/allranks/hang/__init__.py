"""Ranks that stand still: a heartbeat, a bounded silence, evidence before anything is killed, and a verdict."""
