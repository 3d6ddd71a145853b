"""Formats on the wire. No IO in here."""
