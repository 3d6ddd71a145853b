"""The sub-commands for operators."""
