"""scripts/slow-clients: what slow clients do to others."""
