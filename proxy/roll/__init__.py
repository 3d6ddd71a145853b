"""`pdproxy roll`: the instances of a role are restarted one after the other, while their gateways serve."""

from proxy.roll.command import main
from proxy.roll.gateways import Gateways, GatewayTrouble
from proxy.roll.progress import Progress
from proxy.roll.walk import Limits, RollStopped, Walk

__all__ = ["GatewayTrouble", "Gateways", "Limits", "Progress", "RollStopped", "Walk", "main"]
