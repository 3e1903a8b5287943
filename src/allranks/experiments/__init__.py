"""A comparison of strategies that can be believed: gates, figures, a model of communication, and how they are shown."""
