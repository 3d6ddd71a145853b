"""`pdproxy roll`: restarts the instances of a role one after the other, while the gateways serve."""

from proxy.tools.roll.command import main
from proxy.tools.roll.gateways import GatewayGroup, GatewayProblem
from proxy.tools.roll.walk import FleetWalk, RestartWalk, RoleWalk, RollLimits, RollProgress, RollStopped

__all__ = [
    "FleetWalk",
    "GatewayGroup",
    "GatewayProblem",
    "RestartWalk",
    "RoleWalk",
    "RollLimits",
    "RollProgress",
    "RollStopped",
    "main",
]
