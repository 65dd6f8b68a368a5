"""What samples answers from a model: the engine protocol, a local engine, and engines over model servers."""
