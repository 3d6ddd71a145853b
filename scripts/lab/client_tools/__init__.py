"""The runs behind scripts/client-tools: the engines' own load generators as clients of this gateway.

deployments  simulated engines, and the gateway in front of them
tools        the load generators: their command lines, and what they say in the end
sglang       the client side of SGLang, out of its wheel and without what engines need
tokenizer    a small tokenizer, because the tools count tokens themselves (run by the Python of the peers)
"""
