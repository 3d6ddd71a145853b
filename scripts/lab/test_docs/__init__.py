"""scripts/test-docs: the commands of README.md and OPERATING.md, run."""
