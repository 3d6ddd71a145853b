"""Who serves a request: backends, their loads and their health. No IO and no await in here."""
