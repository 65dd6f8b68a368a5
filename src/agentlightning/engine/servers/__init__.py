"""Engines over model servers: clients of vLLM and SGLang, and a pool of replicas with failover and weight updates."""
