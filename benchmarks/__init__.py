"""Side-by-side measurements. Run them as modules from the repository's root; see README.md here."""
