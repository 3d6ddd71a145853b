"""scripts/client-tools: run other programs as clients of pdproxy.

tools          simulated engines, the gateway, and load generators
  tokenizer      a small tokenizer for tools that count tokens (runs in their environment)
  coding_agents  client libraries (programs/), and Claude Code, Codex and opencode
  evaluations    lm-eval
"""
