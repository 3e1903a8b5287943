"""Helpers that know nothing about runs: text, input files, file system, redaction, machine facts."""
