"""What the ranks of a comparison do. Imports torch; what follows from it is in `allranks.compare`."""
