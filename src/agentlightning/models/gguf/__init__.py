"""GGUF, the model files of llama.cpp and Ollama: converted to a checkpoint of transformers, and written from one."""
