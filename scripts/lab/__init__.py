"""The programs behind scripts/: one package for each command, called like it, and what they share in `common`."""
