"""`pdproxy roll`: restarts the instances of a role one after the other, while the gateways serve."""

from proxy.tools.roll.command import main
from proxy.tools.roll.gateways import Gateways, GatewayTrouble
from proxy.tools.roll.walk import Limits, RestartWalk, RoleWalk, RollProgress, RollStopped, Walk

__all__ = [
    "GatewayTrouble",
    "Gateways",
    "Limits",
    "RestartWalk",
    "RoleWalk",
    "RollProgress",
    "RollStopped",
    "Walk",
    "main",
]
