"""The runs behind scripts/client-tools: clients of others in front of this gateway.

deployments    simulated engines, and the gateway in front of them
tools          load generators: their command lines, and what they say in the end
tokenizer      a small tokenizer, because the tools count tokens themselves (run by the Python of the peers)
libraries      programs/, in which clients' libraries do what they can do
coding_agents  Claude Code, Codex and opencode, which read a PDF and a picture and edit a file
evaluations    lm-eval
"""
