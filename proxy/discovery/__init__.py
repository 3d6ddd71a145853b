"""Which instances there are, and how they are: they are found, waited for and probed here."""
