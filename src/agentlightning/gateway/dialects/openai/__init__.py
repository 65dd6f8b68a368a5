"""OpenAI's wire formats: chat completions, completions, embeddings and responses."""
