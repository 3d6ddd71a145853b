"""Test prompts of this gateway's own, sent through its connector: does a hand-over between these two engines work?

A canary is a long prompt that nobody has sent before, answered greedily with a few tokens. Whether its KV cache was
fetched or computed again, how long that took, and whether the answer is that of the decoder alone, tells of a pair
what no answer to a client does. The doctor sends one through every pair; in a running gateway CanaryWatch does.
"""

from proxy.fleet.canary.canary import Canary, CanaryResult
from proxy.fleet.canary.compare import Agreement, agreement
from proxy.fleet.canary.prompt import CanaryPrompt, prompt_bytes
from proxy.fleet.canary.watch import CanaryOutcome, CanaryWatch

__all__ = [
    "Agreement",
    "Canary",
    "CanaryOutcome",
    "CanaryPrompt",
    "CanaryResult",
    "CanaryWatch",
    "agreement",
    "prompt_bytes",
]
