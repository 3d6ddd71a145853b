"""Replays over real sockets: programs in front of engines that answer when the model of their hardware says so."""
