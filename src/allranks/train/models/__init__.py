"""Build models: weights, adapters, mixture of experts, losses."""
