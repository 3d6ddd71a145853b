"""The requests, answers and errors of vLLM and SGLang, for simulated engines."""
