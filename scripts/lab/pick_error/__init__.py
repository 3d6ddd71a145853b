"""scripts/pick-error: bursts in front of one worker and of several, and how far off their picks are."""
