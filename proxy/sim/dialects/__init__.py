"""What vLLM and SGLang read and write: requests, answers, errors."""
