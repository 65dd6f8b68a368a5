"""Clients of model servers: vLLM and SGLang, and vLLM as a child process."""
