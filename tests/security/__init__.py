"""Attacks by other local users and by hostile input. Each test succeeds only because the attack fails."""
