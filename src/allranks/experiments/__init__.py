"""Compare strategies: gates, figures, a communication model, and output tables."""
